"""The manifest of a folder of tables: what kind of checkpoint it is, of which step, and what is in it."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from shoal.durable import Saved, StrPath, read_saved
from shoal.errors import DataError

FORMAT = "shoal.checkpoint"
VERSION = 2  # 1 had the sizes of files and no digests; it is still read


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint folder holds. It is the last file written, so where it is, everything it names is, too."""

    kind: str
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    step: int = 0
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="microseconds"))
    content: dict[str, Any] = field(default_factory=dict)
    """What the kind of checkpoint needs besides."""

    def fields(self) -> dict[str, Any]:
        """Its part of the file, for `shoal.durable.Draft.seal`."""
        about = {"kind": self.kind, "id": self.id, "step": self.step, "created": self.created}
        return {"format": FORMAT, "version": VERSION, **about, "content": self.content}

    @classmethod
    def of(cls, saved: Saved) -> Manifest:
        """The manifest of a save that was read; raises `DataError` for one of another kind."""
        where, fields = saved.manifest, saved.fields
        if fields.get("format") != FORMAT:
            raise DataError(f"{where} is not a checkpoint manifest")
        if fields.get("version") not in (1, VERSION):
            raise DataError(
                f"{where} has manifest version {fields.get('version')!r}, this library reads 1 and {VERSION}"
            )
        types = {"kind": str, "id": str, "step": int, "created": str, "content": dict}
        for name, kind in types.items():
            if not isinstance(fields.get(name), kind):
                raise DataError(f"{where}: {name} must be a {kind.__name__}, got {fields.get(name)!r:.80}")
        return cls(**{name: fields[name] for name in types})

    @classmethod
    def read(cls, path: StrPath) -> Manifest:
        """Raises `DataError` for a damaged file or one that is not a manifest."""
        return cls.of(read_saved(os.fspath(path), unsealed=True))
