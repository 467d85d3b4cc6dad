"""Kill drills: `python -m bench.drills`."""
