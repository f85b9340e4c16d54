"""A store in memory, with latency, scripted failures and counters: for tests and simulations."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, MutableMapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.gather.errors import ObjectChanged, StoreError
from shoal.gather.protocol.plan import check_name
from shoal.gather.stores.base import READ_BYTES, ObjectInfo, artifact_name, payload_name

if TYPE_CHECKING:
    from shoal.gather.artifact.reader import ArtifactReader


@dataclass(slots=True)
class MemoryObject:
    """An object; ``etag=None``: a hash of the data; ``size``, if given, is announced instead of ``len(data)``."""

    data: bytes
    mtime_us: int = 0
    etag: str | None = None
    size: int | None = None

    @property
    def tag(self) -> str:
        return blake2b(self.data, digest_size=16).hexdigest() if self.etag is None else self.etag


class MemoryStore:
    """``objects``: ``{(window, uid): MemoryObject}``, may be changed at any time. ``latency_s`` sleeps in every call.

    ``fail(op, uid, n)``, with op ``"head"`` or ``"stream"`` and ``n`` earlier calls of it for the UID, returns None or
    an exception to raise. ``head_calls`` and ``stream_calls`` count by UID; ``artifacts`` maps (window, version) to
    bytes.
    """

    def __init__(
        self,
        objects: MutableMapping[tuple[int, int], MemoryObject] | None = None,
        latency_s: float = 0,
        fail: Callable[[str, int, int], BaseException | None] | None = None,
    ) -> None:
        self.objects = {} if objects is None else objects
        self.latency_s = latency_s
        self.fail = fail
        self.head_calls: Counter[int] = Counter()
        self.stream_calls: Counter[int] = Counter()
        self.artifacts: dict[tuple[int, str], bytes] = {}

    async def _enter(self, op: str, uid: int, counter: Counter[int]) -> None:
        earlier = counter[uid]
        counter[uid] += 1
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        if self.fail is not None and (error := self.fail(op, uid, earlier)) is not None:
            raise error

    async def head(self, window: int, uid: int, *, version: str = "0", key: str = "gradient") -> ObjectInfo | None:
        payload_name(window, uid, version, key)
        await self._enter("head", uid, self.head_calls)
        found = self.objects.get((window, uid))
        if found is None:
            return None
        return ObjectInfo(len(found.data) if found.size is None else found.size, found.mtime_us, found.tag)

    async def stream(
        self, window: int, uid: int, info: ObjectInfo, offset: int = 0, *, version: str = "0", key: str = "gradient"
    ) -> AsyncIterator[bytes]:
        payload_name(window, uid, version, key)
        await self._enter("stream", uid, self.stream_calls)
        while True:
            found = self.objects.get((window, uid))
            if found is None:
                raise StoreError(f"object {uid} of window {window} was removed")
            if info.etag and found.tag != info.etag:
                raise ObjectChanged(f"object {uid} of window {window} was replaced")
            block = found.data[offset : offset + READ_BYTES]
            if not block:
                return
            yield block
            offset += len(block)

    def put(self, window: int, uid: int, data: bytes, *, mtime_us: int = 0) -> None:
        """Upload as a peer does."""
        self.objects[window, uid] = MemoryObject(data, mtime_us)

    async def put_artifact(self, window: int, version: str, path: str | os.PathLike[str]) -> None:
        name = artifact_name(window, version)
        data = await asyncio.to_thread(Path(path).read_bytes)
        if self.artifacts.setdefault((window, version), data) != data:
            raise StoreError(f"{name} exists with different content", permanent=True)

    async def open_artifact(self, window: int, version: str) -> "ArtifactReader | None":
        from shoal.gather.artifact.reader import ArtifactReader

        data = self.artifacts.get((window, check_name("version", version)))
        return None if data is None else ArtifactReader(data)
