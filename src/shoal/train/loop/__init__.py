"""The loop behind `shoal train`: configuration, tables, metrics, checkpoints, and what is shown of it."""
