"""`Joiner`: the native joiner with its state on disk, so that a killed process resumes where it was.

The state folder holds segments (open impressions and actions, in immutable files), ``join.manifest`` (the newest
checkpoint: segments, positions, counts), and a tail (messages since the checkpoint, in order of arrival). Resuming
loads the checkpoint and replays the tail; samples that are made again have the same numbers as before.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.data.joining.config import JoinConfig, micros
from shoal.durable import FileDigest, read_saved, replace_files
from shoal.durable.files import TEMPORARY
from shoal.errors import CapacityError, ConfigError, DataError, ShoalError

IMPRESSIONS, ACTIONS = 0, 1
SIDES = ("impressions", "actions")
FOREVER = 1 << 61
FORMAT, VERSION = "shoal.join", 1
_MANIFEST = "join.manifest"
_WAITING_BYTES = 4 << 20
_FILES = re.compile(r"(segment-(\d+)\.seg|tail-(\d+)\.log)(" + TEMPORARY + r".*)?")

Write = Callable[[int, Sequence[bytes]], None]
"""Takes samples and the number of the first one; must accept samples that it already has."""


Bury = Callable[[list[tuple[int, str]]], None]
"""Takes the (index, reason) of broken messages."""


class Joiner:
    """Joins the messages passed to `offer`. Used by one thread at a time.

    Args:
        config: the settings of the join. This process owns the state folder until `close`.
        write: called with the samples in order. After a crash the first calls can repeat samples that were written
            before, under the same numbers.
        note: called with messages for people, such as about a tail that ends in the middle of a batch.
        block_bytes: size of records in memory before they go to a segment; 0 for a part of the memory budget.

    Raises:
        ConfigError: another process uses the folder, or its state belongs to a join with other settings.
        DataError: a file of the state is damaged; with ``on_damage="skip"`` its records are counted instead.
    """

    def __init__(
        self, config: JoinConfig, write: Write, *, note: Callable[[str], None] | None = None, block_bytes: int = 0
    ) -> None:
        self.config, self._write, self._note = config, write, note or (lambda text: None)
        self.folder = os.path.abspath(config.state)
        self._digests: dict[int, FileDigest] = {}
        self._tail = 0
        self._swept = 0
        self.checkpoints = 0
        """The number of checkpoints written by this process."""
        os.makedirs(self.folder, exist_ok=True)
        self._lock: int | None = _locked(self.folder)
        try:
            self.native = config.native(self.folder, block_bytes=block_bytes)
            self._restore()
        except BaseException:
            self.close()
            raise

    # --- joining ------------------------------------------------------------------------------------------------------

    def offer(
        self, side: int, messages: Sequence[bytes], position: Any, *, bury: Bury | None = None, now: float | None = None
    ) -> list[tuple[int, str]]:
        """Join messages of one side; return the (index, reason) of broken ones, which go to ``bury`` first.

        ``position`` is where this side's input continues.
        """
        latest = (time.time_ns() // 1000 if now is None else round(now * 1e6)) + micros(self.config.future, "future")
        broken = self.native.read(side, list(messages), latest)
        if broken and bury is not None:
            bury(broken)  # before `accept`: after a crash they are buried twice rather than lost
        self.native.accept(_bytes(position))
        self._drain()
        return broken

    def advance(self, side: int, watermark_us: int, position: Any = None) -> None:
        """Declare that a side has nothing before ``watermark_us`` left: it ended (`FOREVER`), or is quiet."""
        at = self.native.position(side) if position is None else _bytes(position)
        self.native.advance(side, watermark_us, at)
        self._drain()

    def position(self, side: int) -> Any:
        """Where the input of a side continues; None at its beginning."""
        at = self.native.position(side)
        return json.loads(at) if at else None

    def _drain(self) -> None:
        more = True
        while more:
            try:
                more = self.native.run(_WAITING_BYTES)
            except DataError as error:
                self._damaged(error)
            except ValueError as error:  # std::length_error
                raise CapacityError(f"join {self.folder}: {error}") from None
            self._take()

    def _take(self) -> None:
        first, samples = self.native.take()
        if samples:
            self._write(first, samples)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Write a checkpoint: after a crash, messages before it are not read again.

        Raises:
            OSError: for example, the disk is full; the previous checkpoint and everything in memory remain.
        """
        self.native.seal()
        files = {}
        for number, size, crc in self.native.segments():
            digest = self._digests.setdefault(number, FileDigest(size, crc))
            files[_segment(number)] = digest
        state = self.native.state()
        tail = self._tail + 1
        fields = {
            "format": FORMAT, "version": VERSION, "settings": self.config.identity(), "state": state, "tail": tail,
            "positions": {side: self.position(number) for number, side in enumerate(SIDES)},
        }  # fmt: skip
        replace_files(os.path.join(self.folder, _MANIFEST), fields, files, {})
        self.native.open_tail(self._path(f"tail-{tail}.log"), 0, self.config.sync)
        self._remove(f"tail-{self._tail}.log")
        self._tail = tail
        # Segments that were created and emptied since the last checkpoint were never in a manifest.
        for number in range(self._swept, state["next_segment"]):
            if _segment(number) not in files:
                self._remove(_segment(number))
        self._swept = state["next_segment"]
        self._digests = {number: digest for number, digest in self._digests.items() if _segment(number) in files}
        self.checkpoints += 1

    def close(self) -> None:
        """Release the folder. Messages since the last checkpoint are in the tail."""
        self.native = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Joiner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- resuming -----------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        path = self._path(_MANIFEST)
        try:
            saved = read_saved(path)
        except FileNotFoundError:
            files: Mapping[str, FileDigest] = {}
        else:
            fields, files = saved.fields, saved.files
            if fields.get("format") != FORMAT or fields.get("version") != VERSION:
                raise DataError(f"{path} is not a checkpoint of a joiner, version {VERSION}")
            self._check_settings(fields["settings"])
            self._tail = int(fields["tail"])
            self._swept = int(fields["state"]["next_segment"])
            numbers = self._segments(files, saved.missing())
            at = [_bytes(fields["positions"].get(side)) for side in SIDES]
            self.native.restore(fields["state"], numbers, *at)
        self._sweep(files)
        tail = self._path(f"tail-{self._tail}.log")
        try:
            end, torn = self.native.replay(tail, _WAITING_BYTES, self._take)
        except ShoalError:
            raise
        except ValueError as error:  # std::length_error
            raise CapacityError(f"join {self.folder}: {error}") from None
        self._take()
        if torn:
            self._note(f"{tail} ends inside a batch, as after a crash: its last {torn} bytes are read from the input")
        self.native.open_tail(tail, end, self.config.sync)

    def _segments(self, files: Mapping[str, FileDigest], missing: str | None) -> list[int]:
        if missing is not None:
            raise DataError(f"{missing}; without it open impressions are lost. Restore it, or remove {self.folder}")
        numbers = []
        for name, digest in files.items():
            match = _FILES.fullmatch(name)
            if match is None or match[2] is None:
                raise DataError(f"{self._path(_MANIFEST)} names {name!r}, which is not a segment")
            numbers.append(int(match[2]))
            self._digests[numbers[-1]] = digest
        return sorted(numbers)

    def _check_settings(self, saved: Mapping[str, Any]) -> None:
        own = json.loads(json.dumps(self.config.identity()))
        for name, value in own.items():
            if saved.get(name) != value:
                raise ConfigError(
                    f"join: the state in {self.folder} was made with {name} = {saved.get(name)!r}, but the setting is "
                    f"{value!r}; change it back, or name another state folder"
                )

    def _sweep(self, files: Mapping[str, FileDigest]) -> None:
        """Remove files that a killed process left behind: those that are not part of the checkpoint."""
        for name in os.listdir(self.folder):
            match = _FILES.fullmatch(name)
            if match is not None and name not in files and name != f"tail-{self._tail}.log":
                self._remove(name)

    def _damaged(self, error: DataError) -> None:
        match = re.search(r"segment-(\d+)\.seg", str(error))
        if self.config.on_damage != "skip" or match is None:
            raise DataError(
                f'{error}. Its records are lost unless the file is restored; with on_damage = "skip" the joiner '
                "counts them and continues"
            ) from None
        lost = self.native.drop_segment(int(match[1]))
        self._note(f"{error}; {lost} open records are lost and counted")

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name))


def _segment(number: int) -> str:
    return f"segment-{number:010d}.seg"


def _bytes(position: Any) -> bytes:
    return b"" if position is None else json.dumps(position).encode()


def _locked(folder: str) -> int:
    lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(f"join: another joiner uses the state folder {folder}; each needs its own") from None
    return lock
