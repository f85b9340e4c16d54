"""`RemoteParts`: the parts of tables on the servers of one client."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.sharded.metrics import lookup_timer
from shoal.sharded.parts import Each, Lists, check_finite
from shoal.sharded.ps.protocol import Op, Reply, Request, as_tensor
from shoal.table.protocol import CPU, Missing


class RemoteParts:
    """Parts on the servers of one client: a call sends one request to each, concurrently."""

    remote = True
    saved_by = "the servers' checkpoints (PsClient.checkpoint())"

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._client = parts[0].client

    def lookup(self, lists: Sequence[Lists], *, missing: Missing = "zeros", float16: bool = False) -> list[Tensor]:
        op = Op.FIND_INITIAL if missing == "initial" else Op.LOOKUP
        return self._read(
            [
                part.lookup_request(*asked, float16=float16, op=op)
                for part, asked in zip(self._parts, lists, strict=True)
            ],
            float16,
        )

    def insert(self, lists: Sequence[Lists], seconds: int) -> list[Tensor]:
        return self._read(
            [part.insert_request(*asked, seconds=seconds) for part, asked in zip(self._parts, lists, strict=True)]
        )

    def _read(self, requests: Sequence[Request], float16: bool = False) -> list[Tensor]:
        begin = time.perf_counter()
        shards = {part.shard: number for number, part in enumerate(self._parts)}
        wanted = {part.shard: request for part, request in zip(self._parts, requests, strict=True) if len(request.ids)}
        replies: dict[int, Reply] = self._client.read(wanted)
        result = [torch.empty(0, device=CPU)] * len(self._parts)
        for shard, reply in replies.items():
            rows = as_tensor(reply.payload[0], torch.float16 if float16 else torch.float32)
            result[shards[shard]] = rows.float()
            lookup_timer(shards[shard], time.perf_counter() - begin)
        return result

    def apply(
        self, lists: Sequence[Lists], grads: Sequence[Tensor], step: int, seconds: int, *, float16: bool = False,
        scales: Sequence[float] | None = None, each: Each = "sum",
    ) -> None:  # fmt: skip
        requests = {}
        for part, asked, flat in zip(self._parts, lists, grads, strict=True):
            request = part.write_request(
                Op.APPLY, *asked, flat, step=step, seconds=seconds, float16=float16, scales=scales
            )
            request.read_version = self._client.versions[part.shard]
            requests[part.shard] = request
            if len(self._parts) > 1:
                strict = asked.names if part.on_bad_gradient == "raise" else ()
                check_finite(asked, request.values, part.dims, strict)
        self._client.write(requests, wait=False)

    def write(self, verb: str, lists: Sequence[Lists], values: Sequence[Tensor], seconds: int) -> None:
        work = zip(self._parts, lists, values, strict=True)
        self._client.write(
            {
                part.shard: part.write_request(Op[verb.upper()], *asked, flat, seconds=seconds)
                for part, asked, flat in work
                if asked.names
            }
        )
