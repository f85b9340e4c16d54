"""Scripted faults on a chosen rank and operation, injected through the interfaces that production uses.

    transport = faults.wrap(transport, faults.fail(rank=1, step=3), faults.corrupt(rank=0, step=5))

counts the operations (send, recv, barrier) of each transport from 0 and makes the scripted ones fail.
``faults.inject(ranks, faults.die(rank=1, step=3))`` does so with the calls of `shoal.comm.Ranks`. In a training
loop ``faults.Script(faults.die(rank=2, step=7)).at(rank, step)`` does the same at a step of the loop.
"""

import itertools
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shoal.comm.ranks.ranks import Ranks
from shoal.comm.ranks.transport import Transport
from shoal.errors import ConfigError, TransportError

ACTIONS = ("fail", "die", "hang", "delay", "drop", "duplicate", "corrupt", "truncate")
MESSAGE_ACTIONS = frozenset({"drop", "duplicate", "corrupt", "truncate"})


class InjectedFault(RuntimeError):
    """The exception that ``fail`` raises by default."""


@dataclass(frozen=True)
class Fault:
    """One scripted fault; create it with the functions of this module."""

    action: str
    rank: int
    step: int
    seconds: float = 0.0
    error: BaseException | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS or self.step < 0 or self.rank < 0:
            raise ConfigError(f"fault: action must be one of {', '.join(ACTIONS)} and rank, step >= 0, got {self}")


def fail(rank: int, step: int, error: BaseException | None = None) -> Fault:
    """Raises ``error`` (an ``InjectedFault``)."""
    return Fault("fail", rank, step, error=error)


def die(rank: int, step: int) -> Fault:
    """Kills the process, without clean-up."""
    return Fault("die", rank, step)


def hang(rank: int, step: int, seconds: float = 3600.0) -> Fault:
    """Hangs for ``seconds``, then fails with a timeout."""
    return Fault("hang", rank, step, seconds)


def delay(rank: int, step: int, seconds: float) -> Fault:
    """Delays the operation by ``seconds``."""
    return Fault("delay", rank, step, seconds)


def drop(rank: int, step: int) -> Fault:
    """Loses the message of a send."""
    return Fault("drop", rank, step)


def duplicate(rank: int, step: int) -> Fault:
    """Sends the message twice."""
    return Fault("duplicate", rank, step)


def corrupt(rank: int, step: int) -> Fault:
    """Flips one bit in the middle of the message of a send or a receive."""
    return Fault("corrupt", rank, step)


def truncate(rank: int, step: int) -> Fault:
    """Cuts the message of a send or a receive in half."""
    return Fault("truncate", rank, step)


class Script:
    """Faults by rank and step."""

    def __init__(self, *faults: Fault) -> None:
        self._faults = {(f.rank, f.step): f for f in faults}

    def at(self, rank: int, step: int) -> Fault | None:
        """Trigger the fault of this step; a fault of a message is returned for the caller to apply."""
        fault = self._faults.get((rank, step))
        if fault is None:
            return None
        if fault.action == "fail":
            raise fault.error or InjectedFault(f"scripted: rank {rank} fails at step {step}")
        if fault.action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.action in ("hang", "delay"):
            time.sleep(fault.seconds)
        if fault.action == "hang":
            raise TransportError(f"scripted: rank {rank} hung at step {step}", kind="timeout", peer=rank)
        return fault if fault.action in MESSAGE_ACTIONS else None


class FaultyTransport(Transport):
    """A transport with scripted faults in its operations."""

    def __init__(self, inner: Transport, faults: Iterable[Fault]) -> None:
        self.inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.step = 0
        self._script = Script(*faults)

    def _next(self) -> Fault | None:
        step, self.step = self.step, self.step + 1
        return self._script.at(self.rank, step)

    def send(self, dest: int, data: Any) -> None:
        fault = self._next()
        if fault is None:
            self.inner.send(dest, data)
        elif fault.action == "duplicate":
            self.inner.send(dest, data)
            self.inner.send(dest, data)
        elif fault.action != "drop":
            self.inner.send(dest, _damaged(fault, bytes(memoryview(data))))

    def recv(self, src: int, timeout: float | None = None) -> bytes:
        fault = self._next()
        data = self.inner.recv(src, timeout)
        if fault is not None and fault.action == "drop":
            data = self.inner.recv(src, timeout)
        return _damaged(fault, data) if fault is not None else data

    def barrier(self, timeout: float | None = None) -> None:
        self._next()
        self.inner.barrier(timeout)

    def close(self) -> None:
        self.inner.close()


def _damaged(fault: Fault, data: bytes) -> bytes:
    if fault.action == "truncate":
        return data[: len(data) // 2]
    if fault.action == "corrupt" and data:
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]
    return data


def wrap(transport: Transport, *faults: Fault) -> FaultyTransport:
    """Return ``transport`` with ``faults`` scripted over its operations."""
    return FaultyTransport(transport, faults)


def inject(ranks: Ranks, *faults: Fault) -> Ranks:
    """Return ``ranks`` with ``fail``, ``die``, ``hang`` and ``delay`` at scripted calls, counted from 0 on each rank.

    They apply to everything that uses the same ranks (aggregators, pipelines, ``hvd_lib``, tables). Keep the result.
    """
    wrong = [fault for fault in faults if fault.action in MESSAGE_ACTIONS]
    if wrong:
        raise ConfigError(f"inject: faults must be fail, die, hang or delay, got {wrong[0].action!r}")
    script, calls = Script(*faults), itertools.count()

    def before_call(what: str) -> None:
        script.at(ranks.rank, next(calls))

    ranks.before_call = before_call
    return ranks
