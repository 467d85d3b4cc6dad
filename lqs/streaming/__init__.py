"""Carries what a request produces from the desk to the client that waits for it."""
