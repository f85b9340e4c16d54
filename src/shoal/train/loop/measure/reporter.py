"""`Reporter`: what a run tells while it goes on. The base tells nothing; the command line's tell people or machines."""

from __future__ import annotations

from typing import Any


class Reporter:
    """Events of a run on the first rank, with plain values. Bad rows may come from another thread."""

    def start(self, **values: Any) -> None:
        """Before the first step: ``step``, ``resumed`` (a path or None), ``world``, ``model``, ``parameters``, ….

        Each of ``tables`` is a dict: ``name``, ``features``, ``dim``, ``optimizer``, ``rows``.
        """

    def tick(self, *, step: int, epoch: int, samples: int) -> None:
        """After every step; must be cheap."""

    def progress(self, **values: Any) -> None:
        """Every ``log_steps``: step, epoch, samples, samples_per_s, auc, logloss, calibration, rows, memory, …

        ``tables`` has ``rows`` and ``bytes`` of each table by name.
        """

    def evaluated(self, **values: Any) -> None:
        """step, auc, logloss, calibration, samples, best."""

    def saved(self, *, step: int, path: str, seconds: float) -> None:
        """A checkpoint is whole."""

    def exported(self, *, step: int, path: str, seconds: float) -> None:
        """A version for `shoal serve` is whole."""

    def bad_row(self, *, where: str, why: str) -> None:
        """The first row that could not be read."""

    def note(self, text: str) -> None:
        """Something that a person should know."""

    def failed(self, what: str, text: str) -> None:
        """A checkpoint or an export (``what``) could not be written, and the run continues."""
        self.note(text)

    def alert(self, text: str) -> None:
        """The guard has stopped pushes and exports, or let them begin again."""

    def end(self, **values: Any) -> None:
        """How it ended: ``why`` is finished, early_stop, max_steps, stopped (by a hook), guard (by ``[serve.guard]``)
        or interrupted.

        ``model_step`` is the step of the model that it ended with, ``kept_step`` that of the best one in a checkpoint.
        """
