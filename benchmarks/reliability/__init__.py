"""Faults applied to real processes, and what they cost: `make chaos`, `python -m benchmarks.reliability`."""
