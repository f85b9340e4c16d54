"""Replies to requests that change nothing: small ones immediately, large ones in their own threads."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from shoal.errors import DataError, ShoalError, UnsupportedError
from shoal.sharded.ps.limits import Limits
from shoal.sharded.ps.protocol import Op, Reply, Request, Status, error_reply, plain_lookup, reply_header
from shoal.sharded.ps.server.backlog import Backlog, expired
from shoal.sharded.ps.server.shard import Shard, status_of

log = logging.getLogger("shoal.ps")

Publish = Callable[[dict[str, Any]], dict[str, Any]]
"""A server's handler of PUBLISH: takes the request's fields and returns the progress."""


class Reads:
    """Reads of a shard, concurrent with the one thread that writes to it."""

    def __init__(
        self,
        shard: Shard,
        backlog: Backlog,
        limits: Limits,
        info: Callable[[], dict[str, Any]],
        publish: Publish | None = None,
    ) -> None:
        self._shard, self._backlog, self._limits, self._info = shard, backlog, limits, info
        self._publish = publish
        self._metrics = backlog.metrics
        self.more: dict[Op, Callable[[Request], list[Any]]] = {}
        """Handlers of operations that only some servers have."""

    def at_once(self, request: Request) -> bool:
        """Whether passing the request to another thread would cost more than answering it."""
        return (
            not request.op.writes
            and request.op not in (Op.CHECKPOINT, Op.PUBLISH, Op.SCAN, Op.FETCH, Op.HANDOVER)
            and sum(request.counts) <= self._limits.inline_ids
        )  # fmt: skip

    def plain(self, frames: list[memoryview]) -> list[Any] | None:
        """The reply to a small lookup in one table, by a fast path; None for everything else."""
        begin = time.perf_counter()
        plain = plain_lookup(frames[0])
        if plain is None or plain.n > min(self._limits.inline_ids, self._limits.max_ids):
            return None
        initial = plain.op == Op.FIND_INITIAL
        rows = self._shard.lookup_one(plain.table, frames[1], plain.n, initial=initial)
        if rows is None:
            return None
        self._metrics.bytes_in += 8 * plain.n
        self._metrics.bytes_out += rows.nbytes
        self._metrics.done(plain.op.name, "OK", time.perf_counter() - begin, plain.n)
        return [reply_header(plain.request, self._shard.version), rows.numpy()]

    def now(self, request: Request) -> Reply:
        """Answer a request that is `at_once`, and count it."""
        reply = self._read(request)
        seconds = time.perf_counter() - request.arrived
        self._metrics.done(request.op.name, reply.status.name, seconds, sum(request.counts))
        return reply

    def _read(self, request: Request) -> Reply:
        version = self._shard.version
        try:
            if request.op == Op.INFO:
                payload: list[Any] = [json.dumps(self._info()).encode()]
            elif request.op == Op.PUBLISH:
                payload = [json.dumps(self._publish_status(request)).encode()]
            elif request.op in self.more:
                payload = self.more[request.op](request)
            else:
                payload = self._shard.read(request)
            return Reply(Status.OK, request.request, version, payload)
        except Exception as error:
            if not isinstance(error, ShoalError | NotImplementedError | ValueError):
                log.exception("%s failed", request.op.name)
            return error_reply(request.request, status_of(error), str(error), version)

    def _publish_status(self, request: Request) -> dict[str, Any]:
        if self._publish is None:
            raise UnsupportedError(
                f"shard {self._shard.index} cannot send its rows to replicas; start it with `shoal ps`"
            )
        try:
            wish = json.loads(bytes(request.values) or b"{}")
            if not isinstance(wish, dict):
                raise ValueError(f"got {wish!r:.40}")
        except ValueError as error:
            raise DataError(f"PUBLISH must have a JSON object ({error})") from None
        return self._publish(wish)

    def loop(self) -> None:
        """One thread for large reads."""
        with self._backlog.outlet() as outlet:
            while (waiting := self._backlog.reads.get()) is not None:
                reply = expired(waiting.request) or self._read(waiting.request)
                self._backlog.answer(outlet, waiting, reply)
                del waiting, reply  # frees the request's frames before the next wait
