"""Removing duplicate ids and distributing them to shards."""

from shoal.ops.reorder.op import FusedReorder, fused_reorder_by_indices, reorder_by_indices

__all__ = ["FusedReorder", "fused_reorder_by_indices", "reorder_by_indices"]
