"""Compares servers in one run with one client: alternating, each alone on the box."""
