"""The store protocol, and the names of objects."""

import os
import shutil
import tempfile
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shoal.gather.protocol.plan import check_name, check_uid, check_window

if TYPE_CHECKING:
    from shoal.gather.artifact.reader import ArtifactReader

EXTENSIONS = ("safetensors", "pt")
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The result of ``head``: announced bytes, the store's timestamp, and a tag that changes with the content."""

    size: int
    mtime_us: int
    etag: str = ""
    location: str = ""
    """The store's own name for the object, so that a read uses the same one as the head."""


class PayloadStore(Protocol):
    """The four calls of a store. It reports failures as StoreError; any other exception counts as this rank's bug."""

    async def head(self, window: int, uid: int, *, version: str = "0", key: str = "gradient") -> ObjectInfo | None:
        """Return the object's size, time and tag; None if it is absent."""
        ...

    def stream(
        self, window: int, uid: int, info: ObjectInfo, offset: int = 0, *, version: str = "0", key: str = "gradient"
    ) -> AsyncIterator[bytes]:
        """Yield the bytes from ``offset``; ObjectChanged if the object is no longer the one of ``info``."""
        ...

    async def put_artifact(self, window: int, version: str, path: str | os.PathLike[str]) -> None:
        """Publish a file atomically. If it exists, equal bytes are a no-op and others a permanent StoreError."""
        ...

    async def open_artifact(self, window: int, version: str) -> "ArtifactReader | None":
        """Return the window's artifact, or None."""
        ...


def payload_name(window: int, uid: int, version: str, key: str) -> str:
    """``<uid>/<window>/<key>-<window>-<uid>-v<version>``, without extension; every part is checked."""
    window, uid = check_window(window), check_uid(uid)
    return f"{uid}/{window}/{check_name('key', key)}-{window}-{uid}-v{check_name('version', version)}"


def artifact_name(window: int, version: str) -> str:
    return f"aggregator-{check_window(window)}-v{check_name('version', version)}.pga"


class Folder:
    """A temporary folder ``path`` that exists until ``remove`` is called or this object is deleted."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self.remove = weakref.finalize(self, shutil.rmtree, str(self.path), ignore_errors=True)
