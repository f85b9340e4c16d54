"""The loop behind `shoal train`: configuration, tables, metrics, checkpoints and reports."""
