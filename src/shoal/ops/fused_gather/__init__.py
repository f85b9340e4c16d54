"""Vectors of several tables, copied from one flat buffer by float offsets."""

from shoal.ops.fused_gather.op import fused_gather_embeddings_by_input, fused_gather_embeddings_by_input_gradient

__all__ = ["fused_gather_embeddings_by_input", "fused_gather_embeddings_by_input_gradient"]
