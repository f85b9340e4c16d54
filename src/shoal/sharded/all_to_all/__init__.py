"""Tables whose rows are spread over the ranks of a process group."""
