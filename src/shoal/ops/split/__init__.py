"""Dealing rows out to parts by an index per row."""

from shoal.ops.split.op import ragged_split_by_indices, split_by_indices

__all__ = ["ragged_split_by_indices", "split_by_indices"]
