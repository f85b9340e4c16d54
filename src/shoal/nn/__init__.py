"""Modules that people write models with."""
