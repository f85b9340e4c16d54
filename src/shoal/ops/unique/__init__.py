"""Looking up every distinct key once and copying its vector to all its positions."""

from shoal.ops.unique.fill import fill_with_offset_map, fill_with_offset_map_gradient, finalize_shared_tensor
from shoal.ops.unique.shared import SharedTensor
from shoal.ops.unique.unique import UniqueKeys, unique_key_with_value_and_offset

__all__ = [
    "SharedTensor",
    "UniqueKeys",
    "fill_with_offset_map",
    "fill_with_offset_map_gradient",
    "finalize_shared_tensor",
    "unique_key_with_value_and_offset",
]
