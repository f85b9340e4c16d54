"""Work beside the caller: an iterable read ahead by a thread, and a thread that does what it is given in order."""
