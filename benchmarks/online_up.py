"""`shoal up` from nothing to the first live prediction, with the files of `shoal up --init`; a part of `online`.

    python -m benchmarks.online --only up

The clock starts when the command starts and stops at the first answer whose model has learnt something: the trainer
has pushed at least once. Nothing exists before: no checkpoints, no exports, no registry.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, parser

GOAL_S, DEADLINE_S = 30.0, 180.0
ROW = {"I1": 3.0, "C1": "68fd1e64"}


def up(report: Report, flags: Any) -> None:
    """Seconds to the first answer, and to the first one of a model that has learnt."""
    first, live = [], []
    for _ in range(min(flags.repeats, 3)):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(_shoal("up", "--init", folder), check=True, capture_output=True)
            began = time.monotonic()
            process = subprocess.Popen(_shoal("up", f"{folder}/online.toml"), stdout=subprocess.DEVNULL)
            try:
                answered, fresh = _first_answers(Path(folder, "online.run", "state.json"), began, process)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(DEADLINE_S)
            first.append(answered)
            live.append(fresh)
    report.add("shoal up: to the first answer", f"{statistics.median(first):.1f} s")
    seconds = statistics.median(live)
    report.add("shoal up: to the first live prediction", f"{seconds:.1f} s", f"{GOAL_S:g} s", seconds / GOAL_S, 1.0,
               at_most=True)  # fmt: skip


def _shoal(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shoal", *arguments]


def _first_answers(state: Path, began: float, process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Seconds to the first answer, and to the first one that differs from it, which needs a trained model."""
    before: float | None = None
    answered = 0.0
    while time.monotonic() - began < DEADLINE_S:
        if process.poll() is not None:
            raise RuntimeError(f"shoal up ended with exit code {process.returncode}")
        answer = _ask(state)
        if answer is not None:
            if before is None:
                before, answered = answer, time.monotonic() - began
            elif answer != before:
                return answered, time.monotonic() - began
        time.sleep(0.05)
    raise RuntimeError(f"no live prediction within {DEADLINE_S:g} s")


def _ask(state: Path) -> float | None:
    try:
        rows = json.loads(state.read_text())["processes"]
        port = next(row["ports"]["rest"] for row in rows if row["kind"] == "replica")
        body = json.dumps({"instances": [ROW]}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models/online:predict", body)
        with urllib.request.urlopen(request, timeout=2) as answer:
            found = json.load(answer)["predictions"][0]
        return found["probability"] if isinstance(found, dict) else found
    except (OSError, ValueError, KeyError, StopIteration):
        return None


def main() -> None:
    flags = parser(__doc__ or "").parse_args()
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(each or os.getcwd() for each in sys.path))
    report = Report("online")
    report.start()
    up(report, flags)
    report.save(flags.json)


if __name__ == "__main__":
    main()
