"""Data- and pipeline-parallel training pieces."""
