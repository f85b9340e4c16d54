"""`ServersPublication`: publishing by parameter servers, which send their own rows on a worker's request."""

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
    """Makes a client's servers publish; those that already publish the same model keep their settings.

    With ``paced``, they run rounds when `nudge` is called, not periodically.

    Raises:
        UnsupportedError: a server cannot publish because it was not started by ``shoal ps``.
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
        self._settings: dict[str, Any] = {
            "model": model,
            "registry": None if registry is None else absolute(registry),
            "targets": targets,
            "every_s": every_s,
        }
        if paced:  # earlier versions of the server do not have this setting
            self._settings["paced"] = True
        client.publish(self._settings)

    def _ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request to all servers; a server that was restarted without settings gets them again."""
        answers = self._client.publish(request)
        if not all(one["publishing"] for one in answers):
            answers = self._client.publish(self._settings | request)
        return answers

    def flush(self, timeout_s: float) -> None:
        """Block until every live replica has every write of this worker."""
        self._client.flush()
        end = time.monotonic() + timeout_s
        wanted = [Stamp(*answer["now"]) for answer in self._ask({"nudge": True})]
        while True:
            late = [self._late(answer, stamp) for answer, stamp in zip(self._ask({"nudge": True}), wanted, strict=True)]
            if not any(late):
                return
            if time.monotonic() > end:
                raise DeadlineError(f"after {timeout_s:g} s: {'; '.join(why for why in late if why)}")
            time.sleep(POLL_S)

    def _late(self, answer: dict[str, Any], wanted: Stamp) -> str:
        """What a server has not sent yet, for the error message; "" if nothing."""
        status = _status(answer)
        if not status.asked or status.stamp is None or status.stamp < wanted:
            return f"{status.source} has not sent write {wanted.step} yet"
        without = [
            f"{target.target}{f' ({target.error})' if target.error else ''}"
            for target in status.targets
            if target.complete is None or target.complete < wanted
        ]
        return f"{status.source} has not reached {', '.join(without)}" if without else ""

    def nudge(self) -> None:
        """Make every server run a round now."""
        self._ask({"nudge": True})

    def pending(self) -> tuple[int, int]:
        """(number of ids that changed since the servers' last rounds, number of rows that they hold)."""
        answers = self._ask({})
        return sum(one.get("changed", 0) for one in answers), sum(one.get("rows", 0) for one in answers)

    def status(self) -> list[PublisherStatus]:
        """The status of each server."""
        return [_status(answer) for answer in self._ask({})]


def _status(answer: dict[str, Any]) -> PublisherStatus:
    targets = []
    for one in answer.get("targets", ()):
        fields: dict[str, Any] = dict(one)
        if fields["complete"] is not None:
            fields["complete"] = Stamp(*fields["complete"])
        targets.append(TargetStatus(**fields))
    stamp = answer.get("stamp")
    return PublisherStatus(
        source=answer.get("source", ""), rounds=answer.get("rounds", 0), stamp=None if stamp is None else Stamp(*stamp),
        unacknowledged=answer.get("unacknowledged", 0), targets=targets, asked=answer.get("asked", False),
    )  # fmt: skip
