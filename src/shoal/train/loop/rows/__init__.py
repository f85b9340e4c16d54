"""The rows of a run: in this process, over ranks, or on parameter servers."""
