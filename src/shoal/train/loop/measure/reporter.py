"""`Reporter`: receives the events of a run. The base class ignores them; the command line prints them."""

from __future__ import annotations

from typing import Any


class Reporter:
    """Receives the events of a run on the first rank, with plain values. `bad_row` can be called from any thread."""

    def start(self, **values: Any) -> None:
        """Before the first step: ``step``, ``resumed`` (a path or None), ``world``, ``model``, ``parameters`` and more.

        Each of ``tables`` is a dict: ``name``, ``features``, ``dim``, ``optimizer``, ``rows``.
        """

    def tick(self, *, step: int, epoch: int, samples: int) -> None:
        """After every step; must be cheap."""

    def progress(self, **values: Any) -> None:
        """Every ``log_steps``: step, epoch, samples, samples_per_s, auc, logloss, calibration, rows, memory, …

        ``tables`` has ``rows`` and ``bytes`` of each table by name.
        """

    def evaluated(self, **values: Any) -> None:
        """After an evaluation: step, auc, logloss, calibration, samples, is_best and more."""

    def saved(self, *, step: int, path: str, seconds: float) -> None:
        """A checkpoint is complete."""

    def exported(self, *, step: int, path: str, seconds: float) -> None:
        """A version for `shoal serve` is complete."""

    def bad_row(self, *, where: str, why: str) -> None:
        """The first row that could not be read."""

    def note(self, text: str) -> None:
        """A message for people."""

    def failed(self, what: str, text: str) -> None:
        """A checkpoint or an export (``what``) could not be written, and the run continues."""
        self.note(text)

    def alert(self, text: str) -> None:
        """The guard has stopped pushes and exports, or resumed them."""

    def end(self, **values: Any) -> None:
        """The run ended: ``why`` is finished, early_stop, max_steps, stopped (by a hook), guard (by ``[serve.guard]``)
        or interrupted.

        ``model_step`` is the step of the model that it ended with, ``kept_step`` that of the best checkpoint.
        """
