"""One shard's checkpoints and log segments in an object store."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, DataError, missing_extra

_SEGMENT = re.compile(r"(\d{16,})-(\d{16,})-(\d{6,})-(\d{13,})\.records")
_CHECKPOINT = re.compile(r"checkpoint-(\d{16,})")
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """Records ``first`` to ``last`` of a log, written in ``term`` and stored at ``unix_ms``."""

    term: int
    first: int
    last: int
    unix_ms: int

    @property
    def name(self) -> str:
        return f"{self.first:016d}-{self.last:016d}-{self.term:06d}-{self.unix_ms:013d}.records"

    @classmethod
    def of(cls, name: str) -> Segment | None:
        match = _SEGMENT.fullmatch(name)
        return None if match is None else cls(int(match[3]), int(match[1]), int(match[2]), int(match[4]))


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A completely stored checkpoint: its manifest, which is stored last, exists."""

    number: int
    stored: datetime


class Archive:
    """One shard's part of a store.

    Args:
        url: ``s3://bucket/prefix``, ``gs://…``, ``az://…`` or ``file:///path``; credentials come from the environment.
        shard: number of the shard.

    Raises:
        ConfigError: the URL's scheme is not supported.
    """

    def __init__(self, url: str, shard: int) -> None:
        try:
            import obstore.store
        except ImportError:
            raise missing_extra("obstore", "s3") from None
        self.url, self._root = url, f"shard-{shard:05d}"
        options: dict[str, Any] = {}
        if not url.startswith("file://"):
            options["client_options"] = {"allow_http": True, "timeout": "120s"}
            if url.startswith("s3://") and os.environ.get("AWS_ENDPOINT_URL"):
                options["config"] = {"endpoint": os.environ["AWS_ENDPOINT_URL"], "virtual_hosted_style_request": False}
        try:
            if url.startswith("file://"):
                Path(url.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
            self._store: Any = obstore.store.from_url(url, **options)
        except Exception as error:
            why = str(error).partition("\n")[0]  # the store's own data follows
            raise ConfigError(
                f"--archive must be s3://bucket/prefix, gs://…, az://… or file:///path, got {url!r} ({why})"
            ) from None

    # --- objects ----------------------------------------------------------------------------------------------------

    def put(self, name: str, data: bytes | Path) -> None:
        """Store bytes, or a file in parts."""
        if isinstance(data, Path):
            with open(data, "rb") as file:
                self._store.put(f"{self._root}/{name}", file)
        else:
            self._store.put(f"{self._root}/{name}", data)

    def get(self, name: str) -> bytes:
        return bytes(self._store.get(f"{self._root}/{name}").bytes())

    def fetch(self, name: str, path: Path) -> None:
        """Download an object into a file, in parts, and sync it to the disk."""
        with open(path, "wb") as file:
            for part in self._store.get(f"{self._root}/{name}").stream(min_chunk_size=8 << 20):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())

    def delete(self, name: str) -> None:
        self._store.delete(f"{self._root}/{name}")

    def _list(self, below: str) -> Iterator[tuple[str, datetime]]:
        prefix = f"{self._root}/{below}/"
        for batch in self._store.list(prefix):
            for entry in batch:
                yield entry["path"].removeprefix(prefix), entry["last_modified"]

    # --- contents ---------------------------------------------------------------------------------------------------

    def segments(self) -> list[Segment]:
        """The segments of the log, in the order of their terms and records."""
        found = (Segment.of(name) for name, _ in self._list("log"))
        return sorted(each for each in found if each is not None)

    def checkpoints(self) -> list[StoredCheckpoint]:
        """The complete checkpoints, oldest first."""
        found = []
        for name, stored in self._list("checkpoints"):
            folder, _, file = name.partition("/")
            match = _CHECKPOINT.fullmatch(folder)
            if match and file == MANIFEST:
                found.append(StoredCheckpoint(int(match[1]), stored.astimezone(UTC)))
        return sorted(found, key=lambda one: one.number)

    def files(self, number: int) -> list[str]:
        """The names of a checkpoint's files."""
        return [name for name, _ in self._list(f"checkpoints/checkpoint-{number:016d}")]

    def kept(self) -> dict[str, int]:
        """The checkpoints that a trainer keeps by name."""
        found = {}
        for name, _ in self._list("kept"):
            try:
                found[name] = int(self.get(f"kept/{name}"))
            except ValueError:
                raise DataError(f"{self.url}: kept/{name} is damaged") from None
        return found


def chosen(segments: list[Segment], after: int) -> list[tuple[Segment, int, int]]:
    """Which records to take from which segment, in order, starting at ``after + 1`` and ending at the first gap.

    Where two terms wrote a record of the same number, the later term wins, and the rest of the earlier one is dropped.
    """
    taken: list[tuple[Segment, int, int]] = []
    for segment in sorted(segments):
        taken = [(each, first, min(last, segment.first - 1)) for each, first, last in taken if first < segment.first]
        taken.append((segment, segment.first, segment.last))
    out, following = [], after + 1
    for segment, first, last in taken:
        if last < following:
            continue
        if first > following:
            break
        out.append((segment, following, last))
        following = last + 1
    return out
