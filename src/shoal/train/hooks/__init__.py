"""Calls around a training loop that keep ranks in step."""
