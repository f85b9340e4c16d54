"""A process's rank, devices and settings, as its launcher sets them."""
