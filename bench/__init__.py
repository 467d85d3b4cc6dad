"""Benchmarks: what lqs costs, and how it stands beside its peers."""
