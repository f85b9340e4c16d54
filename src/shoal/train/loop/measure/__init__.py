"""Measurements of a run and their outputs: metrics, evaluations, TensorBoard."""
