"""Parts of a table called together: one after another in this process, all at once on parameter servers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.ragged import Ragged
from shoal.sharded.devices import home
from shoal.sharded.metrics import lookup_timer
from shoal.sharded.route import Route


def fan_out(parts: Sequence[Any]) -> Any:
    """How to call these parts: `RemoteParts` where all are tables of one client, part ``i`` on server ``i``."""
    first = getattr(parts[0], "client", None)
    if first is not None and all(getattr(p, "client", None) is first and p.shard == i for i, p in enumerate(parts)):
        return RemoteParts(parts, first)
    return LocalParts(parts)


class LocalParts:
    """Parts with the methods of local tables. Native work inside each is spread over threads already."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def lookup(self, route: Route, names: Sequence[str], *, raw: bool, float16: bool) -> list[Tensor]:
        result = []
        for i, part in enumerate(self.parts):
            begin = time.perf_counter()
            here = route.ids[i].to(home(part))
            if raw:
                found = part.raw_lookup(Ragged.from_row_lengths(here, route.counts[i])).cpu()
            else:
                rows = part.lookup(dict(zip(names, torch.split(here, route.counts[i]), strict=True)))
                found = torch.cat([rows[name].reshape(-1) for name in names]).cpu()
            result.append(found.half().float() if float16 else found)
            lookup_timer(i, time.perf_counter() - begin)
        return result

    def apply(
        self, route: Route, names: Sequence[str], flat: Tensor, step: int, seconds: int, *, raw: bool, float16: bool
    ) -> None:
        if float16:
            flat = flat.half().float()
        for i, part in enumerate(self.parts):
            here, grads = route.ids[i].to(home(part)), flat[route.floats[i]].to(home(part))
            if raw:
                part.raw_apply_gradients(Ragged.from_row_lengths(here, route.counts[i]), grads, step, seconds)
                continue
            ids = torch.split(here, route.counts[i])
            sizes = [n * d for n, d in zip(route.counts[i], route.dims, strict=True)]
            rows = [g.view(-1, d) for g, d in zip(torch.split(grads, sizes), route.dims, strict=True)]
            pairs = dict(zip(names, zip(ids, rows, strict=True), strict=True))
            part.apply_gradients(pairs, step, req_time=seconds)

    def write(self, verb: str, per_part: Sequence[dict[str, tuple[Tensor, Tensor]]], seconds: int) -> None:
        for part, pairs in zip(self.parts, per_part, strict=True):
            there = home(part)
            getattr(part, verb)({name: (i.to(there), v.to(there)) for name, (i, v) in pairs.items()}, req_time=seconds)


class RemoteParts:
    """Parts on the servers of one client: one request to each, all under way at once."""

    def __init__(self, parts: Sequence[Any], client: Any) -> None:
        self.parts = parts
        self.client = client

    def lookup(self, route: Route, names: Sequence[str], *, raw: bool, float16: bool) -> list[Tensor]:
        from shoal.sharded.ps.protocol import as_tensor

        begin = time.perf_counter()
        requests = {
            i: part.lookup_request(names, route.counts[i], route.ids[i], float16=float16)
            for i, part in enumerate(self.parts)
            if route.ids[i].numel()
        }
        replies = self.client.read(requests)
        result = [torch.empty(0, device="cpu")] * len(self.parts)
        for i, reply in replies.items():
            result[i] = as_tensor(reply.payload[0], torch.float16 if float16 else torch.float32).float()
            lookup_timer(i, time.perf_counter() - begin)
        return result

    def apply(
        self, route: Route, names: Sequence[str], flat: Tensor, step: int, seconds: int, *, raw: bool, float16: bool
    ) -> None:
        from shoal.sharded.ps.protocol import Op

        versions = self.client.versions
        requests = {}
        for i, part in enumerate(self.parts):
            requests[i] = part.write_request(
                Op.APPLY, names, route.counts[i], route.ids[i], flat[route.floats[i]], step=step, seconds=seconds,
                float16=float16,
            )  # fmt: skip
            requests[i].read_version = versions[i]
        self.client.write(requests, wait=False)

    def write(self, verb: str, per_part: Sequence[dict[str, tuple[Tensor, Tensor]]], seconds: int) -> None:
        from shoal.sharded.ps.protocol import Op

        op = Op[verb.upper()]
        requests = {}
        for i, (part, pairs) in enumerate(zip(self.parts, per_part, strict=True)):
            names = list(part.dims) if part.native else sorted(pairs)
            chosen = [
                pairs.get(name, (torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(0, device="cpu")))
                for name in names
            ]
            if names:
                requests[i] = part.write_request(
                    op, names, [ids.numel() for ids, _ in chosen], torch.cat([ids for ids, _ in chosen]),
                    torch.cat([values.reshape(-1) for _, values in chosen]), seconds=seconds,
                )  # fmt: skip
        self.client.write(requests)
