"""Pipeline parallelism: a model's stages process micro-batches in turn."""
