"""Table configuration: segments, optimizers, initializers, compressors and learning rates."""
