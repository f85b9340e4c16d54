"""Checkpoints and logs of parameter servers in an object store, from which an empty host can be filled."""
