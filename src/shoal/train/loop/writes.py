"""Names of updates on parameter servers, so that each is applied once however often it is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.train.loop.config import TrainConfig
from shoal.train.loop.saving import Progress


class NamedWrites:
    """The updates of one rank on servers that other trainers use, too, and that do not go back to its checkpoint.

    Goes on with the writes behind those in the ``reader`` state of a checkpoint, which it takes out; servers leave out
    what they have applied.
    """

    def __init__(
        self, client: Any, reader: dict[str, Any], at: Progress, rank: int, resumed: bool, note: Callable[[str], None]
    ) -> None:
        self._client, self._note = client, note
        numbers = reader.pop("writes", None)
        had = None if not resumed or numbers is None else len(numbers)
        if resumed and had != client.num_ps:
            what = "ranks" if had is None else "parameter servers"
            note(f"the checkpoint is of another number of {what}: updates of files since then may be applied twice")
            numbers = None
        self.new = numbers is None
        """Whether it begins with names that no checkpoint has."""
        again = f"/{at.run:x}" if self.new and resumed else ""
        self._writer = reader.pop("writer", None) or f"{at.name}/{rank}{again}"
        client.continue_writes(self._writer, numbers or [0] * client.num_ps)

    def follow(self, live: Any, train: TrainConfig) -> None:
        """Names updates by the records of the sources where that can be, so that another run may go on with them."""
        what = (
            "steps of several batches" if train.accumulate > 1 else "a run with a staleness" if train.staleness else ""
        )
        if what or not live.learn_by_partition(self._client):
            what = what or "these sources"
            self._note(
                f"updates of {what} are named by this run and its batches: it must be started again with its out.dir"
            )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps with the state of the reader."""
        self._client.flush()
        return {"writes": self._client.write_numbers(), "writer": self._writer}
