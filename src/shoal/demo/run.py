"""Train and measure: every batch is predicted before training on it, as in a live system."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.demo.model import Collisionless, DeepFm, Hashed
from shoal.demo.stream import Batch, StreamConfig, stream
from shoal.train.loop.measure.metrics import exact_auc

EXPIRE_DAYS = 3
_ROUND_BYTES = 1 << 14


@dataclass(slots=True)
class Result:
    """The results of one table; lists have one entry per day."""

    name: str
    auc: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    memory_bytes: int = 0
    train_s: float = 0.0


@dataclass(slots=True)
class Comparison:
    """The results of both tables on one stream.

    Per day, ``best_auc`` is the AUC of the true probabilities, and ``ids`` the number of distinct ids so far.
    """

    config: StreamConfig
    best_auc: list[float]
    ids: list[int]
    results: list[Result]
    warm_up_days: int

    def mean_auc(self, daily: list[float]) -> float:
        """The mean over the days after the first third."""
        return sum(daily[self.warm_up_days :]) / max(len(daily) - self.warm_up_days, 1)


def compare(config: StreamConfig, *, progress: Callable[[str, int, int, float], None] | None = None) -> Comparison:
    """Train the same model on a `Collisionless` table and then on a `Hashed` one of the same memory.

    ``progress(name, batches_done, batches, auc_of_the_last_day)`` is called after each batch. Equal configurations
    give equal results, except for times.
    """
    truth = Truth()
    with _one_thread():
        first = train(Collisionless(EXPIRE_DAYS, config.seed), config, progress, truth)
        # Without an explicit setting, torch warns about its checks of sparse gradients.
        with torch.sparse.check_sparse_tensor_invariants(False):
            # Rounded up, so that the number of rows does not depend on the last kilobyte of our index.
            second = train(
                Hashed((first.memory_bytes // _ROUND_BYTES + 1) * _ROUND_BYTES, config.seed), config, progress
            )
    return Comparison(config, truth.best_auc, truth.ids, [first, second], config.days // 3)


def train(
    table: Collisionless | Hashed, config: StreamConfig, progress: Any = None, truth: Truth | None = None
) -> Result:
    """Train for one pass over the stream; ``truth`` gets every batch."""
    torch.manual_seed(config.seed)  # both tables start with the same dense part
    model = DeepFm(table.bag)
    dense = torch.optim.Adam(model.deep.parameters(), lr=0.001)
    result = Result(table.name)
    batches, scores, clicks = config.days * config.batches_per_day, [], []
    for number, batch in enumerate(stream(config), start=1):
        table.now_s = batch.time_s
        begin = time.perf_counter()
        logits = model(batch.ids)
        # Summed, so that the update of a row does not depend on the batch size.
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.clicks, reduction="sum")
        dense.zero_grad()
        table.optimizer.zero_grad()
        loss.backward()
        dense.step()
        table.optimizer.step()
        scores.append(logits.detach())
        clicks.append(batch.clicks)
        if number % config.batches_per_day == 0:
            table.end_day()
            result.auc.append(auc(torch.cat(scores), torch.cat(clicks)))
            result.rows.append(table.rows())
            result.memory_bytes = max(result.memory_bytes, table.memory_bytes())
            scores, clicks = [], []
        result.train_s += time.perf_counter() - begin
        if truth is not None:
            truth.see(batch)
            if number % config.batches_per_day == 0:
                truth.end_day()
        if progress is not None:
            progress(table.name, number, batches, result.auc[-1] if result.auc else float("nan"))
    return result


def auc(scores: Tensor, labels: Tensor) -> float:
    """The chance that a clicked sample scores above one that was not; ties count half.

    >>> auc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    0.875
    """
    return exact_auc(scores.detach().cpu().numpy(), labels.cpu().numpy())


class Truth:
    """The AUC of the true probabilities of each day, and the number of distinct ids so far."""

    def __init__(self) -> None:
        self.best_auc: list[float] = []
        self.ids: list[int] = []
        self._seen = torch.empty(0, dtype=torch.int64, device="cpu")
        self._today: list[Batch] = []

    def see(self, batch: Batch) -> None:
        self._today.append(batch)

    def end_day(self) -> None:
        today, self._today = self._today, []
        self.best_auc.append(
            auc(torch.cat([batch.probabilities for batch in today]), torch.cat([batch.clicks for batch in today]))
        )
        values = [values for batch in today for values, _ in batch.ids.values()]
        self._seen = torch.unique(torch.cat([self._seen, *values]))
        self.ids.append(len(self._seen))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: the dense part is small, and sums have a fixed order. The table's threads remain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
