"""Budgets: how much a table may hold, and which rows leave when it is full."""
