"""`ServersPublication`: tables on parameter servers, which send their own rows; a worker asks how far they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from shoal.errors import DeadlineError
from shoal.serving.sync.publisher import PublisherStatus, TargetStatus
from shoal.serving.sync.replica_targets import absolute
from shoal.sharded.ps.client.client import PsClient
from shoal.stamps import Stamp

POLL_S = 0.02


class ServersPublication:
    """Has the servers of a client publish; those that do so for the same model already go on as they were told.

    With ``paced`` they make rounds when `nudge` asks for them, not by the clock.

    Raises:
        UnsupportedError: a server cannot, for it was not started by ``shoal ps``.
        ConfigError: a server publishes another model.
    """

    def __init__(
        self,
        client: PsClient,
        *,
        model: str,
        registry: str | None,
        targets: Sequence[str] | None,
        every_s: float,
        paced: bool = False,
    ) -> None:
        self._client = client
        self._wish: dict[str, Any] = {
            "model": model,
            "registry": None if registry is None else absolute(registry),
            "targets": targets,
            "every_s": every_s,
        }
        if paced:  # servers of earlier versions do not know it
            self._wish["paced"] = True
        client.publish(self._wish)

    def _ask(self, wish: dict[str, Any]) -> list[dict[str, Any]]:
        """Asks all servers; one that was started anew and knows of nothing is told again."""
        told = self._client.publish(wish)
        if not all(one["publishing"] for one in told):
            told = self._client.publish(self._wish | wish)
        return told

    def flush(self, timeout_s: float) -> None:
        """Blocks until every live replica has every write of this worker."""
        self._client.flush()
        end = time.monotonic() + timeout_s
        wanted = [Stamp(*told["now"]) for told in self._ask({"nudge": True})]
        while True:
            late = [self._late(told, stamp) for told, stamp in zip(self._ask({"nudge": True}), wanted, strict=True)]
            if not any(late):
                return
            if time.monotonic() > end:
                raise DeadlineError(f"after {timeout_s:g} s: {'; '.join(why for why in late if why)}")
            time.sleep(POLL_S)

    def _late(self, told: dict[str, Any], wanted: Stamp) -> str:
        """What a server has not sent yet, "" where that is nothing."""
        status = _status(told)
        if not status.asked or status.stamp is None or status.stamp < wanted:
            return f"{status.source} made no round yet that has write {wanted.step}"
        without = [
            f"{target.target}{f' ({target.error})' if target.error else ''}"
            for target in status.targets
            if target.complete is None or target.complete < wanted
        ]
        return f"{', '.join(without)} lacks rows of {status.source}" if without else ""

    def nudge(self) -> None:
        """Has every server make a round now."""
        self._ask({"nudge": True})

    def pending(self) -> tuple[int, int]:
        """(ids that changed since the servers' last rounds, rows that they hold)."""
        told = self._ask({})
        return sum(one.get("changed", 0) for one in told), sum(one.get("rows", 0) for one in told)

    def status(self) -> list[PublisherStatus]:
        """How far each server is."""
        return [_status(told) for told in self._ask({})]


def _status(told: dict[str, Any]) -> PublisherStatus:
    targets = []
    for one in told.get("targets", ()):
        fields: dict[str, Any] = dict(one)
        if fields["complete"] is not None:
            fields["complete"] = Stamp(*fields["complete"])
        targets.append(TargetStatus(**fields))
    stamp = told.get("stamp")
    return PublisherStatus(
        source=told.get("source", ""), rounds=told.get("rounds", 0), stamp=None if stamp is None else Stamp(*stamp),
        unacknowledged=told.get("unacknowledged", 0), targets=targets, asked=told.get("asked", False),
    )  # fmt: skip
