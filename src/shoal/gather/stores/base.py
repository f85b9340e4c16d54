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
    """What ``head`` says of an object: announced bytes, the store's timestamp, and a tag that changes with content."""

    size: int
    mtime_us: int
    etag: str = ""
    location: str = ""
    """The store's own name for it, so that a read goes where the head looked."""


class PayloadStore(Protocol):
    """Four calls. A store reports trouble as StoreError; any other exception is taken for a bug of this rank."""

    async def head(self, window: int, uid: int, *, version: str = "0", key: str = "gradient") -> ObjectInfo | None:
        """The object's size, time and tag; None when it is absent."""
        ...

    def stream(
        self, window: int, uid: int, info: ObjectInfo, offset: int = 0, *, version: str = "0", key: str = "gradient"
    ) -> AsyncIterator[bytes]:
        """The bytes from ``offset``; ObjectChanged when the object is no longer the one of ``info``."""
        ...

    async def put_artifact(self, window: int, version: str, path: str | os.PathLike[str]) -> None:
        """Publishes a file, whole or not at all. Equal bytes again are a no-op, other bytes a permanent StoreError."""
        ...

    async def open_artifact(self, window: int, version: str) -> "ArtifactReader | None":
        """The window's artifact, or None."""
        ...


def payload_name(window: int, uid: int, version: str, key: str) -> str:
    """``<uid>/<window>/<key>-<window>-<uid>-v<version>``, without extension; every part is checked."""
    window, uid = check_window(window), check_uid(uid)
    return f"{uid}/{window}/{check_name('key', key)}-{window}-{uid}-v{check_name('version', version)}"


def artifact_name(window: int, version: str) -> str:
    return f"aggregator-{check_window(window)}-v{check_name('version', version)}.pga"


class Folder:
    """``path`` exists until ``remove`` is called or nobody holds this object any more."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self.remove = weakref.finalize(self, shutil.rmtree, str(self.path), ignore_errors=True)
