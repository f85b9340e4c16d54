"""The messages on the wire and in files."""
