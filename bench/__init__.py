"""Measurements that a stranger can repeat."""
