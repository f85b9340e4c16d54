"""Budgets: how much a table can hold, and which rows it evicts when it is full."""
