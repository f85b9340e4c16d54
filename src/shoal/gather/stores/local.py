"""A directory as a store: one folder per peer and window, files renamed into place."""

import asyncio
import filecmp
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.durable import appearing
from shoal.gather.errors import ObjectChanged, StoreError
from shoal.gather.stores.base import EXTENSIONS, READ_BYTES, ObjectInfo, artifact_name, payload_name

if TYPE_CHECKING:
    from shoal.gather.artifact.reader import ArtifactReader


class LocalDirStore:
    """``root/<uid>/<window>/<key>-<window>-<uid>-v<version>.<safetensors|pt>`` and ``root/aggregator-*.pga``."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    async def head(self, window: int, uid: int, *, version: str = "0", key: str = "gradient") -> ObjectInfo | None:
        return await asyncio.to_thread(self._head, payload_name(window, uid, version, key))

    def _head(self, name: str) -> ObjectInfo | None:
        for extension in EXTENSIONS:
            path = self.root / f"{name}.{extension}"
            try:
                return _info(os.stat(path), str(path))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                denied = isinstance(error, PermissionError)
                raise StoreError(f"{path.name}: {error.strerror}", permanent=denied) from error
        return None

    async def stream(
        self, window: int, uid: int, info: ObjectInfo, offset: int = 0, *, version: str = "0", key: str = "gradient"
    ) -> AsyncIterator[bytes]:
        name = payload_name(window, uid, version, key)
        path = info.location or next(
            (p for e in EXTENSIONS if os.path.exists(p := str(self.root / f"{name}.{e}"))), f"{self.root}/{name}"
        )
        try:
            file = await asyncio.to_thread(open, path, "rb")
        except OSError as error:
            raise StoreError(f"{name}: {error.strerror}", permanent=isinstance(error, PermissionError)) from error
        with file:
            # An open file keeps its contents when another is renamed over it, so checking once is enough.
            if info.etag and _info(os.fstat(file.fileno()), path).etag != info.etag:
                raise ObjectChanged(f"{name} was replaced")
            file.seek(offset)
            try:
                while block := await asyncio.to_thread(file.read, READ_BYTES):
                    yield block
            except OSError as error:
                raise StoreError(f"{name}: {error.strerror}") from error

    def put(
        self,
        window: int,
        uid: int,
        data: bytes,
        *,
        version: str = "0",
        key: str = "gradient",
        format: str = "safetensors",
    ) -> Path:
        """Upload as a peer does: write a temporary file and rename it."""
        path = self.root / f"{payload_name(window, uid, version, key)}.{format}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with appearing(path) as temporary:
            Path(temporary).write_bytes(data)
        return path

    async def put_artifact(self, window: int, version: str, path: str | os.PathLike[str]) -> None:
        await asyncio.to_thread(self._put_artifact, self.root / artifact_name(window, version), Path(path))

    def _put_artifact(self, target: Path, path: Path) -> None:
        try:
            if target.exists():
                if filecmp.cmp(path, target, shallow=False):
                    return
                raise StoreError(f"{target.name} exists with different content", permanent=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            with appearing(target) as temporary:
                shutil.copyfile(path, temporary)
        except OSError as error:
            raise StoreError(f"{target.name}: {error.strerror}") from error

    async def open_artifact(self, window: int, version: str) -> "ArtifactReader | None":
        from shoal.gather.artifact.reader import ArtifactReader

        path = self.root / artifact_name(window, version)
        if not await asyncio.to_thread(path.exists):
            return None
        return await asyncio.to_thread(ArtifactReader, path)


def _info(stat: os.stat_result, location: str) -> ObjectInfo:
    etag = f"{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}"
    return ObjectInfo(stat.st_size, stat.st_mtime_ns // 1000, etag, location)
