"""Latency and goodput of point-to-point, all-reduce and all-to-all between the ranks of this launch."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.comm.horovod import hvd_lib
from shoal.comm.ranks import collectives
from shoal.comm.ranks.process_group import ProcessGroupTransport
from shoal.errors import ConfigError

OPERATIONS = ("send_recv", "all_reduce", "all_to_all")
KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True)
class Point:
    """One operation at one size: the median time per call, and the bytes per second that a rank moves."""

    operation: str
    nbytes: int
    calls: int
    latency_us: float
    goodput_gbps: float


def sizes(smallest: int = KIB, largest: int = 256 * MIB) -> list[int]:
    """``smallest`` times powers of four, up to and including ``largest``."""
    if not 0 < smallest <= largest:
        raise ConfigError(f"bench: smallest must be > 0 and <= largest, got {smallest} and {largest} bytes")
    result = [smallest]
    while result[-1] * 4 < largest:
        result.append(result[-1] * 4)
    return result if result[-1] == largest else [*result, largest]


def measure(
    operations: Sequence[str] = OPERATIONS, over: Iterable[int] | None = None, seconds: float = 0.5
) -> list[Point]:
    """Time each operation for about ``seconds`` at each size, after starting communication if needed.

    Every rank must call it, and every rank gets the points. Rank 0 decides how many calls are made.
    """
    unknown = sorted(set(operations) - set(OPERATIONS))
    if unknown:
        raise ConfigError(f"bench: operations must be among {', '.join(OPERATIONS)}, got {unknown}")
    if not collectives.is_started():
        hvd_lib.start_group()
    over = list(over) if over is not None else sizes()
    transport = ProcessGroupTransport()
    points = []
    for operation in operations:
        for nbytes in over:
            call = _CALLS[operation](transport, nbytes)
            points.append(_time(operation, nbytes, call, seconds))
    transport.close()
    return points


def _time(operation: str, nbytes: int, call: Callable[[], Any], seconds: float) -> Point:
    call()
    began = time.perf_counter()
    call()
    once = time.perf_counter() - began
    count = torch.tensor([max(3, min(1000, int(seconds / max(once, 1e-9))))], device="cpu")
    collectives.broadcast(count, 0)
    times = []
    for _ in range(int(count)):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    median = statistics.median(times)
    return Point(operation, nbytes, len(times), median * 1e6, nbytes / median / 1e9)


def _send_recv(transport: ProcessGroupTransport, nbytes: int) -> Callable[[], Any]:
    """Pass a message around the ring of ranks (to itself when alone); times one simultaneous send and receive."""
    data = bytes(nbytes)
    after, before = (transport.rank + 1) % transport.world_size, (transport.rank - 1) % transport.world_size

    def call() -> None:
        transport.send(after, data)
        transport.recv(before)

    return call


def _all_reduce(transport: ProcessGroupTransport, nbytes: int) -> Callable[[], Any]:
    data = torch.ones(max(1, nbytes // 4), device="cpu")
    return lambda: collectives.all_reduce(data, group=transport.group)


def _all_to_all(transport: ProcessGroupTransport, nbytes: int) -> Callable[[], Any]:
    rows = max(1, nbytes // 4 // transport.world_size)
    data = torch.ones(transport.world_size * rows, device="cpu")
    out = torch.empty_like(data)
    return lambda: collectives.all_to_all(out, data, group=transport.group)


_CALLS: dict[str, Callable[[ProcessGroupTransport, int], Callable[[], Any]]] = {
    "send_recv": _send_recv,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}


def report(points: Sequence[Point]) -> dict[str, Any]:
    """The points and the hardware they were measured on, for JSON."""
    import os
    import platform

    return {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "backend": collectives.backend_of(),
        "world_size": collectives.size_of(),
        "points": [asdict(p) for p in points],
    }


def plot(points: Sequence[Point], file: str | Path, title: str) -> None:
    """Plot latency and goodput over size, one line per operation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for operation in dict.fromkeys(p.operation for p in points):
        mine = [p for p in points if p.operation == operation]
        x = [p.nbytes for p in mine]
        left.loglog(x, [p.latency_us for p in mine], marker="o", markersize=3, label=operation)
        right.semilogx(x, [p.goodput_gbps for p in mine], marker="o", markersize=3, label=operation)
    for axes, label in ((left, "median time of a call, µs"), (right, "goodput, GB/s")):
        axes.set_xlabel("bytes")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
