"""Background threads: one that reads an iterable ahead, and one that runs tasks in order."""
