"""Benchmarks, one file per subject; run one with `python -m benchmarks NAME`."""
