"""lqs: a queue server for local language models."""
