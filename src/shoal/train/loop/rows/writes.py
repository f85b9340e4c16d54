"""Names of updates on parameter servers, so that each is applied once however often it is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.train.loop.config import TrainConfig
from shoal.train.loop.progress import Progress


class NamedWrites:
    """Names one rank's updates on servers that other trainers share and that are not reset to its checkpoint.

    Numbers continue after those in the ``reader`` state of a checkpoint, from which they are removed; servers skip
    updates that they have already applied.
    """

    def __init__(
        self, client: Any, reader: dict[str, Any], at: Progress, rank: int, resumed: bool, note: Callable[[str], None]
    ) -> None:
        self._client, self._note = client, note
        numbers = reader.pop("writes", None)
        had = None if not resumed or numbers is None else len(numbers)
        if resumed and had != client.num_ps:
            what = "ranks" if had is None else "parameter servers"
            note(f"the number of {what} has changed since the checkpoint; updates since then may be applied twice")
            numbers = None
        self.new = numbers is None
        """Whether the names are not in any checkpoint yet."""
        again = f"/{at.run:x}" if self.new and resumed else ""
        self._writer = reader.pop("writer", None) or f"{at.name}/{rank}{again}"
        client.continue_writes(self._writer, numbers or [0] * client.num_ps)

    def follow(self, live: Any, train: TrainConfig) -> None:
        """Name updates by the records of the sources if possible, so that another run can continue them."""
        what = (
            "steps of several batches" if train.accumulate > 1 else "a run with a staleness" if train.staleness else ""
        )
        if what or not live.learn_by_partition(self._client):
            what = what or "these sources"
            self._note(
                f"updates of {what} are named after this run and its batches; to continue them, restart it with the "
                "same [out] dir"
            )

    def state(self) -> dict[str, Any]:
        """The values that a checkpoint keeps with the state of the reader."""
        self._client.flush()
        return {"writes": self._client.write_numbers(), "writer": self._writer}
