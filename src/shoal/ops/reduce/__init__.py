"""Sums, means and norms of rows that belong together."""

from shoal.ops.reduce.by_index import (
    fused_reduce_sum_and_split,
    fused_sorted_segment_sum,
    reduce_mean,
    reduce_sqrtn,
    reduce_sum,
)
from shoal.ops.reduce.by_splits import fused_reduce_and_split_gpu

__all__ = [
    "fused_reduce_and_split_gpu",
    "fused_reduce_sum_and_split",
    "fused_sorted_segment_sum",
    "reduce_mean",
    "reduce_sqrtn",
    "reduce_sum",
]
