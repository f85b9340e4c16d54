"""Fills an empty server directory from an object store, with the shard's last stored state."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from shoal.durable import move_folder, sync_folder
from shoal.errors import ConfigError, DataError
from shoal.sharded.ps.archive.store import Archive, Segment, chosen
from shoal.sharded.ps.replica.log_reader import records
from shoal.sharded.ps.replica.terms import FILE as TERMS
from shoal.sharded.ps.server.checkpoint import Checkpoint
from shoal.sharded.ps.server.log import Log


@dataclass(frozen=True, slots=True)
class Restored:
    """The writes and checkpoints that a directory was filled with."""

    checkpoint: int
    """The last write in the checkpoint; 0 without one."""
    last: int
    """The last write in the log, or in the checkpoint if there is no log after it."""
    kept: tuple[str, ...]
    """Checkpoints that a trainer keeps by name."""


def restore(
    archive: Archive,
    directory: Path,
    *,
    until: datetime | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Restored:
    """Download the newest checkpoint and the log after it, checking every digest and CRC.

    Args:
        archive: the shard's archive.
        directory: the server's directory; it must not contain checkpoints or a log.
        until: ignore everything stored later. The log is stored every few seconds, so this is exact to a few seconds.
        note: called with a line of text for each step.

    Raises:
        ConfigError: the directory is not empty, or the archive has nothing of the shard from before ``until``.
        DataError: an object is damaged or missing.
    """
    directory.mkdir(parents=True, exist_ok=True)
    taken = [path.name for path in directory.iterdir() if path.name.startswith(("checkpoint-", "log-", "kept-"))]
    if taken:
        raise ConfigError(f"{directory} must be empty, but contains {sorted(taken)[0]}; choose another directory")
    stored = [one for one in archive.checkpoints() if until is None or one.stored <= until]
    segments = [one for one in archive.segments() if until is None or one.unix_ms <= until.timestamp() * 1000]
    if not stored and not segments:
        when = f" from before {until}" if until is not None else ""
        raise ConfigError(f"{archive.url} has no checkpoint or log of this shard{when}")
    number = stored[-1].number if stored else 0
    kept = {name: each for name, each in archive.kept().items() if any(one.number == each for one in stored)}
    for name, each in sorted(kept.items()):
        note(f"checkpoint {each}, kept as {name}")
        _bring(archive, each, directory / f"kept-{name}")
    last = _bring_log(archive, segments, directory, number, note)
    if stored:  # last: a server can start from a directory as soon as it has a checkpoint
        note(f"checkpoint {number}")
        _bring(archive, number, directory / f"checkpoint-{number:016d}")
    return Restored(number, last, tuple(sorted(kept)))


def _bring(archive: Archive, number: int, target: Path) -> None:
    draft = target.parent / f".tmp-{target.name}-{secrets.token_hex(4)}"
    draft.mkdir()
    for name in archive.files(number):
        if "/" in name or name in (".", ".."):
            raise DataError(f"{archive.url}: checkpoint {number} has an unexpected file {name!r}")
        archive.fetch(f"checkpoints/checkpoint-{number:016d}/{name}", draft / name)
    checkpoint = Checkpoint(draft)
    if checkpoint["number"] != number:
        raise DataError(f"{archive.url}: checkpoint {number} has the number {checkpoint['number']} in its manifest")
    if checkpoint.saved is not None:
        checkpoint.saved.verify()
    sync_folder(draft)
    move_folder(draft, target)


def _bring_log(
    archive: Archive, segments: list[Segment], directory: Path, after: int, note: Callable[[str], None]
) -> int:
    """Download the log after a checkpoint into one file; returns the number of its last record."""
    last, log = after, None
    try:
        for segment, first, end in chosen(segments, after):
            note(f"writes {first} to {end}")
            data = archive.get(f"log/{segment.name}")
            for number, header, ids, values in records(memoryview(data), segment.first):
                if first <= number <= end:
                    log = log or Log(directory, next_number=after + 1)
                    log.append([header, ids, values])
                    last = number
    finally:
        if log is not None:
            log.close()
    (directory / TERMS).unlink(missing_ok=True)
    return last
