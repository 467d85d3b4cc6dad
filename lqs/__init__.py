<<<<<<< HEAD
"""An LLM queue server."""
=======
"""lqs: a queue server for local language models."""
>>>>>>> house
