"""Helpers for benchmarks: machine description, interleaved timing and a table of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import shoal
from shoal import _core


def machine() -> dict[str, Any]:
    """CPU, cores, versions and commit, for the header of a report."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "isa": _core.isa(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shoal": shoal.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }


def interleaved(calls: Sequence[Callable[[], Any]], repeats: int, *, pause_s: float = 0.02) -> list[list[float]]:
    """Seconds of each call; the calls take turns, ``repeats`` times after a warm-up round.

    The pause lets threads that the previous call left spinning go to sleep before the next call.
    """
    times: list[list[float]] = [[] for _ in calls]
    for round_ in range(repeats + 1):
        for call, series in zip(calls, times, strict=True):
            time.sleep(pause_s)
            start = time.perf_counter()
            call()
            if round_:
                series.append(time.perf_counter() - start)
    return times


def touch_memory(gib: float) -> None:
    """Touch and free memory, so that a virtual machine's host has provided the pages before anything is timed.

    If a host reclaims free pages, the first touch of a page takes about twenty times as long as later ones, and whoever
    allocates first would appear slower.
    """
    for _ in range(2):
        block = torch.empty(int(gib * 2**28))
        block.fill_(1.0)
        del block


@dataclass
class Report:
    """Rows of (what, ours, rival, ratio, goal), printed as they are added and saved as JSON."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=machine)

    def start(self) -> None:
        m = self.machine
        print(f"# {self.name}: {m['cpu']}, {m['cores']} cores, {m['memory_gib']} GiB, {m['isa']}")
        print(f"# Python {m['python']}, torch {m['torch']}, shoal {m['shoal']} ({m['commit']}), {m['date']}")
        print(f"{'what':<58} {'ours':>14} {'rival':>14} {'ratio':>7} {'goal':>8}", flush=True)

    def add(
        self,
        what: str,
        ours: str,
        rival: str = "",
        ratio: float | None = None,
        goal: float | None = None,
        *,
        at_most: bool = False,
    ) -> None:
        """Add a row. ``goal`` is the smallest acceptable ratio, or with ``at_most`` the largest."""
        met = None if ratio is None or goal is None else (ratio <= goal if at_most else ratio >= goal)
        sign = "<=" if at_most else ">="
        print(
            f"{what:<58} {ours:>14} {rival:>14} {'' if ratio is None else f'{ratio:.2f}':>7} "
            f"{'' if goal is None else f'{sign}{goal:g}':>8}{'' if met is None else '  ok' if met else '  MISSED'}",
            flush=True,
        )
        row = {"what": what, "ours": ours, "rival": rival, "ratio": ratio, "goal": goal, "at_most": at_most, "met": met}
        self.rows.append(row)

    def save(self, path: str | None) -> None:
        if path:
            with open(path, "w") as file:
                json.dump(asdict(self), file, indent=1)


def median(series: Sequence[float]) -> float:
    return statistics.median(series)


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the flags that all benchmarks share."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", metavar="FILE", help="write the results to this file")
    made.add_argument("--repeats", type=int, default=11, help="timings per call; the median is reported")
    return made
