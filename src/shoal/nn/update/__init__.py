"""Writing rows: the gradients of a backward pass, those that wait for a step, and when an update happens."""
