"""The net of a version: run by torch, natively, compiled, or on a GPU."""
