"""All-reduce in two levels: inside the node, across nodes on a share of the data, then inside the node again."""

import struct
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from shoal.comm.ranks.torch_ranks import default_ranks
from shoal.errors import AggregationError, ConfigError
from shoal.train.aggregation.aggregate import GradientAggregator, accumulator, find_problem, new_stats
from shoal.train.aggregation.buckets import BUCKET_BYTES, flatten, make_buckets, unflatten
from shoal.train.aggregation.exchange import divide_, named_errors, signature
from shoal.train.aggregation.exchange_group import GroupExchange


class HierarchicalAggregator(GradientAggregator):
    """Averages gradients over ``N`` nodes of ``L`` ranks each.

    It runs a reduce_scatter inside the node, an all_reduce of ``1/L`` of the data across nodes, and an all_gather
    inside the node. ``intra_group`` has this node's ranks, ``inter_group`` the ranks with this local rank on all nodes;
    get both from a 2-d ``DeviceMesh``. A rank sends ``2 * (N - 1) / N * S / L`` bytes across nodes
    (``last_stats["inter_bytes_sent"]``). The result has the same bits on all ranks.
    """

    def __init__(self, intra_group: Any, inter_group: Any, *, average: bool = True) -> None:
        if intra_group is None or inter_group is None:
            raise ConfigError(
                "HierarchicalAggregator: intra_group and inter_group must be process groups, got "
                f"{intra_group} and {inter_group}; get them from a 2-d DeviceMesh"
            )
        self.average = average
        self._intra = GroupExchange(default_ranks(intra_group))
        self._inter = GroupExchange(default_ranks(inter_group))
        self._rank = default_ranks().rank
        self.last_stats = {**new_stats("hierarchical"), "inter_bytes_sent": 0}

    @property
    def world_size(self) -> int:
        return self._intra.world_size * self._inter.world_size

    def _share(self, value: bytes) -> list[bytes]:
        """Every rank's ``value`` (8 bytes), in the order of global ranks."""
        mine = struct.pack("<q", self._rank) + value
        node = b"".join(self._intra.share(mine))
        everyone = b"".join(self._inter.share(node))
        pairs = sorted(struct.unpack_from("<q8s", everyone, at) for at in range(0, len(everyone), 16))
        return [value for _, value in pairs]

    def share_int(self, value: int) -> list[int]:
        return [struct.unpack("<q", v)[0] for v in self._share(struct.pack("<q", value))]

    def share_float(self, value: float) -> list[float]:
        return [struct.unpack("<d", v)[0] for v in self._share(struct.pack("<d", value))]

    def aggregate(self, local_gradients: Sequence[Tensor]) -> list[Tensor]:
        began = time.perf_counter()
        intra, inter = self._intra, self._inter
        intra.start()
        inter.start()
        gradients = list(local_gradients)
        self._agree(gradients)
        result: list[Tensor] = list(gradients)
        buckets = make_buckets(gradients, BUCKET_BYTES)
        for bucket in buckets:
            parts = [gradients[i] for i in bucket]
            flat = intra.to_wire(flatten(parts, accumulator(parts[0].dtype)))
            for i, tensor in zip(bucket, unflatten(self._reduce(flat), parts), strict=True):
                result[i] = tensor
        wait_s = intra.wait_s + inter.wait_s
        self.last_stats = {
            **new_stats("hierarchical"),
            "bytes_sent": intra.bytes_sent + inter.bytes_sent,
            "bytes_received": intra.bytes_received + inter.bytes_received,
            "messages": intra.messages + inter.messages,
            "buckets": len(buckets),
            "wait_s": wait_s,
            "reduce_s": max(0.0, time.perf_counter() - began - wait_s),
            "inter_bytes_sent": inter.bytes_sent,
        }
        return result

    def _reduce(self, flat: Tensor) -> Tensor:
        intra, inter = self._intra, self._inter
        size, local = len(flat), intra.world_size
        if size == 0:
            return flat
        padded = functional.pad(flat, (0, -size % local))
        share = padded.new_empty(len(padded) // local)
        with named_errors("reduce_scatter inside the node", intra.rank), intra.waiting():
            intra.ranks.start_scatter(share, padded).wait()
        if inter.world_size > 1:
            inter.finish(inter.all_reduce(share))
        divide_(share, self.world_size if self.average else None)
        with named_errors("all_gather inside the node", intra.rank), intra.waiting():
            intra.ranks.start_gather(padded, share).wait()
        moved = 2 * (local - 1) * share.nbytes
        intra._count(moved, moved, 2)
        return padded[:size]

    def _agree(self, gradients: list[Tensor]) -> None:
        problem = find_problem(gradients, self.average)
        mine = -1 - self._rank if problem else signature(gradients)
        low, high = self._intra.extremes(mine)
        low, _ = self._inter.extremes(low)
        _, high = self._inter.extremes(high)
        if problem is not None:
            raise problem
        if low != high:
            raise AggregationError(
                "HierarchicalAggregator: all ranks must pass gradients of the same count, shapes and dtypes, but they "
                f"differ; the count on rank {self._rank} is {len(gradients)}. Nothing was reduced."
            )
