"""Base classes of gradient aggregators, with the checks and statistics that they share, and the single-rank case."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal.comm.launch.config import DistributedConfig
from shoal.errors import AggregationError, ConfigError
from shoal.train.aggregation.exchange import Exchange, agree, check_world, make_exchange

REDUCIBLE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)


class GradientAggregator(ABC):
    """Computes the mean of each gradient over the ranks; results never share memory with the inputs.

    ``last_stats`` describes the last call: ``bytes_sent, bytes_received, messages, buckets, wait_s, reduce_s,
    algorithm``. A subclass for several ranks must have a ``transport``, or override ``share_int`` and ``share_float``,
    with which the train step lets ranks agree.
    """

    last_stats: dict[str, Any]

    @abstractmethod
    def aggregate(self, local_gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the means; every rank must pass the same number of gradients, with the same shapes and dtypes."""

    def share_int(self, value: int) -> list[int]:
        """Every rank's ``value``, by rank."""
        exchange = self._own_exchange()
        return exchange.share_int(value) if exchange is not None else [value]

    def share_float(self, value: float) -> list[float]:
        """Every rank's ``value``, by rank."""
        exchange = self._own_exchange()
        return exchange.share_float(value) if exchange is not None else [value]

    def _own_exchange(self) -> Exchange | None:
        transport = getattr(self, "transport", None)
        return make_exchange(transport) if transport is not None and transport.world_size > 1 else None


def new_stats(algorithm: str) -> dict[str, Any]:
    return {
        "bytes_sent": 0,
        "bytes_received": 0,
        "messages": 0,
        "buckets": 0,
        "wait_s": 0.0,
        "reduce_s": 0.0,
        "algorithm": algorithm,
    }


def clones(gradients: Sequence[Tensor]) -> list[Tensor]:
    return [g.detach().clone() for g in gradients]


class LocalAggregator(GradientAggregator):
    """Aggregator for a single rank: returns clones."""

    def __init__(self) -> None:
        self.last_stats = new_stats("local")

    def aggregate(self, local_gradients: Sequence[Tensor]) -> list[Tensor]:
        self.last_stats = new_stats("local")
        return clones(local_gradients)


class ExchangingAggregator(GradientAggregator):
    """Base of aggregators over a transport, with the exchange, the agreement before data moves, and the statistics."""

    def __init__(self, config: DistributedConfig, transport: Any, check: str = "always") -> None:
        check_world(config, transport, type(self).__name__)
        if check not in ("always", "first", "never"):
            raise ConfigError(f"{type(self).__name__}: check must be 'always', 'first' or 'never', got {check!r}")
        self.config = config
        self.transport = transport
        self.check = check
        self._checked = False
        self._exchange = make_exchange(transport) if config.world_size > 1 else None
        self.last_stats = new_stats("local")

    def _own_exchange(self) -> Exchange | None:
        return self._exchange

    def _agree(
        self, gradients: Sequence[Tensor], *, average: bool, extra: Any = None, problem: Exception | None = None
    ) -> None:
        """Raise on every rank unless all can continue; ``problem`` is an error that only this rank has."""
        exchange = self._exchange
        assert exchange is not None
        problem = problem or find_problem(gradients, average)
        if self.check == "always" or (self.check == "first" and not self._checked):
            agree(exchange, [] if problem else gradients, extra, problem)
            self._checked = True
        if problem is not None:
            raise problem

    @contextmanager
    def _measured(self, algorithm: str) -> Iterator[dict[str, Any]]:
        exchange = self._exchange
        assert exchange is not None
        exchange.start()
        stats = new_stats(algorithm)
        began = time.perf_counter()
        yield stats
        total = time.perf_counter() - began
        stats.update(
            bytes_sent=exchange.bytes_sent,
            bytes_received=exchange.bytes_received,
            messages=exchange.messages,
            wait_s=exchange.wait_s,
            reduce_s=max(0.0, total - exchange.wait_s),
        )
        self.last_stats = stats


def find_problem(gradients: Sequence[Any], average: bool = False) -> Exception | None:
    """The reason why this rank's gradients cannot be reduced, or averaged, or None."""
    for i, gradient in enumerate(gradients):
        if not isinstance(gradient, Tensor):
            return AggregationError(
                f"gradient {i} must be a tensor, got {type(gradient).__name__}; pass zeros for a missing gradient"
            )
        if gradient.layout != torch.strided:
            return AggregationError(f"gradient {i} must be dense, got layout {gradient.layout}; call to_dense() first")
        if gradient.dtype not in REDUCIBLE:
            return AggregationError(f"gradient {i} must have a real number dtype, got {gradient.dtype}")
        if average and not gradient.is_floating_point():
            return AggregationError(
                f"gradient {i} must be floating point to be averaged, got {gradient.dtype}; use average=False, or "
                "convert it"
            )
    return None


def accumulator(dtype: torch.dtype, accumulate: str = "float32") -> torch.dtype:
    """The dtype in which gradients of ``dtype`` are summed."""
    if not dtype.is_floating_point or dtype == torch.float64:
        return dtype
    return torch.float64 if accumulate == "float64" else torch.float32
