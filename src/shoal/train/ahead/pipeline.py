"""`Pipeline`: train on one batch while the next ones are read, moved, located and, with a staleness, looked up."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.train.ahead.locator import Locator
from shoal.train.ahead.run import Run, Settings
from shoal.train.ahead.uneven import OnUneven


class Pipeline:
    """Trains a model while the next batches are prepared.

    >>> import shoal, torch
    >>> from shoal.nn import HashEmbeddingBag
    >>> from shoal.train import Pipeline
    >>> class Clicks(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.bag = HashEmbeddingBag(shoal.HashTable(dim=4))
    ...         self.net = torch.nn.Linear(4, 1)
    ...
    ...     def forward(self, batch):  # the loss, or (loss, anything)
    ...         logits = self.net(self.bag(batch["items"])).squeeze(-1)
    ...         return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["clicked"])
    >>> model = Clicks()
    >>> pipeline = Pipeline(model, torch.optim.Adam(model.parameters()))
    >>> batches = [{"items": torch.randint(99, (8, 3)), "clicked": torch.rand(8).round()} for _ in range(5)]
    >>> losses = [float(loss) for loss in pipeline(batches)]  # each step is complete when its loss is yielded
    >>> len(losses)
    5

    With a ``staleness`` of 0, results are bit-identical to those of a plain loop: batches are read, moved to the device
    and their ids located (converted, exchanged between ranks, assigned to servers) before their step, and rows are read
    in their forward. With a staleness of k, a background thread reads and updates rows, in the same order on every run:
    the rows of batch j are read after the update of batch j - 1 - k. Dense weights are never stale.

    There are three ways to use it: ``for out in pipeline(batches)``; ``pipeline.progress(iterator)``, as with
    TorchRec's pipelines; and ``for batch in pipeline.batches(batches)``, with your own step in the loop.

    Args:
        model: called as ``model(batch)``; returns the loss, or ``(loss, output)``. In evaluation mode
            (``model.eval()``) nothing is learned.
        optimizer: for the dense part, and also for rows if it is a `shoal.nn.SparseOptimizer`.
        device: where batches are moved, to a GPU on a separate stream; None leaves them where they are.
        step: ``step(batch)``, replaces forward, backward and the optimizer's step; the pipeline yields its result.
        reduce: called between backward and the optimizer's step, such as ``OverlappedReducer(model).finish``.
        transform: applied to each batch by the thread that reads. Ids are located ahead only if they are parts of the
            batch, so compute here any that the model would derive from it.
        staleness: see above. Raise it from 0 to 1 when steps wait for servers or other ranks, and evaluate the model
            again.
        ahead: number of batches kept ready; with 0, batches are read on request. Raise it when reading is fast on
            average, but sometimes slow.
        on_uneven: for tables over ranks, what to do when some ranks run out of batches before others: ``"join"``, they
            continue without samples; ``"stop"``, all stop; ``"error"``, all raise.
        empty_batch: makes a batch without samples from the last batch (or None). Pass it if the default, which empties
            the first dimension of all tensors, does not fit your batches.
        section: returns a batch's section, a number that never falls, such as the epoch. Ranks finish a section before
            they start the next.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | str | None = None,
        *,
        step: Callable[[Any], Any] | None = None,
        reduce: Callable[[], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        staleness: int = 0,
        ahead: int = 2,
        on_uneven: OnUneven = "join",
        empty_batch: Callable[[Any], Any] | None = None,
        section: Callable[[Any], int] = lambda batch: 0,
    ) -> None:
        if staleness < 0:
            raise ConfigError(f"Pipeline: staleness must be >= 0, got {staleness}")
        if ahead < 0:
            raise ConfigError(f"Pipeline: ahead must be >= 0, got {ahead}")
        if on_uneven not in ("join", "stop", "error"):
            raise ConfigError(f"Pipeline: on_uneven must be 'join', 'stop' or 'error', got {on_uneven!r}")
        if step is not None and (optimizer is not None or reduce is not None):
            raise ConfigError("Pipeline: step must not be combined with optimizer or reduce; call them in your step")
        self.model, self.optimizer = model, optimizer
        self.device = None if device is None else torch.device(device)
        self.staleness = staleness
        self.joined = False
        """Whether the last batch has no samples, because this rank has run out of batches."""
        self.section = 0
        """The section of the last batch."""
        self.wait_s = 0.0
        """Seconds that steps waited for their batches so far. If that is most of the time, reading is too slow."""
        self.steps = 0
        """The number of batches so far."""
        self._step = step or self._learn
        self._reduce = reduce
        self._settings = Settings(staleness, ahead, self.device, transform, on_uneven, empty_batch, section)
        self._locator = Locator(model)
        self._run: Run | None = None
        self._progress: tuple[Any, Generator[Any, None, None]] | None = None

    # --- using it -----------------------------------------------------------------------------------------------------

    def __call__(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        """Train on each batch; yield the model's output (or its loss, if that is all), or the result of ``step``."""
        with closing(self.batches(batches)) as ready:
            for batch in ready:
                out = self._step(batch)
                if not self.joined:
                    yield out

    def progress(self, iterator: Iterator[Any]) -> Any:
        """Train on the next batch and return what `__call__` yields. Pass the same iterator in every call.

        Raises:
            StopIteration: there are no more batches.
        """
        if self._progress is None or self._progress[0] is not iterator:
            self.close()
            self._progress = iterator, self(iterator)
        try:
            return next(self._progress[1])
        except BaseException:
            self._progress = None
            raise

    def batches(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        """Yield prepared batches, for a loop with your own step.

        The step of a batch must end before the next one is requested. While other ranks have more batches, a rank that
        has run out gets batches without samples (`joined` is True), and must take its step with those.
        """
        if self._run is not None:
            self._end(self._run)  # an earlier pass was abandoned
        before = self.wait_s
        run = self._run = Run(self._settings, batches, self._locator)
        try:
            for made in run.rounds():
                self.joined, self.section = made.joined, made.section
                self.steps += 1
                yield made.batch
                self.wait_s = before + run.wait_s
        finally:
            self._end(run)

    def flush(self) -> None:
        """Wait until all updates are applied to the rows. With a staleness above 0, call it before saving or reading.

        All ranks must call it together.
        """
        if self._run is not None:
            self._run.settle()

    def close(self) -> None:
        """Stop the current pass; prepared batches are dropped."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress[1].close()
        if self._run is not None:
            self._end(self._run)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def report(self) -> dict[str, Any]:
        """Counts and waiting time so far, and for each module over tables whether its ids are located ahead."""
        known = {id(module) for module, _ in self._locator.known}
        return {
            "staleness": self.staleness,
            "steps": self.steps,
            "wait_s": self.wait_s,
            "located": self._locator.located,
            "not_located": self._locator.missed,
            "modules": {name: id(module) in known for name, module in self._locator.modules.items()},
        }

    # --- a step -------------------------------------------------------------------------------------------------------

    def _learn(self, batch: Any) -> Any:
        if not self.model.training:
            with torch.no_grad():
                return _loss_and_output(self.model(batch))[1]
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        loss, output = _loss_and_output(self.model(batch))
        loss.sum().backward()
        if self._reduce is not None:
            self._reduce()
        if self.optimizer is not None:
            self.optimizer.step()
        return output

    def _end(self, run: Run) -> None:
        if self._run is run:
            self._run = None
        run.close()


def _loss_and_output(given: Any) -> tuple[Tensor, Any]:
    """The loss that a model returned, and the value that the pipeline yields."""
    loss, output = given if isinstance(given, tuple) and len(given) == 2 else (given, given)
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"Pipeline: model(batch) must return the loss, or (loss, output), got {type(given).__name__}; pass step= "
            "to use your own training step"
        )
    return loss, output.detach() if isinstance(output, Tensor) else output
