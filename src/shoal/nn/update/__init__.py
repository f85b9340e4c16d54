"""Updating rows: the gradients of a backward pass, gradients pending for a step, and the number and time of updates."""
