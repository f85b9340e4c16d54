"""The original system's distributed tables, layouts, queues and gradient driver, under their own names."""
