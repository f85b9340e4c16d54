"""The targets of a sync client and the pushes to them."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shoal.metrics import emit_counter, emit_timer
from shoal.proto.serving.parameter_sync_pb2 import PushRequest, PushResponse, PushResult
from shoal.serving.status import Code, StatusError
from shoal.serving.sync.monolith.push_client import PushClient
from shoal.serving.sync.split import DeltaBatch, sendable_parts

log = logging.getLogger(__name__)

MAX_PART_BYTES = 4 * 1024 * 1024
"""Larger requests are split. Servers must accept slightly more than gRPC's default of 4 MiB."""
ROUND_BUDGET_SECS = 60.0

Part = PushRequest | DeltaBatch


class _SharedLock:
    """Many readers or one writer; a waiting writer blocks new readers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writers = 0  # waiting or inside
        self._writing = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            while self._writers:
                self._changed.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            self._writers += 1
            while self._readers or self._writing:
                self._changed.wait()
            self._writing = True
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._writers -= 1
                self._changed.notify_all()


class _NoClient:
    """Placeholder for a target whose client could not be created."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def push(self, request: PushRequest) -> PushResponse:
        return PushResponse(status_code=Code.UNAVAILABLE, error_message=self._reason, update_num=0)

    def close(self) -> None:
        """Nothing is open."""


class SyncClientManager:
    """``target -> client``, and pushes of one request to all of them.

    Targets are pushed to in parallel, each target's parts one after another. Responses are ordered by target, then by
    part.

    Args:
        client_factory: ``target -> client`` with ``push(request) -> PushResponse``, which does not raise for a failed
            RPC, and ``close()``. None = the gRPC client.
    """

    def __init__(self, client_factory: Callable[[str], Any] | None = None) -> None:
        self._factory = client_factory or PushClient
        self._lock = _SharedLock()
        self._clients: dict[str, Any] = {}
        self._extra: dict[str, Any] = {}

    @property
    def targets(self) -> list[str]:
        return sorted(self._clients)

    @property
    def extra_info(self) -> dict[str, Any]:
        return dict(self._extra)

    def try_replace(self, targets: Sequence[str], extra: Sequence[Any] = ()) -> bool:
        """Replace the targets; clients of those that stay are kept. Waits for running pushes."""
        with self._lock.exclusive():
            wanted = list(dict.fromkeys(targets))
            for gone in [target for target in self._clients if target not in wanted]:
                client = self._clients.pop(gone)
                try:
                    client.close()
                except Exception:
                    log.warning("could not close the client of %s", gone, exc_info=True)
            for target in wanted:
                if isinstance(self._clients.get(target), _NoClient | None):
                    self._clients[target] = self._open(target)
            self._extra = {}
            if len(targets) == len(extra):
                for target, info in zip(targets, extra, strict=True):
                    self._extra.setdefault(target, info)
        return True

    def _open(self, target: str) -> Any:
        try:
            return self._factory(target)
        except Exception as error:  # other targets are pushed to; this one is tried again with the next list
            log.warning("could not create a client for %s: %s", target, error)
            return _NoClient(f"could not create a client for {target}: {error}")

    def push(self, request: Part, model_name: str, signature_name: str) -> PushResult:
        """Pushes one request to every target."""
        with self._lock.shared():
            parts = sendable_parts(request, MAX_PART_BYTES)
            end, targets = time.monotonic() + ROUND_BUDGET_SECS, sorted(self._clients)

            def one(target: str) -> list[PushResponse]:
                return self._push_target(target, parts, model_name, signature_name, end, None)

            if len(targets) > 1:
                with ThreadPoolExecutor(min(16, len(targets)), "shoal-push") as pool:
                    answers = list(pool.map(one, targets))
            else:
                answers = [one(target) for target in targets]
        return PushResult(responses=[response for responses in answers for response in responses])

    def push_to(
        self, target: str, batch: DeltaBatch, model_name: str, signature_name: str, touched_at: float
    ) -> tuple[list[PushResponse], list[DeltaBatch]] | None:
        """Push a batch to one target: (responses, parts that failed); None if it is no longer a target.

        ``touched_at``: Unix time of the oldest gradient; 0 if unknown.
        """
        with self._lock.shared():
            if target not in self._clients:
                return None
            parts = sendable_parts(batch, MAX_PART_BYTES)
            end = time.monotonic() + ROUND_BUDGET_SECS
            responses = self._push_target(target, parts, model_name, signature_name, end, touched_at or None)
            return responses, [part for part, each in zip(parts, responses, strict=True) if each.status_code]

    def instance(self, target: str) -> str:
        """The id of the process that answered the last push to a target; "" if unknown."""
        return getattr(self._clients.get(target), "instance", "")

    def close(self) -> None:
        self.try_replace([])

    def _push_target(
        self, target: str, parts: list, model: str, signature: str, end: float, touched_at: float | None
    ) -> list[PushResponse]:
        client, responses = self._clients[target], []
        sums: dict[str, list[int]] = {"OK": [0, 0], "KO": [0, 0]}
        info = self._extra.get(target)
        place = f"{info.idc}:{info.cluster}" if info is not None else "NA"
        replica = info.replica_id if info is not None else -1

        def tags(status: str) -> str:
            return (
                f"model_name={model}|signature_name={signature}|target={target}|status={status}"
                f"|idc={place}|replica_id={replica}"
            )

        for part in parts:
            count, size = _count_and_size(part)
            if count is None:
                responses.append(PushResponse(target=target))
                continue
            begin = time.monotonic()
            if begin >= end:
                text = f"the round's {ROUND_BUDGET_SECS:.0f} s were used up before this part"
                response = PushResponse(status_code=Code.DEADLINE_EXCEEDED, error_message=text, update_num=0)
            else:
                response = _push_part(client, part, touched_at, end - begin)
            response.target = target
            status = "KO" if response.status_code else "OK"
            emit_timer("parameter_sync_latency", (time.monotonic() - begin) * 1e6, tags(status))
            sums[status][0] += count
            sums[status][1] += size
            responses.append(response)
        for status, (fids, size) in sums.items():
            if fids:
                emit_counter("parameter_sync_fid_count", fids, tags(status))
            if size:
                emit_counter("parameter_sync_byte_size", size, tags(status))
        return responses


def _push_part(client: Any, part: Part, touched_at: float | None, timeout: float) -> PushResponse:
    """Make one RPC. Earlier errors become responses, too: an exception would lose the other targets' parts."""
    response = PushResponse()
    try:
        if isinstance(client, PushClient):
            answer = client.push(part, touched_at, timeout=timeout)
        else:
            answer = client.push(part.message() if isinstance(part, DeltaBatch) else part)
        response.CopyFrom(answer)  # a client may return the same message again
    except Exception as error:
        log.exception("could not push a part")
        code = Code.INVALID_ARGUMENT if isinstance(error, ValueError) else Code.INTERNAL
        code = error.code if isinstance(error, StatusError) else code
        response = PushResponse(status_code=int(code), error_message=str(error), update_num=0)
    return response


def _count_and_size(part: Part) -> tuple[int | None, int]:
    """(fids, bytes) of a part; (None, bytes) without any table."""
    if isinstance(part, DeltaBatch):
        counts = part.counts()
        return (sum(counts) if counts else None), part.size()
    deltas = [*part.delta_hash_tables, *part.delta_multi_hash_tables]
    return (sum(len(delta.fids) for delta in deltas) if deltas else None), part.ByteSize()
