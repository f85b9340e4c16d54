"""Distribution ops: pure functions on tensors, each with its gradient."""

from shoal.lazy import exports
from shoal.ops import (  # noqa: F401 - their ops are registered with torch
    aligned,
    fused_gather,
    layout,
    lookup,
    ragged_ops,
    reduce,
    reorder,
    sharding,
    split,
    unique,
)

__all__, __getattr__, __dir__ = exports(__name__)
