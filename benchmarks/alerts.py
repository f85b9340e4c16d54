"""Provoke every alert with real processes and a real Prometheus: `python -m benchmarks.alerts`.

The rules are those that `shoal monitor` writes, with durations sixty times shorter (5 minutes become 5 seconds) and the
smaller thresholds of `SMALLER`. Each scene starts processes as a user would, breaks something, and waits until
Prometheus reports the alert. If possible it then follows docs/operations.md and waits until the alert ends. Scenes with
a small disk need root.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks import alert_scenes
from shoal.observe.monitoring import ALERTS
from shoal.testing.programs.prometheus import Prometheus, prometheus_unavailable

WAIT_S = 150.0
QUIET_S = 3.0
SMALLER = {
    "shoal_serving_model_age_seconds > 900": "shoal_serving_model_age_seconds > 8",
    "sync_freshness_seconds_bucket[10s]))) > 60": "sync_freshness_seconds_bucket[10s]))) > 2",
    "shoal_ps_checkpoint_age_seconds > 7200": "shoal_ps_checkpoint_age_seconds > 8",
    "shoal_ps_queued_bytes > 1e9": "shoal_ps_queued_bytes > 1e6",
    "shoal_ps_follower_lag_seconds > 30": "shoal_ps_follower_lag_seconds > 4",
    "shoal_train_lag_s > 600": "shoal_train_lag_s > 300",
}
"""Thresholds that would take hours to reach, and what replaces them; the rest of a rule is unchanged."""


class Stage:
    """The environment of a scene: a folder, processes, and a Prometheus that watches them."""

    def __init__(self, folder: Path, results: dict[str, str]) -> None:
        self.folder, self._results = folder, results
        self._processes: list[subprocess.Popen[str]] = []
        self._prometheus: Prometheus | None = None
        self._begun = 0.0
        self.cleanups: list[Any] = []

    @property
    def last(self) -> subprocess.Popen[str]:
        """The process that was started last."""
        return self._processes[-1]

    def shoal(
        self, *arguments: object, env: dict[str, str] | None = None, stdin: int | None = None
    ) -> subprocess.Popen[str]:
        """Starts a command as a user would, with its output in a log."""
        return self.python("-m", "shoal", *arguments, env=env, stdin=stdin)

    def python(
        self, *arguments: object, env: dict[str, str] | None = None, stdin: int | None = None
    ) -> subprocess.Popen[str]:
        log = open(self.folder / f"log-{len(self._processes)}.txt", "w")  # noqa: SIM115
        command = [sys.executable, *map(str, arguments)]
        made = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **(env or {})}, cwd=self.folder,
            stdin=stdin if stdin is not None else subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        log.close()
        self._processes.append(made)
        return made

    def ready(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """The first line of JSON that a process prints."""
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{process.args} ended with {process.wait()}")

    def watch(self, *targets: str) -> None:
        """Makes Prometheus read these addresses from now on."""
        place = self.folder / "prometheus"
        self._prometheus = made = Prometheus(place, targets, faster_by=60)
        rules = (place / ALERTS).read_text()
        for old, new in SMALLER.items():
            if old not in rules:
                raise RuntimeError(f"no rule has {old}")
            rules = rules.replace(old, new)
        (place / ALERTS).write_text(rules)
        made.start()
        end = time.monotonic() + 60
        while len(made.query('up{job="shoal"} == 1')) < len(targets) and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(2)  # so that counters have an earlier value
        self._begun = time.monotonic()

    def fires(self, alert: str, wait_s: float = WAIT_S, meanwhile: Any = None) -> None:
        """Waits until an alert fires, calling ``meanwhile`` repeatedly."""
        assert self._prometheus is not None
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            if meanwhile is not None:
                meanwhile()
            found = self._prometheus.firing()
            if alert in found:
                seconds = time.monotonic() - self._begun
                self._results[alert] = f"fired after {seconds:.0f} s"
                print(f"{alert}: fired after {seconds:.0f} s", flush=True)
                return
            time.sleep(0.3)
        self._results[alert] = "DID NOT FIRE"
        print(f"{alert}: DID NOT FIRE within {wait_s:.0f} s", flush=True)

    def ends(self, alert: str, wait_s: float = WAIT_S, meanwhile: Any = None) -> None:
        """Waits until an alert ends, after its cause was removed."""
        assert self._prometheus is not None
        if not self._results[alert].startswith("fired"):
            return
        begun, quiet_since = time.monotonic(), time.monotonic()
        while time.monotonic() < begun + wait_s:
            if meanwhile is not None:
                meanwhile()
            if alert in self._prometheus.firing():
                quiet_since = time.monotonic()
            elif time.monotonic() > quiet_since + QUIET_S:
                self._results[alert] += f", ended {quiet_since - begun:.0f} s after it was fixed"
                print(f"{alert}: ended {quiet_since - begun:.0f} s after it was fixed", flush=True)
                return
            time.sleep(0.3)
        self._results[alert] = "DID NOT END"
        print(f"{alert}: DID NOT END within {wait_s:.0f} s", flush=True)

    def close(self) -> None:
        if self._prometheus is not None:
            self._prometheus.close()
        for each in self._processes:
            for number in (signal.SIGCONT, signal.SIGKILL):
                try:
                    os.killpg(each.pid, number)
                except ProcessLookupError:
                    break
            each.wait(60)
        for cleanup in reversed(self.cleanups):
            cleanup()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(alert_scenes.SCENES), help="scenes to play (all)")
    options = parser.parse_args()
    if why := prometheus_unavailable():
        print(f"alerts: {why}", file=sys.stderr)
        return 2
    results: dict[str, str] = {}
    for name in options.only or alert_scenes.SCENES:
        print(f"--- {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="shoal-alerts-") as folder:
            stage = Stage(Path(folder), results)
            try:
                alert_scenes.SCENES[name](stage)
            except Exception:
                traceback.print_exc()
                for log in sorted(Path(folder).glob("log-*.txt")):
                    print(f"{log.name}: {log.read_text()[-1500:]}", file=sys.stderr)
            finally:
                stage.close()
    print(f"{sum(text.startswith('fired') for text in results.values())} of {len(results)} alerts fired")
    return int(any(not text.startswith("fired") for text in results.values()))


if __name__ == "__main__":
    sys.exit(main())
