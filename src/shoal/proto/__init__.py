"""The wire contract."""
