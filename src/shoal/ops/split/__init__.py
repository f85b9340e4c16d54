"""Splitting rows into parts by one index per row."""

from shoal.ops.split.op import ragged_split_by_indices, split_by_indices

__all__ = ["ragged_split_by_indices", "split_by_indices"]
