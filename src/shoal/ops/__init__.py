"""Distribution ops: pure functions on tensors, each with its gradient."""

from shoal.fid import make_v1, make_v2, slot_v1, slot_v2, v1_to_v2
from shoal.lazy import exports
from shoal.ops.aligned import ALIGN, aligned_flat_concat, aligned_flat_split
from shoal.ops.fused_gather import fused_gather_embeddings_by_input, fused_gather_embeddings_by_input_gradient
from shoal.ops.layout import flatten_layout, fused_embedding_to_layout, fused_embedding_to_layout_grad, nest_layout
from shoal.ops.lookup import (
    gather_embeddings_by_ids_gradient_back_prop,
    gather_embeddings_by_input,
    map_id_to_embedding,
    map_id_to_embedding_gradient_back_prop,
)
from shoal.ops.ragged_ops import fused_value_rowids, normalize_merged_split
from shoal.ops.reduce import (
    fused_reduce_and_split_gpu,
    fused_reduce_sum_and_split,
    fused_sorted_segment_sum,
    reduce_mean,
    reduce_sqrtn,
    reduce_sum,
)
from shoal.ops.reorder import FusedReorder, fused_reorder_by_indices, reorder_by_indices
from shoal.ops.sharding import ShardedFids, sharding_sparse_fids
from shoal.ops.split import ragged_split_by_indices, split_by_indices
from shoal.ops.unique import (
    SharedTensor,
    UniqueKeys,
    fill_with_offset_map,
    fill_with_offset_map_gradient,
    finalize_shared_tensor,
    unique_key_with_value_and_offset,
)
from shoal.proto.feature_configs import (
    FeatureConfig,
    FeatureConfigs,
    OutConfig,
    OutType,
    PoolingType,
    SliceConfig,
    TensorShape,
)
from shoal.ragged import Ragged

# Combiners are modules of the layer below; messages are the wire form of a batch. Both are imported on first use.
_LAZY, __getattr__, _ = exports(
    __name__,
    {
        "shoal.nn.combiners": ("Combiner", "FirstN", "ReduceMean", "ReduceSum"),
        "shoal.proto.example_pb2": (
            "Example",
            "ExampleBatch",
            "Feature",
            "FidList",
            "NamedFeature",
            "NamedFeatureList",
        ),
        "shoal.proto.instance_pb2": ("Instance",),
    },
)

__all__ = [
    "ALIGN",
    "FeatureConfig",
    "FeatureConfigs",
    "FusedReorder",
    "OutConfig",
    "OutType",
    "PoolingType",
    "Ragged",
    "ShardedFids",
    "SharedTensor",
    "SliceConfig",
    "TensorShape",
    "UniqueKeys",
    "aligned_flat_concat",
    "aligned_flat_split",
    "fill_with_offset_map",
    "fill_with_offset_map_gradient",
    "finalize_shared_tensor",
    "flatten_layout",
    "fused_embedding_to_layout",
    "fused_embedding_to_layout_grad",
    "fused_gather_embeddings_by_input",
    "fused_gather_embeddings_by_input_gradient",
    "fused_reduce_and_split_gpu",
    "fused_reduce_sum_and_split",
    "fused_reorder_by_indices",
    "fused_sorted_segment_sum",
    "fused_value_rowids",
    "gather_embeddings_by_ids_gradient_back_prop",
    "gather_embeddings_by_input",
    "make_v1",
    "make_v2",
    "map_id_to_embedding",
    "map_id_to_embedding_gradient_back_prop",
    "nest_layout",
    "normalize_merged_split",
    "ragged_split_by_indices",
    "reduce_mean",
    "reduce_sqrtn",
    "reduce_sum",
    "reorder_by_indices",
    "sharding_sparse_fids",
    "slot_v1",
    "slot_v2",
    "split_by_indices",
    "unique_key_with_value_and_offset",
    "v1_to_v2",
    *_LAZY,
]
