"""`JoinReader`: a join as a live source, from which a trainer reads joined samples at exact positions."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from shoal.data.joining.config import JoinConfig, join_config, load_join
from shoal.data.joining.pump import Pump
from shoal.data.joining.sample_log import SampleLog
from shoal.data.live import Chunk, Lag
from shoal.errors import DataError, ShoalError

PARTITION = "joined"
_WAIT_S = 0.02
log = logging.getLogger(__name__)


class JoinReader:
    """Joins in this process while it is polled. A position is the number of the next sample.

    Samples are kept in ``<state>/samples`` until a later position was acknowledged twice, so that the reader can go
    back to its newest checkpoint and to the one before it.
    """

    def __init__(self, config: JoinConfig, *, to_end: bool = False) -> None:
        self.config = config
        self._log = SampleLog(os.path.join(config.state, "samples"))
        self._acknowledged = 0
        try:
            self.pump = Pump(config, self._log.append, before_checkpoint=self._log.flush, to_end=to_end)
        except BaseException:
            self._log.close()
            raise
        self._next = self._log.first

    def open(self, positions: Mapping[str, Any] | None = None) -> None:
        """Continue with a sample that is still kept; by default the oldest one."""
        given = (positions or {}).get(PARTITION, self._log.first)
        if not isinstance(given, int) or not self._log.first <= given <= self._log.count:
            raise DataError(
                f"join {self.config.state}: the position must be a sample from {self._log.first} to {self._log.count}, "
                f"got {given!r}; the state folder belongs to another run, or was removed"
            )
        self._next = given

    def poll(self, max_records: int, timeout_s: float) -> list[Chunk]:
        deadline = time.monotonic() + timeout_s
        while self._next >= self._log.count:
            left = deadline - time.monotonic()
            if self.pump.ended or (self.pump.step(max(0.0, min(left, _WAIT_S))) == 0 and left <= 0):
                break
        first, records = self._next, self._log.read(self._next, max_records)
        self._next += len(records)
        return [Chunk(PARTITION, records, range(first + 1, self._next + 1))] if records else []

    def positions(self) -> dict[str, Any]:
        return {PARTITION: self._next}

    def acknowledge(self, positions: Mapping[str, Any]) -> None:
        self._log.forget(self._acknowledged)
        self._acknowledged = positions.get(PARTITION, self._acknowledged)

    def lag(self) -> Lag:
        """The lag of the slower input, plus the samples that wait to be read."""
        lags = [reader.lag() for reader in self.pump.readers]
        records = [one.records for one in lags if one.records is not None]
        seconds = [one.seconds for one in lags if one.seconds is not None]
        waiting = self._log.count - self._next
        return Lag(
            sum(records) + waiting if len(records) == 2 else None,
            max(seconds) if len(seconds) == 2 else None,
            all(one.reachable for one in lags),
        )

    @property
    def ended(self) -> bool:
        return self.pump.ended and self._next >= self._log.count

    def close(self) -> None:
        """Write a checkpoint for a faster restart, close the inputs and release the state folder."""
        try:
            self.pump.checkpoint()
        except (OSError, ShoalError, RuntimeError) as error:  # messages since the last checkpoint are in the tail
            log.warning("join %s: no checkpoint was written at the end: %s", self.config.state, error)
        self.pump.close()
        self._log.close()

    def __enter__(self) -> JoinReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(config: JoinConfig | str | os.PathLike[str] | Mapping[str, Any], *, to_end: bool = False) -> JoinReader:
    """Join impressions and actions in this process; return a live source of samples.

    Args:
        config: a `JoinConfig`, the path of a ``join.toml``, or its contents.
        to_end: stop at the current ends of the inputs, and close all windows there.

    >>> import tempfile, pathlib
    >>> root = pathlib.Path(tempfile.mkdtemp())
    >>> for side, text in (("shown", '{"id": "a", "time": 10}'), ("clicks", '{"id": "a", "time": 12}')):
    ...     (root / side).mkdir()
    ...     _ = (root / side / "1.jsonl").write_text(text + chr(10))
    >>> sides = {side: {"from": f"dir:{root}/{side}", "key": "id"} for side in ("shown", "clicks")}
    >>> settings = {"impressions": sides["shown"], "actions": sides["clicks"], "window": "1h", "state": f"{root}/state"}
    >>> with join(settings, to_end=True) as reader:
    ...     [record for chunk in reader.poll(10, 5) for record in chunk.records]
    [b'{"id": "a", "time": 10,"label":1}']
    """
    if isinstance(config, Mapping):
        config = join_config(config)
    elif not isinstance(config, JoinConfig):
        config = load_join(config)
    return JoinReader(config, to_end=to_end)
