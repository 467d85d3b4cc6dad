"""lqs: a self-hosted inference server for llama.cpp models that stays predictable under load."""
