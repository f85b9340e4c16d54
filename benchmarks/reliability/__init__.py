"""Faults applied to real processes, and their cost: `make chaos`, `python -m benchmarks.reliability`."""
