"""The next batches, made ready while a step runs: read, moved to the device, their ids located, their rows fetched."""
