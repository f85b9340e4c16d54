"""Training and measuring: every batch is predicted before it is learnt, as a live system would."""

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

EXPIRE_DAYS = 3
_ROUND_BYTES = 1 << 14


@dataclass(slots=True)
class Result:
    """What one table came to; lists have an entry a day."""

    name: str
    auc: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    memory_bytes: int = 0
    train_s: float = 0.0


@dataclass(slots=True)
class Comparison:
    """Both tables on one stream; ``best_auc`` is that of the true probabilities, ``ids`` the distinct ones so far."""

    config: StreamConfig
    best_auc: list[float]
    ids: list[int]
    results: list[Result]
    warm_up_days: int

    def mean_auc(self, daily: list[float]) -> float:
        """Over the days after the first third, when there is something to forget."""
        return sum(daily[self.warm_up_days :]) / max(len(daily) - self.warm_up_days, 1)


def compare(config: StreamConfig, *, progress: Callable[[str, int, int, float], None] | None = None) -> Comparison:
    """Trains the same model on a `Collisionless` table and then on a `Hashed` one of the same memory.

    ``progress(name, batches_done, batches, auc_of_the_last_day)`` is called after each batch. Everything but the
    seconds follows from ``config``.
    """
    truth = Truth()
    with _one_thread():
        first = train(Collisionless(EXPIRE_DAYS, config.seed), config, progress, truth)
        # torch asks for a decision about its checks of sparse gradients, and warns without one.
        with torch.sparse.check_sparse_tensor_invariants(False):
            # Rounded up, so that its rows do not depend on the last kilobyte of our index.
            second = train(
                Hashed((first.memory_bytes // _ROUND_BYTES + 1) * _ROUND_BYTES, config.seed), config, progress
            )
    return Comparison(config, truth.best_auc, truth.ids, [first, second], config.days // 3)


def train(
    table: Collisionless | Hashed, config: StreamConfig, progress: Any = None, truth: Truth | None = None
) -> Result:
    """One pass over the stream, of which ``truth`` takes note."""
    torch.manual_seed(config.seed)  # the dense part starts alike on every table
    model = DeepFm(table.bag)
    dense = torch.optim.Adam(model.deep.parameters(), lr=0.001)
    result = Result(table.name)
    batches, scores, clicks = config.days * config.batches_per_day, [], []
    for number, batch in enumerate(stream(config), start=1):
        table.now_s = batch.time_s
        begin = time.perf_counter()
        logits = model(batch.ids)
        # Summed, so that the step of a row does not depend on the size of the batch that it is in.
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
    _, inverse, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    rank = (ends - (counts.double() - 1) / 2)[inverse]  # ties share the mean of their ranks
    positive = labels > 0.5
    n = int(positive.sum())
    if n in (0, len(labels)):
        return float("nan")
    return float((rank[positive].sum() - n * (n + 1) / 2) / (n * (len(labels) - n)))


class Truth:
    """Per day: the AUC of the true probabilities, and how many distinct ids there have been."""

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
    """For torch: the dense part is too small for more, and one thread adds up in one order. The table has its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
