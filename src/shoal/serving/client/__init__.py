"""Calls to models that other processes serve."""
