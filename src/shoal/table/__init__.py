"""Local embedding tables."""
