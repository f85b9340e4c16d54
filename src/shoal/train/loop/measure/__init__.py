"""What a run measures, and where it is written: metrics, evaluations, TensorBoard."""
