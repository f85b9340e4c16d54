"""One file per claim; `python -m benchmarks NAME` runs it."""
