"""Budgets of tables in GPU memory: limits, what leaves and who is told, and rows that come back from checkpoints."""
