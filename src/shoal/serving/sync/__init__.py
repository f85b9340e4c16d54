"""Sends fresh rows from a trainer to replicas."""
