"""Prepare the next batches while a step runs: read them, move them to the device, locate ids and fetch rows."""
