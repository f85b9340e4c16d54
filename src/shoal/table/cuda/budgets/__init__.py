"""Budgets of tables in GPU memory: limits, evictions and their reports, and rows restored from checkpoints."""
