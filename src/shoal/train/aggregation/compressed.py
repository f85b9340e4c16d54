"""Average gradients of which each rank sends only the largest values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.launch.config import DistributedConfig
from shoal.comm.ranks.buffers import flat_bytes
from shoal.errors import CompressionError
from shoal.train.aggregation.aggregate import ExchangingAggregator, accumulator, find_problem, new_stats
from shoal.train.aggregation.compression import CompressedGradient
from shoal.train.aggregation.exchange import divide_


class CompressedAggregator(ExchangingAggregator):
    """Averages compressed gradients: their sum in rank order, divided by W.

    Each rank's indices (int32 if they fit) and values go to all others in one all_gather, so a rank sends
    ``k * (4 + 4) * (W - 1)`` bytes. ``last_stats["bytes_dense"]`` is the number of bytes that an all-reduce would have
    sent; compression sends fewer if ``k / n < 1 / W``.
    """

    def __init__(self, config: DistributedConfig, transport: Any, compressor: Any) -> None:
        super().__init__(config, transport)
        self.compressor = compressor

    def aggregate(self, local_gradients: Sequence[Tensor]) -> list[Tensor]:
        gradients = list(local_gradients)
        world = self.config.world_size
        memory = getattr(self.compressor, "memory", None)
        compressed: list[CompressedGradient] = []
        problem = find_problem(gradients)
        if problem is None:
            try:
                compressed = self.compressor.compress(gradients)
                problem = _find_mismatch(compressed, gradients)
            except Exception as error:
                problem = error
        if self._exchange is None:
            if problem is not None:
                raise problem
            self.last_stats = {**new_stats("local"), "bytes_dense": 0.0}
            return _sum(gradients, [compressed])
        with self._measured("compressed") as stats:
            try:
                counts = [len(c.indices) for c in compressed]
                self._agree(gradients, average=True, extra=counts, problem=problem)
                packed = pack(compressed)
                parts = self._exchange.all_gather(packed)
            except BaseException:
                if memory is not None:
                    self.compressor.memory = memory  # as if the failed round had not begun
                raise
            result = _sum(
                gradients, [compressed if r == self.config.rank else unpack(p, compressed) for r, p in enumerate(parts)]
            )
            stats["buckets"] = 1
        dense = sum(g.nbytes for g in gradients)
        self.last_stats["bytes_dense"] = 2 * (world - 1) * dense / world
        return result


def _find_mismatch(compressed: Sequence[CompressedGradient], gradients: Sequence[Tensor]) -> Exception | None:
    lengths, sizes = [c.original_len for c in compressed], [g.numel() for g in gradients]
    if lengths != sizes:
        return CompressionError(f"the compressor's original_len must be the gradients' sizes {sizes}, got {lengths}")
    return None


def _index_dtype(c: CompressedGradient) -> torch.dtype:
    return torch.int32 if c.original_len < 2**31 else torch.int64


def pack(compressed: Sequence[CompressedGradient]) -> Tensor:
    """Indices and values of all gradients as one uint8 tensor."""
    parts = [t for c in compressed for t in (c.indices.to(_index_dtype(c)), c.values) if t.numel()]
    device = compressed[0].values.device if compressed else None
    raw = [flat_bytes(p).to(device) for p in parts]
    return torch.cat(raw) if raw else torch.empty(0, dtype=torch.uint8, device=device)


def unpack(data: Tensor, like: Sequence[CompressedGradient]) -> list[CompressedGradient]:
    """The inverse of ``pack``, for a rank whose gradients have the lengths, counts and dtypes of ``like``."""
    result, at = [], 0
    for c in like:
        fields = []
        for dtype in (_index_dtype(c), c.values.dtype):
            end = at + len(c.indices) * dtype.itemsize
            fields.append(data[at:end].clone().view(dtype).to(c.values.device))  # view() needs the clone's alignment
            at = end
        indices = fields[0].to(torch.int64)
        low, high = (int(indices.min()), int(indices.max())) if len(indices) else (0, -1)
        if low < 0 or high >= c.original_len:
            bad = low if low < 0 else high
            raise CompressionError(f"indices from other ranks must be in [0, {c.original_len}), got {bad}")
        result.append(CompressedGradient(indices, fields[1], c.original_len))
    return result


def _sum(gradients: Sequence[Tensor], by_rank: Sequence[Sequence[CompressedGradient]]) -> list[Tensor]:
    result = []
    for i, gradient in enumerate(gradients):
        total = torch.zeros(gradient.numel(), dtype=accumulator(gradient.dtype), device=gradient.device)
        for compressed in by_rank:
            c = compressed[i]
            total.index_add_(0, c.indices, c.values.to(total.dtype))
        if len(by_rank) > 1:
            divide_(total, len(by_rank))
        result.append(total.to(gradient.dtype).view(gradient.shape))
    return result
