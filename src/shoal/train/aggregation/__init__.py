"""Combine the gradients of all ranks."""
