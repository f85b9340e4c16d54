"""`Pipeline`: while one batch is learnt from, the next ones are read, moved, located and, if asked for, looked up."""

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
    """Trains a model while the next batches are made ready.

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
    >>> losses = [float(loss) for loss in pipeline(batches)]  # each has been learnt from when it comes
    >>> len(losses)
    5

    With a ``staleness`` of 0 results are those of a plain loop, to the last bit: batches are read, moved to the device
    and their ids located (converted, exchanged between ranks, dealt out to servers) ahead of their step; rows are read
    in their forward. With a staleness of k, rows are read and updated by a thread of their own, in this order on every
    run: the rows of batch j are read after the update of batch j - 1 - k. Weights of the dense part are never stale.

    Three ways to use it: ``for out in pipeline(batches)``; ``pipeline.progress(iterator)``, as TorchRec's pipelines;
    and ``for batch in pipeline.batches(batches)``, with a step of your own in the loop.

    Args:
        model: called as ``model(batch)``; returns the loss, or ``(loss, output)``. In evaluation mode
            (``model.eval()``) nothing is learnt.
        optimizer: of the dense part; of rows, too, if it is a `shoal.nn.SparseOptimizer`.
        device: where batches are moved, on a stream of its own; None: they stay where they are.
        step: ``step(batch)``, in place of forward, backward and the optimizer's step; its result is what comes out.
        reduce: called between backward and the optimizer's step, such as ``OverlappedReducer(model).finish``.
        transform: applied to each batch by the thread that reads. Modules find their ids ahead only if they are parts
            of the batch: what has to be computed from it first is computed here.
        staleness: see above. Raise it from 0 to 1 when steps wait for servers or other ranks, and evaluate the model
            again.
        ahead: batches that wait to be used; 0: batches are read when they are asked for. Raise it when reading is fast
            on average, but sometimes slow.
        on_uneven: with tables over ranks, what happens when some ranks run out of batches before others: ``"join"``,
            they take part without samples; ``"stop"``, all stop; ``"error"``, all raise.
        empty_batch: makes a batch without samples of the last one (or of None), where that is not obvious.
        section: a number that rises with the batches, such as the epoch: ranks use all batches of one section before
            those of the next.
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
            raise ConfigError("Pipeline: give step=, or optimizer and reduce=, which a step of yours calls itself")
        self.model, self.optimizer = model, optimizer
        self.device = None if device is None else torch.device(device)
        self.staleness = staleness
        self.joined = False
        """Whether the batch that came last has no samples, since this rank has run out of them."""
        self.section = 0
        """Of the batch that came last."""
        self.wait_s = 0.0
        """Seconds that steps waited for their batches so far. If it is most of the time, reading is too slow."""
        self.steps = 0
        """Batches that came so far."""
        self._step = step or self._learn
        self._reduce = reduce
        self._settings = Settings(staleness, ahead, self.device, transform, on_uneven, empty_batch, section)
        self._locator = Locator(model)
        self._run: Run | None = None
        self._progress: tuple[Any, Generator[Any, None, None]] | None = None

    # --- using it -----------------------------------------------------------------------------------------------------

    def __call__(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        """Learns from each batch; gives what the model (or ``step``) returned: its output, or its loss alone."""
        with closing(self.batches(batches)) as ready:
            for batch in ready:
                out = self._step(batch)
                if not self.joined:
                    yield out

    def progress(self, iterator: Iterator[Any]) -> Any:
        """Learns from the next batch of an iterator, the same in every call; what `__call__` gives.

        Raises:
            StopIteration: there are no more.
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
        """The batches, each ready when it comes, for a loop with a step of its own.

        The step of a batch has to end before the next one is asked for. While other ranks have more batches, a rank
        that has run out gets some without samples (`joined` is True): it takes its step with those.
        """
        if self._run is not None:
            self._end(self._run)  # of a pass that was left
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
        """Waits until every update is in the rows. With a staleness above 0, call it before you save or look at them.

        All ranks call it together.
        """
        if self._run is not None and self._run.lane is not None:
            self._run.lane.settle()

    def close(self) -> None:
        """Stops what is under way; batches that were made ready are dropped."""
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
        """What is done ahead, and how well it works: for each module over tables whether its ids are located ahead."""
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
    """What a model returned: its loss, and what comes out of the pipeline."""
    loss, output = given if isinstance(given, tuple) and len(given) == 2 else (given, given)
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"Pipeline: model(batch) must return the loss, or (loss, output), got {type(given).__name__}; with step= a "
            "function of yours does the step"
        )
    return loss, output.detach() if isinstance(output, Tensor) else output
