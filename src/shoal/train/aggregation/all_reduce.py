"""Average gradients by all-reduce: the backend's own, a ring of byte messages, or a sum in rank order."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shoal.comm.launch.config import DistributedConfig
from shoal.errors import ConfigError
from shoal.train.aggregation.aggregate import ExchangingAggregator, accumulator, clones
from shoal.train.aggregation.buckets import BUCKET_BYTES, flatten, make_buckets, unflatten
from shoal.train.aggregation.exchange import divide_
from shoal.train.aggregation.exchange_bytes import ByteExchange
from shoal.train.aggregation.exchange_group import GroupExchange

ALGORITHMS = ("auto", "native", "ring", "ordered")


class AllReduceAggregator(ExchangingAggregator):
    """Averages each gradient over all ranks (``average=False``: sums them), in buckets of ``bucket_bytes``.

    Args:
        transport: can be None when ``world_size`` is 1.
        algorithm: ``native`` is the process group's all-reduce; ``ring`` works on any transport and sends
            ``2 * (W - 1) / W`` times the gradients' bytes; ``ordered`` adds rank 0, 1, ..., W - 1, so that the result's
            bits depend only on the inputs. ``auto``: native if the transport has collectives, else ring.
        accumulate: float16 and bfloat16 are summed in ``float32`` and rounded once; with ``float64``, float32 is
            summed in float64 as well.
        check: ``always`` compares count, shapes, dtypes and these settings between ranks before data moves; ``first``
            does so only in the first call; ``never`` trusts the caller: a mismatch then causes wrong numbers or a
            timeout.
    """

    def __init__(
        self,
        config: DistributedConfig,
        transport: Any,
        *,
        algorithm: str = "auto",
        average: bool = True,
        accumulate: str = "float32",
        bucket_bytes: int = BUCKET_BYTES,
        check: str = "always",
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ConfigError(
                f"AllReduceAggregator: algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}"
            )
        if accumulate not in ("float32", "float64"):
            raise ConfigError(f"AllReduceAggregator: accumulate must be 'float32' or 'float64', got {accumulate!r}")
        if bucket_bytes < 1:
            raise ConfigError(f"AllReduceAggregator: bucket_bytes must be at least 1, got {bucket_bytes}")
        super().__init__(config, transport, check)
        collectives = isinstance(self._exchange, GroupExchange)
        if algorithm == "native" and config.world_size > 1 and not collectives:
            raise ConfigError(
                "AllReduceAggregator: the transport must have collectives for algorithm 'native', got "
                f"{type(transport).__name__}; use 'ring' or 'ordered'"
            )
        self.algorithm = algorithm
        self.average = average
        self.accumulate = accumulate
        self.bucket_bytes = bucket_bytes
        self._chosen = algorithm if algorithm != "auto" else "native" if collectives else "ring"
        if self._chosen == "ring" and collectives:
            self._exchange = ByteExchange(transport)

    def aggregate(self, local_gradients: Sequence[Tensor]) -> list[Tensor]:
        gradients = list(local_gradients)
        if self.config.world_size == 1:
            return clones(gradients)
        with self._measured(self._chosen) as stats:
            settings = (self._chosen, self.average, self.accumulate, self.bucket_bytes)
            self._agree(gradients, average=self.average, extra=settings)
            buckets = make_buckets(gradients, self.bucket_bytes)
            stats["buckets"] = len(buckets)
            sums = (
                self._native(gradients, buckets) if self._chosen == "native" else self._one_by_one(gradients, buckets)
            )
            result: list[Tensor] = [gradients[0]] * len(gradients) if gradients else []
            for bucket, total in zip(buckets, sums, strict=True):
                for i, tensor in zip(bucket, unflatten(total, [gradients[i] for i in bucket]), strict=True):
                    result[i] = tensor
        return result

    @property
    def _divisor(self) -> float | None:
        return self.config.world_size if self.average else None

    def _flat(self, gradients: list[Tensor], bucket: list[int]) -> Tensor:
        parts = [gradients[i] for i in bucket]
        return flatten(parts, accumulator(parts[0].dtype, self.accumulate))

    def _native(self, gradients: list[Tensor], buckets: list[list[int]]) -> list[Tensor]:
        """Reduce all buckets at the same time; each is flattened while earlier ones are in transit."""
        exchange = self._exchange
        assert isinstance(exchange, GroupExchange)
        running = []
        for bucket in buckets:
            flat = exchange.to_wire(self._flat(gradients, bucket))
            running.append((flat, exchange.all_reduce(flat) if flat.numel() else None))
        for flat, work in running:
            if work is not None:
                exchange.finish(work)
                divide_(flat, self._divisor)
        return [flat for flat, _ in running]

    def _one_by_one(self, gradients: list[Tensor], buckets: list[list[int]]) -> list[Tensor]:
        exchange, sums = self._exchange, []
        assert exchange is not None
        for bucket in buckets:
            flat = self._flat(gradients, bucket)
            if self._chosen == "ordered":
                sums.append(exchange.sum_in_order(flat, 0, self._divisor))
            else:
                assert isinstance(exchange, ByteExchange)
                sums.append(divide_(exchange.ring(flat), self._divisor))
        return sums
