"""Ranks that a launcher restarts: how they find each other and notice lost ranks."""
