"""An LLM queue server."""
