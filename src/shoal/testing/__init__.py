"""Helpers for our tests and our users' tests."""
