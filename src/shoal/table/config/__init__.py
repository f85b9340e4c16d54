"""What a table is made of: segments, optimizers, initializers, compressors, rates."""
