"""The load client: drives any server with an OpenAI-shaped API and says what its clients saw."""
