"""Calls over ranks as generators that yield their exchanges; calls that run together share every exchange."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from shoal.buffers import empty_of
from shoal.sharded.all_to_all.exchange import Call, Exchange

T = TypeVar("T")
_ALIGNED = 8  # bytes, so that received data can be viewed as any type


class Send(NamedTuple):
    """One exchange: ``send[r]`` elements of ``flat`` go to rank ``r``, and ``recv[r]`` come from it."""

    name: str
    call: Call | None
    """None if the exchange before this one, in the same call, has checked it."""
    flat: Tensor
    send: Sequence[int]
    recv: Sequence[int]


Steps = Generator[Send, Tensor, T]
"""A call: it yields each `Send`, gets the received tensor, and returns its result."""


def no_exchanges() -> Steps[None]:
    """A call without exchanges."""
    return
    yield


def run(exchange: Exchange, calls: Sequence[Steps[Any]]) -> list[Any]:
    """Run calls and return their results. The first exchanges of all calls are made as one, then the second, ...

    Every rank must make the same calls in the same order. An error in one of them ends all of them.
    """
    results: list[Any] = [None] * len(calls)
    waiting: list[tuple[int, Send]] = []

    def advance(number: int, came: Tensor | None) -> None:
        try:
            waiting.append((number, next(calls[number]) if came is None else calls[number].send(came)))
        except StopIteration as end:
            results[number] = end.value

    with exchange.ranks.turn:
        try:
            for number in range(len(calls)):
                advance(number, None)
            while waiting:
                now, waiting = waiting, []
                parts = _exchanged(exchange, [send for _, send in now])
                for (number, _), came in zip(now, parts, strict=True):
                    advance(number, came)
        finally:
            for call in calls:
                call.close()
    return results


def _exchanged(exchange: Exchange, sends: Sequence[Send]) -> list[Tensor]:
    """Make one exchange for several sends; returns the received tensor of each."""
    if len(sends) == 1:
        (one,) = sends
        return [exchange.send(one.name, one.call, one.flat, one.send, one.recv)]
    ranks = range(exchange.ranks.world_size)
    calls = [one.call for one in sends if one.call is not None]
    call = _joined(calls) if calls else None
    sizes = [[_padded(one.send[r] * one.flat.element_size()) for one in sends] for r in ranks]
    sent = room_for(sum(map(sum, sizes)), torch.uint8, sends[0].flat.device)
    pieces = [one.flat.contiguous().view(-1).split(list(one.send)) for one in sends]
    room = iter(sent.split([size for own in sizes for size in own]))
    for r in ranks:
        for parts in pieces:
            raw = parts[r].view(torch.uint8)
            next(room)[: raw.numel()].copy_(raw)
    awaited = [[_padded(one.recv[r] * one.flat.element_size()) for one in sends] for r in ranks]
    name = "_and_".join(dict.fromkeys(one.name for one in sends))
    came = exchange.send(name, call, sent, [sum(own) for own in sizes], [sum(own) for own in awaited])
    if call is not None and call.failed:  # no rank has sent its data; this rank raises its own error
        return [one.flat.new_zeros(sum(one.recv)) for one in sends]
    blocks = came.split([size for own in awaited for size in own])
    results = []
    for number, one in enumerate(sends):
        own = [blocks[r * len(sends) + number][: one.recv[r] * one.flat.element_size()] for r in ranks]
        results.append(torch.cat(own).view(one.flat.dtype))
    return results


def room_for(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor ``[size]``; on the CPU it reuses memory if possible."""
    return empty_of(size, dtype) if device.type == "cpu" else torch.empty(size, dtype=dtype, device=device)


def _joined(calls: Sequence[Call]) -> Call:
    """Join calls into one that is equal on all ranks if each of ``calls`` is."""
    first = calls[0]
    if len(calls) == 1:
        return first
    detail = zlib.crc32(repr([(call.kind, call.number, call.detail) for call in calls]).encode())
    names = tuple(name for call in calls for name in call.names)
    return Call(first.kind, first.number, names, detail, any(call.failed for call in calls))


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
