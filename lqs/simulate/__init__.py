"""Plays a trace through the very scheduler that serves, with device slots that are models."""
