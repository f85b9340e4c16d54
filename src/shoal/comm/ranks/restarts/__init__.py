"""Ranks that a launcher starts again: how they find each other, and notice who is lost."""
