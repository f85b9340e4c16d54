"""The storage of downloads: memory within a limit, otherwise files that a restarted gather can reuse."""

import json
import os
import threading
from hashlib import blake2b
from pathlib import Path
from typing import Any

from shoal.durable import appearing
from shoal.gather.errors import PayloadRejected
from shoal.gather.payload.spec import GradientSpec, canonical_json
from shoal.gather.protocol.plan import GatherConfig, GatherPlan
from shoal.gather.stores.base import Folder, ObjectInfo


class Landing:
    """One download: bytes appended in order, to a ``.part`` file or to memory. ``limit`` is the announced size."""

    def __init__(self, path: Path | None, limit: int) -> None:
        self.path = path
        self.size = 0
        self._limit = limit
        self._file = open(path.with_name(path.name + ".part"), "wb") if path is not None else None  # noqa: SIM115
        self.data: bytearray | None = bytearray() if path is None else None

    def write(self, block: bytes) -> None:
        self.size += len(block)
        if self.size > self._limit:
            raise PayloadRejected("oversize", f"more bytes were received than the announced {self._limit}")
        if self._file is not None:
            self._file.write(block)
        else:
            self.data += block  # type: ignore[operator]  # pyrefly: ignore

    def finish(self) -> None:
        """Make a file visible under its name."""
        if self._file is not None and self.path is not None:
            self._file.close()
            os.replace(self._file.name, self.path)
            self._file = None

    def discard(self) -> None:
        if self._file is not None:
            self._file.close()
            Path(self._file.name).unlink(missing_ok=True)
            self._file = None


class Spill:
    """Chooses memory or disk for each payload of one rank, and finds files that an earlier run validated."""

    def __init__(self, plan: GatherPlan, spec: GradientSpec, config: GatherConfig) -> None:
        self._plan, self._spec, self._config = plan, spec, config
        self._resident = 0
        self._lock = threading.Lock()
        self._folder: Any = None
        self._root: Path | None = None

    @property
    def keep(self) -> Any:
        """The temporary folder, if any, that a payload must keep alive."""
        return self._folder

    def _directory(self) -> Path:
        with self._lock:
            if self._root is None:
                if self._config.spill_dir is None:
                    self._folder = Folder("shoal-gather-")
                    self._root = self._folder.path
                else:
                    self._root = Path(self._config.spill_dir)
                    self._root.mkdir(parents=True, exist_ok=True)
            return self._root

    def _path(self, uid: int) -> Path:
        plan = self._plan
        return self._directory() / f"{plan.key}-{plan.window}-{uid}-v{plan.version}.payload"

    def land(self, uid: int, size: int) -> Landing:
        """A place for a download of ``size`` announced bytes."""
        mode = self._config.spill
        with self._lock:
            memory = mode == "memory" or (mode == "auto" and self._resident + size <= self._config.max_resident_bytes)
            if memory:
                self._resident += size
        return Landing(None if memory else self._path(uid), size)

    def release(self, landing: Landing, size: int) -> None:
        """Release the memory that a discarded download had reserved."""
        landing.discard()
        if landing.data is not None:
            with self._lock:
                self._resident -= size

    def _stamp(self, info: ObjectInfo) -> dict[str, Any]:
        tag = blake2b(info.etag.encode(), digest_size=16).hexdigest()
        return {"etag": tag, "size": info.size, "mtime_us": info.mtime_us, "spec_hash": self._spec.hash}

    def remember(self, path: Path, info: ObjectInfo, digest: str) -> None:
        """Write a description next to a validated file, for a restart."""
        if self._config.spill_dir is not None:
            note = path.with_name(path.name + ".json")
            with appearing(note) as part:
                Path(part).write_text(canonical_json(self._stamp(info) | {"digest": digest}))

    def recall(self, uid: int, info: ObjectInfo) -> tuple[Path, str] | None:
        """Return an earlier run's file of the same object with its expected digest, or None."""
        if self._config.spill_dir is None or self._config.spill == "memory":
            return None
        path = self._path(uid)
        try:
            note = json.loads(path.with_name(path.name + ".json").read_text())
            digest = note.pop("digest")
            if note == self._stamp(info) and path.is_file():
                return path, digest
        except (OSError, ValueError, KeyError, AttributeError):
            pass
        return None

    def forget(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        path.with_name(path.name + ".json").unlink(missing_ok=True)
