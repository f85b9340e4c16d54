"""The outer update: accepted payloads added up and applied inside a byte budget."""
