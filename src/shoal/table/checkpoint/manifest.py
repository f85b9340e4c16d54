"""The manifest of a folder of tables: the kind of checkpoint, its step and its files."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from shoal.durable import Saved, StrPath, read_saved
from shoal.errors import DataError

FORMAT = "shoal.checkpoint"
VERSION = 2  # version 1 had file sizes but no digests; it can still be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint folder. It is written last: if it exists, all files that it lists exist."""

    kind: str
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    step: int = 0
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="microseconds"))
    content: dict[str, Any] = field(default_factory=dict)
    """Additional data for this kind of checkpoint."""

    def fields(self) -> dict[str, Any]:
        """The manifest's fields in the file, for `shoal.durable.Draft.seal`."""
        about = {"kind": self.kind, "id": self.id, "step": self.step, "created": self.created}
        return {"format": FORMAT, "version": VERSION, **about, "content": self.content}

    @classmethod
    def of(cls, saved: Saved) -> Manifest:
        """The manifest of a save that was read; raises `DataError` if it is not a save of tables."""
        where, fields = saved.manifest, saved.fields
        if fields.get("format") != FORMAT:
            raise DataError(f"{where} is not a checkpoint manifest")
        if fields.get("version") not in (1, VERSION):
            raise DataError(
                f"{where}: the manifest's version must be 1 or {VERSION} for this library, got "
                f"{fields.get('version')!r}"
            )
        types = {"kind": str, "id": str, "step": int, "created": str, "content": dict}
        for name, kind in types.items():
            if not isinstance(fields.get(name), kind):
                raise DataError(f"{where}: {name} must be of type {kind.__name__}, got {fields.get(name)!r:.80}")
        return cls(**{name: fields[name] for name in types})

    @classmethod
    def read(cls, path: StrPath) -> Manifest:
        """Raises `DataError` for a damaged file or one that is not a manifest."""
        return cls.of(read_saved(os.fspath(path), unsealed=True))
