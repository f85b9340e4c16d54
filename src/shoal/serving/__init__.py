"""Replicas, and how fresh rows reach them."""
