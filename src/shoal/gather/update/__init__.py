"""The outer update: accepted payloads are summed and applied within a byte budget."""
