"""Bytes, integers and tensors between ranks, each wait with a deadline."""
