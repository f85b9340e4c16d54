"""Gradients of all ranks into one."""
