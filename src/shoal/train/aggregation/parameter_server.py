"""Server ranks that broadcast parameters, add everyone's gradients, and send the same bits back to all."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.launch.config import DistributedConfig
from shoal.comm.ranks.serialization import DTYPES
from shoal.errors import AggregationError, ConfigError, ShapeError
from shoal.train.aggregation.aggregate import ExchangingAggregator, accumulator, clones
from shoal.train.aggregation.buckets import BUCKET_BYTES, flatten, make_buckets, unflatten


class ParameterServer(ExchangingAggregator):
    """Averages on server ranks: rank ``i mod servers`` adds gradient ``i`` in rank order and sends the mean to all."""

    def __init__(self, config: DistributedConfig, transport: Any, *, servers: int = 1) -> None:
        if not 1 <= servers <= config.world_size:
            raise ConfigError(f"ParameterServer: servers must be in 1..{config.world_size}, got {servers}")
        super().__init__(config, transport)
        self.servers = servers

    def broadcast_params(self, params: Sequence[Tensor] | None) -> list[Tensor]:
        """Rank 0's ``params``, on every rank.

        Other ranks pass None, ``[]``, or templates that the received tensors must match (else ``ShapeError``).
        """
        exchange = self._exchange
        problem = _parameter_problem(params) if self.config.rank == 0 else None
        if exchange is None:
            if problem is not None:
                raise problem
            return clones(params or ())
        with self._measured("broadcast"):
            given = params if self.config.rank == 0 and problem is None else None
            try:
                arrived = exchange.broadcast_tensors(given, BUCKET_BYTES)
            except AggregationError:
                raise (
                    problem
                    or AggregationError(
                        f"ParameterServer: rank {self.config.rank} received no parameters, because rank 0 has none "
                        "that can be broadcast; see its log"
                    )
                ) from None
        if self.config.rank == 0 or not params:
            return arrived
        want = [(tuple(t.shape), t.dtype) for t in params]
        got = [(tuple(t.shape), t.dtype) for t in arrived]
        if want != got:
            first = next(
                (i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got))
            )
            raise ShapeError(
                f"ParameterServer: parameters from rank 0 must match rank {self.config.rank}'s {len(want)} templates, "
                f"got {len(got)}; the first difference is at {first}: template {want[first : first + 1]}, received "
                f"{got[first : first + 1]}"
            )
        return [tensor.to(template.device) for tensor, template in zip(arrived, params, strict=True)]

    def reduce_gradients(self, grads: Sequence[Tensor], weights: float | None = None) -> list[Tensor]:
        """The mean over ranks, weighted if each rank passes its own weight (one number) as ``weights``."""
        grads = list(grads)
        problem = _weight_problem(weights)
        exchange = self._exchange
        if exchange is None:
            if problem:
                raise problem
            return clones(grads)
        with self._measured("parameter_server") as stats:
            self._agree(grads, average=True, extra="weighted" if weights is not None else None, problem=problem)
            divisor = float(self.config.world_size)
            if weights is not None:
                divisor = math.fsum(exchange.share_float(float(weights)))
                if divisor == 0.0:
                    raise AggregationError("ParameterServer: the sum of all ranks' weights must be > 0, got 0")
            result: list[Tensor] = list(grads)
            for server in range(self.servers):
                owned = list(range(server, len(grads), self.servers))
                for bucket in make_buckets([grads[i] for i in owned], BUCKET_BYTES):
                    stats["buckets"] += 1
                    positions = [owned[i] for i in bucket]
                    parts = [grads[i] for i in positions]
                    flat = flatten(parts, accumulator(parts[0].dtype))
                    if weights is not None:
                        flat *= float(weights)
                    total = exchange.sum_in_order(flat, server, divisor)
                    for i, tensor in zip(positions, unflatten(total, parts), strict=True):
                        result[i] = tensor
        return result

    def aggregate(self, local_gradients: Sequence[Tensor]) -> list[Tensor]:
        return self.reduce_gradients(local_gradients)


def _parameter_problem(params: Sequence[Any] | None) -> Exception | None:
    """The reason why rank 0 cannot broadcast these, or None."""
    if params is None:
        return AggregationError("ParameterServer: rank 0 must pass params to broadcast, got None")
    for i, tensor in enumerate(params):
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.dtype not in DTYPES:
            kind = f"{tensor.dtype} {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
            return AggregationError(
                f"ParameterServer: parameter {i} must be a dense tensor of "
                f"{', '.join(str(d).removeprefix('torch.') for d in DTYPES)}, got {kind}"
            )
    return None


def _weight_problem(weight: float | None) -> Exception | None:
    if weight is None:
        return None
    try:
        value = float(weight)
    except (TypeError, ValueError):
        return ConfigError(f"ParameterServer: weights must be one number, this rank's weight, got {weight!r}")
    if not math.isfinite(value) or value < 0:
        return ConfigError(f"ParameterServer: weights must be finite and >= 0, got {value}")
    return None
