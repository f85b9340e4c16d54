"""From the embeddings of sharded fids to the dense tensors that a model reads, in one op."""

from shoal.ops.layout.nest import flatten_layout, nest_layout
from shoal.ops.layout.op import fused_embedding_to_layout, fused_embedding_to_layout_grad

__all__ = ["flatten_layout", "fused_embedding_to_layout", "fused_embedding_to_layout_grad", "nest_layout"]
