"""One S3-compatible bucket per peer, through obstore: a HEAD, then ranged GETs that check the object's tag."""

import asyncio
import contextlib
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError, missing_extra
from shoal.gather.errors import ObjectChanged, StoreError
from shoal.gather.stores.base import EXTENSIONS, Folder, ObjectInfo, artifact_name, payload_name

if TYPE_CHECKING:
    from shoal.gather.artifact.reader import ArtifactReader

PART_BYTES = 8 << 20
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class BucketRef:
    """The bucket of one party, and its credentials, which are never printed.

    Without keys, and with ``anonymous=False``, the machine's own credentials are used.
    """

    bucket: str
    endpoint: str | None = None
    region: str = "us-east-1"
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    prefix: str = ""
    anonymous: bool = False


class S3Store:
    """``peers`` maps UIDs to their buckets; objects have the names of :class:`LocalDirStore`'s files.

    The gather retries, not the client: a 5xx, a timeout (``timeout_s`` per request) or a broken connection is one
    failed try. 401, 403 and a missing bucket are not retried.
    """

    def __init__(
        self,
        peers: Mapping[int, BucketRef],
        artifacts: BucketRef | None = None,
        *,
        max_parallel_parts: int = 4,
        timeout_s: float = 30.0,
    ) -> None:
        if max_parallel_parts < 1:
            raise ConfigError(f"S3Store: max_parallel_parts must be at least 1, got {max_parallel_parts}")
        self.peers = dict(peers)
        self.artifacts = artifacts
        self.max_parallel_parts = max_parallel_parts
        self.timeout_s = timeout_s
        self._clients: dict[BucketRef, Any] = {}
        self._known: set[BucketRef] = set()  # buckets that are known to exist

    def _client(self, ref: BucketRef) -> Any:
        if ref not in self._clients:
            try:
                from obstore.store import S3Store as Client
            except ImportError:
                raise missing_extra("obstore", "s3") from None
            options: dict[str, Any] = {"region": ref.region, "virtual_hosted_style_request": False}
            for name in ("endpoint", "access_key_id", "secret_access_key", "session_token"):
                if (value := getattr(ref, name)) is not None:
                    options[name] = value
            if ref.anonymous:
                options["skip_signature"] = True
            timeout = f"{self.timeout_s}s"
            self._clients[ref] = Client(
                ref.bucket,
                prefix=ref.prefix or None,
                client_options={"allow_http": True, "timeout": timeout, "connect_timeout": timeout},
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=self.timeout_s)},
                **options,
            )
        return self._clients[ref]

    def _peer(self, uid: int) -> BucketRef:
        if uid not in self.peers:
            raise StoreError(f"S3Store: peers has no bucket for peer {uid}", permanent=True)
        return self.peers[uid]

    async def head(self, window: int, uid: int, *, version: str = "0", key: str = "gradient") -> ObjectInfo | None:
        name, ref = payload_name(window, uid, version, key), self._peer(uid)
        for extension in EXTENSIONS:
            location = f"{name}.{extension}"
            with _errors(location):
                try:
                    meta = await self._client(ref).head_async(location)
                except FileNotFoundError:
                    continue
            self._known.add(ref)
            mtime = meta["last_modified"] - _EPOCH
            return ObjectInfo(meta["size"], mtime // timedelta(microseconds=1), meta["e_tag"] or "", location)
        if ref not in self._known:
            await self._check_bucket(ref, f"{name}.{EXTENSIONS[0]}")
        return None

    async def _check_bucket(self, ref: BucketRef, location: str) -> None:
        """Tell a missing bucket from a missing object by the body of a GET, because the 404 of a HEAD does not."""
        with _errors(location):
            try:
                await self._client(ref).get_async(location)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise StoreError(f"bucket {ref.bucket!r} does not exist", permanent=True) from None
        self._known.add(ref)

    async def stream(
        self, window: int, uid: int, info: ObjectInfo, offset: int = 0, *, version: str = "0", key: str = "gradient"
    ) -> AsyncIterator[bytes]:
        location = info.location or f"{payload_name(window, uid, version, key)}.{EXTENSIONS[0]}"
        client = self._client(self._peer(uid))
        starts = iter(range(offset, info.size, PART_BYTES))
        parts: deque[asyncio.Task[bytes]] = deque()

        def launch() -> None:
            if (start := next(starts, None)) is not None:
                end = min(start + PART_BYTES, info.size)
                parts.append(asyncio.create_task(self._part(client, location, info, start, end)))

        try:
            for _ in range(self.max_parallel_parts):
                launch()
            while parts:
                block = await parts[0]
                parts.popleft()
                launch()
                yield block
        finally:
            for task in parts:
                task.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _part(self, client: Any, location: str, info: ObjectInfo, start: int, end: int) -> bytes:
        options: dict[str, Any] = {"range": (start, end)}
        if info.etag:
            options["if_match"] = info.etag
        with _errors(location):
            try:
                response = await client.get_async(location, options=options)
                if info.etag and response.meta["e_tag"] != info.etag:
                    raise ObjectChanged(f"{location} was replaced")
                return bytes(await response.bytes_async())
            except FileNotFoundError:
                raise ObjectChanged(f"{location} was removed") from None

    async def put(
        self,
        window: int,
        uid: int,
        data: bytes,
        *,
        version: str = "0",
        key: str = "gradient",
        format: str = "safetensors",
    ) -> None:
        """Upload to a peer's bucket, as the peer does."""
        location = f"{payload_name(window, uid, version, key)}.{format}"
        with _errors(location):
            await self._client(self._peer(uid)).put_async(location, data)

    async def put_artifact(self, window: int, version: str, path: str | os.PathLike[str]) -> None:
        location, client = artifact_name(window, version), self._client(self._artifacts())
        with _errors(location):
            if await self._same(client, location, Path(path)):
                return
            await client.put_async(location, Path(path))  # a multipart upload becomes visible when it is complete

    async def _same(self, client: Any, location: str, path: Path) -> bool:
        try:
            meta = await client.head_async(location)
        except FileNotFoundError:
            return False
        if meta["size"] == path.stat().st_size:
            with open(path, "rb") as file:
                for start in range(0, meta["size"], PART_BYTES):
                    end = min(start + PART_BYTES, meta["size"])
                    response = await client.get_async(location, options={"range": (start, end)})
                    if bytes(await response.bytes_async()) != file.read(end - start):
                        break
                else:
                    return True
        raise StoreError(f"{location} exists with different content", permanent=True)

    async def open_artifact(self, window: int, version: str) -> "ArtifactReader | None":
        from shoal.gather.artifact.reader import ArtifactReader

        location, client = artifact_name(window, version), self._client(self._artifacts())
        folder = Folder("shoal-artifact-")
        path = folder.path / location
        with _errors(location):
            try:
                response = await client.get_async(location)
            except FileNotFoundError:
                return None
            with open(path, "wb") as file:
                async for block in response.stream():
                    file.write(block)
        return await asyncio.to_thread(ArtifactReader, path, keep=folder)

    def _artifacts(self) -> BucketRef:
        if self.artifacts is None:
            raise StoreError("S3Store: no bucket for artifacts was given", permanent=True)
        return self.artifacts


@contextlib.contextmanager
def _errors(location: str) -> Any:
    """Convert the client's exceptions to StoreErrors that name the object and the status, but no credential."""
    from obstore import exceptions as obs

    try:
        yield
    except (StoreError, asyncio.CancelledError):
        raise
    except obs.PreconditionError:
        raise ObjectChanged(f"{location} was replaced") from None
    except (obs.PermissionDeniedError, obs.UnauthenticatedError, PermissionError):
        raise StoreError(f"{location}: access denied", permanent=True) from None
    except (obs.BaseError, OSError) as error:
        status = re.search(r"status code: (\d{3})", str(error))
        code = int(status.group(1)) if status else 0
        what = f"HTTP {code}" if code else type(error).__name__
        raise StoreError(f"{location}: {what}", permanent=code in (400, 401, 403)) from None
