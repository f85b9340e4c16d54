"""One training step over ranks, and an epoch of them."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.comm.launch.config import DistributedConfig
from shoal.errors import AggregationError, ConfigError, StepAborted, TransportError
from shoal.train.aggregation.aggregate import GradientAggregator
from shoal.train.aggregation.buckets import gradient_of

OK, FAILED, ENDED = 0, 1, 2  # flags that ranks exchange
_END = object()


@dataclass(frozen=True)
class EpochMetrics:
    """The arithmetic mean of this rank's batch losses, and the number of steps."""

    mean_loss: float
    steps: int


@dataclass(frozen=True)
class DataParallelConfig:
    """A rank's configuration and the aggregator that it trains with."""

    config: DistributedConfig
    aggregator: GradientAggregator

    def train_step(self, compute_gradients_fn: Callable, apply_gradients_fn: Callable, **options: Any) -> float:
        """``distributed_train_step`` with this aggregator."""
        return distributed_train_step(compute_gradients_fn, apply_gradients_fn, self.aggregator, **options)


def _share(aggregator: Any, kind: str, value: Any) -> list[Any]:
    """Every rank's ``value``; an aggregator that only has ``aggregate`` counts as a single rank."""
    share = getattr(aggregator, f"share_{kind}", None)
    return share(value) if share is not None else [value]


def distributed_train_step(
    compute_gradients_fn: Callable[[], tuple[Any, Sequence[Tensor]]],
    apply_gradients_fn: Callable[[list[Tensor]], Any],
    aggregator: GradientAggregator,
    *,
    agree: bool = True,
    nonfinite: str = "apply",
    reduce_loss: bool = False,
) -> float:
    """Compute, aggregate and apply gradients; return this rank's loss, or with ``reduce_loss`` the mean over ranks.

    Args:
        compute_gradients_fn: returns ``(loss, gradients)``.
        apply_gradients_fn: called at most once, after all ranks have their aggregate.
        agree: ranks exchange an ok flag before they aggregate, and again before they apply. If a rank fails, it raises
            its own exception, the others raise ``StepAborted`` with the failed ranks, and no rank applies.
        nonfinite: on NaN or infinity in the aggregate, ``apply`` it anyway, ``skip`` the step on all ranks, or
            ``raise`` an ``AggregationError`` on all. All ranks have the same aggregate, so they decide alike.
    """
    if nonfinite not in ("apply", "skip", "raise"):
        raise ConfigError(f"distributed_train_step: nonfinite must be 'apply', 'skip' or 'raise', got {nonfinite!r}")
    try:
        loss, gradients = compute_gradients_fn()
        loss, gradients = float(loss.detach() if isinstance(loss, Tensor) else loss), list(gradients)
    except BaseException:
        if agree:
            _report(aggregator, FAILED)
        raise
    if agree:
        _raise_if_failed(_share(aggregator, "int", OK))
    try:
        aggregate = aggregator.aggregate(gradients)
    except TransportError:  # the flags could not be exchanged either
        raise
    except BaseException:
        if agree:
            _report(aggregator, FAILED)
        raise
    if agree:
        _raise_if_failed(_share(aggregator, "int", OK))
    # Before the gradients are applied: a rank that fails to apply them must not leave the others waiting for its loss.
    losses = _share(aggregator, "float", loss) if reduce_loss else [loss]
    finite = nonfinite == "apply" or all(bool(torch.isfinite(g).all()) for g in aggregate)
    if finite:
        apply_gradients_fn(aggregate)
    elif nonfinite == "raise":
        bad = [i for i, g in enumerate(aggregate) if not bool(torch.isfinite(g).all())]
        raise AggregationError(f"aggregated gradients {bad[:8]} contain NaN or infinity; no rank applied this step")
    return sum(losses) / len(losses)


def _report(aggregator: Any, flag: int) -> None:
    """Send ``flag`` to the others; errors are suppressed, because this rank's own exception is about to be raised."""
    with contextlib.suppress(Exception):
        _share(aggregator, "int", flag)


def _raise_if_failed(flags: list[int]) -> None:
    failed = [rank for rank, flag in enumerate(flags) if flag == FAILED]
    if failed:
        raise StepAborted(failed)


def train_epoch_distributed(
    params: Iterable[Tensor],
    optimizer: torch.optim.Optimizer,
    aggregator: GradientAggregator,
    batches: Iterable[Any],
    step_fn: Callable[[Any], Any],
    *,
    on_uneven: str = "stop",
) -> EpochMetrics:
    """Train one epoch: per batch call ``step_fn``, aggregate the gradients, step the optimizer and clear gradients.

    Args:
        params: all parameters to aggregate; one without a gradient counts as zeros.
        step_fn: runs forward and backward for a batch and returns the loss.
        on_uneven: when a rank runs out of batches, ``stop`` ends the epoch on all ranks, ``error`` raises
            ``AggregationError`` on all.

    An exception from ``batches`` or ``step_fn`` ends the epoch on all ranks, as in ``distributed_train_step``.
    """
    if on_uneven not in ("stop", "error"):
        raise ConfigError(f"train_epoch_distributed: on_uneven must be 'stop' or 'error', got {on_uneven!r}")
    params = list(params)
    losses: list[float] = []
    iterator = iter(batches)
    while True:
        try:
            batch = next(iterator, _END)
        except BaseException:
            _report(aggregator, FAILED)
            raise
        flags = _share(aggregator, "int", ENDED if batch is _END else OK)
        _raise_if_failed(flags)
        if any(flags):
            if on_uneven == "error" and not all(flags):
                out = [rank for rank, flag in enumerate(flags) if flag]
                raise AggregationError(
                    f"all ranks must have the same number of batches, but ranks {out} ran out after {len(losses)}; "
                    "pass on_uneven='stop' to end the epoch there"
                )
            break

        def compute(batch: Any = batch) -> tuple[Any, list[Tensor]]:
            loss = step_fn(batch)
            return loss, [gradient_of(p) for p in params]

        losses.append(distributed_train_step(compute, lambda grads: _apply(params, grads, optimizer), aggregator))
    if not losses:
        raise ConfigError("train_epoch_distributed: every rank must have at least one batch, got none")
    return EpochMetrics(sum(losses) / len(losses), len(losses))


def _apply(params: list[Tensor], gradients: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    for parameter, gradient in zip(params, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    for parameter in params:
        parameter.grad = None
