"""The net of a version: as torch runs it, natively, compiled, or on a GPU."""
