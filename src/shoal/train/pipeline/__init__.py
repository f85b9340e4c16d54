"""Stages of a model that work off micro-batches in turn."""
