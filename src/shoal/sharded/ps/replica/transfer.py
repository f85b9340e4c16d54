"""Copies a checkpoint from the leader to a server that has none."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.durable import move_folder, sync_folder
from shoal.errors import ConfigError, DataError
from shoal.sharded.ps.protocol import Op
from shoal.sharded.ps.replica.peer import Peer
from shoal.sharded.ps.server.checkpoint import Checkpoint, series
from shoal.sharded.ps.server.log import log_files, replay

log = logging.getLogger("shoal.ps")

CHUNK_BYTES = 8 << 20
MANY = 20_000
"""An empty server copies a checkpoint, and a leader writes a new one, rather than replay more records than this."""
ANSWER_S = 60.0
_FOLDER = re.compile(r"(checkpoint-\d{16,}|kept-[A-Za-z0-9_]+-[A-Za-z0-9_]+)")
_FILE = re.compile(r"[A-Za-z0-9_.\-]+")


def give(directory: Path, wish: dict[str, Any], last: int, checkpoint: Callable[[], str]) -> list[Any]:
    """The answer to FETCH: for ``{}`` the list of files, for ``{"file", "offset"}`` a part of one.

    ``checkpoint`` is called if there is no checkpoint, or the newest is more than `MANY` records before ``last``.
    """
    if not wish:
        whole = series(directory).whole()
        if not whole or last - whole[-1].number > MANY:
            checkpoint()
            whole = series(directory).whole()
        folders = [Path(whole[-1].path), *sorted(path for path in directory.glob("kept-*") if path.is_dir())]
        listed = {folder.name: {file.name: file.stat().st_size for file in folder.iterdir()} for folder in folders}
        return [json.dumps(listed).encode()]
    folder, _, file = str(wish.get("file")).partition("/")
    offset = wish.get("offset")
    if not _FOLDER.fullmatch(folder) or not _FILE.fullmatch(file) or file in (".", "..") or not isinstance(offset, int):
        raise ConfigError(f"FETCH must name a file of a checkpoint and an offset, got {wish!r:.80}")
    try:
        with open(directory / folder / file, "rb") as source:
            source.seek(offset)
            return [source.read(CHUNK_BYTES)]
    except OSError as error:
        raise ConfigError(f"{folder}/{file} cannot be read: {error.strerror}") from None


def listed_files(answer: bytes, leader: str) -> dict[str, dict[str, int]]:
    """Check and return the folders in a leader's answer, with their files and sizes."""
    try:
        listed = json.loads(answer)
        for folder, files in listed.items():
            if not _FOLDER.fullmatch(folder):
                raise DataError(f"{leader} lists a folder {folder!r:.80} that is not a checkpoint")
            for file, size in files.items():
                if not _FILE.fullmatch(file) or file in (".", "..") or type(size) is not int or size < 0:
                    raise DataError(
                        f"{leader} lists a file {file!r:.80} of {size!r:.40} bytes, which no checkpoint can have"
                    )
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{leader}: its list of checkpoint files is malformed ({error}): {answer[:80]!r}") from None
    return listed


def take(directory: Path, peer: Peer) -> int:
    """Copy the leader's newest checkpoint, and its kept ones, into an empty directory; returns the newest's number.

    A folder gets its name when it is complete and matches its digests.

    Raises:
        DataError: the copy is damaged.
        PeerError, DeadlineError: the leader does not answer.
    """
    listed = listed_files(bytes(peer.ask(Op.FETCH, {}, 600.0).payload[0]), peer.address)
    progress = _progress(peer.address)
    total, done = sum(size for files in listed.values() for size in files.values()), 0
    number = 0
    for folder, files in sorted(listed.items(), key=lambda item: item[0].startswith("checkpoint-")):
        draft = directory / f".tmp-{folder}-{secrets.token_hex(4)}"
        draft.mkdir(parents=True)
        for file, size in files.items():
            with open(draft / file, "wb") as target:
                while target.tell() < size:
                    part = peer.ask(Op.FETCH, {"file": f"{folder}/{file}", "offset": target.tell()}, ANSWER_S).payload
                    if not part or not memoryview(part[0]).nbytes:
                        raise DataError(f"{folder}/{file} ended at {target.tell()} of {size} bytes")
                    target.write(part[0])
                    done += memoryview(part[0]).nbytes
                    progress(done, total)
                target.flush()
                os.fsync(target.fileno())
        checkpoint = Checkpoint(draft)
        if checkpoint.saved is not None:
            checkpoint.saved.verify()
        sync_folder(draft)
        move_folder(draft, directory / folder)
        if folder.startswith("checkpoint-"):
            number = checkpoint["number"]
    return number


def _progress(address: str) -> Callable[[int, int], None]:
    logged = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal logged
        if time.monotonic() - logged > 5:
            logged = time.monotonic()
            log.info("copied %d of %d MB of the checkpoint from %s", done >> 20, total >> 20, address)

    return report


def set_aside(directory: Path, why: str, *, identity: bool = False) -> None:
    """Move the files that hold a server's rows, with ``identity`` also its name, into a sub-folder of its directory."""
    begins = ("checkpoint-", "kept-", "released-", "log-", "terms", "damaged-", *(("name",) if identity else ()))
    found = [path for path in directory.iterdir() if path.name.startswith(begins)]
    if not found:
        return
    aside = directory / f"superseded-{secrets.token_hex(4)}"
    aside.mkdir()
    for path in found:
        move_folder(path, aside / path.name)
    (aside / "why.txt").write_text(why + "\n")
    log.warning("%s; the files of %s were moved to %s; remove them when you no longer need them", why, directory, aside)


def last_record(directory: Path) -> int:
    """The number of a directory's last record, in its log or in its newest checkpoint; 0 if it has none."""
    whole = series(directory).whole()
    last = whole[-1].number if whole else 0
    files = log_files(directory)
    if files:
        with contextlib.suppress(DataError):  # damage is reported when the log is loaded
            for number, *_ in replay(directory, max(last, files[-1][0] - 1), cut=False):
                last = max(last, number)
            last = max(last, files[-1][0] - 1)
    return last
