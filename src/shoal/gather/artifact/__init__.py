"""The canonical file of a window."""
