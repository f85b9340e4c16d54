"""`shoal join`: join impressions and later actions from two live streams into training samples in a third."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.cli.shared.arguments import parse
from shoal.cli.shared.metrics_port import Counted, serve_metrics
from shoal.cli.shared.security_options import PortSecurity
from shoal.cli.shared.stopping import stop_event
from shoal.errors import UsageError

_ABOUT = """Join impressions with later actions on the same key, within a window of event time.

Example: shoal join join.toml, with this in join.toml:
  impressions = { from = "redis://localhost/impressions", key = "request" }
  actions = { from = "redis://localhost/actions", key = "request", kind = "kind" }
  labels.click.kinds = ["click"]
  window = "30m"
  state = "join-state"
  out = "redis://localhost/samples"

Then the messages
  {"request": "r1", "time": 1793491200, "user": "u7"}
  {"request": "r1", "time": 1793491230, "kind": "click"}

become the sample
  {"request": "r1", "time": 1793491200, "user": "u7", "click": 1}

and impressions without a click become negatives after 30 minutes. Sources are redis://, kafka://, dir:FOLDER or -
(standard input). docs/joining.md explains every setting.

SIGTERM and Ctrl-C write a checkpoint and exit. After a crash, run the same command to resume: no sample is lost and
none is written twice.

Exit codes: 0 stopped, or both inputs have ended; 1 failed; 2 wrong usage or configuration."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of `shoal join`."""

    config: Path | None = None
    """TOML file with [impressions], [actions], [labels.NAME] and [join]."""
    state: str | None = None
    """Folder for open impressions and checkpoints, instead of the one in the file."""
    to_end: bool = False
    """Join everything that is in the inputs now, close all windows, and exit; for a backfill."""
    every: float = 5.0
    """Seconds between lines of progress."""
    metrics_port: int | None = None
    """Port of the status page and /metrics, on 127.0.0.1; 0 picks a free one."""
    metrics: str | None = None
    """The same as HOST:PORT, for access from other machines, which needs TLS and tokens."""
    json: bool = False
    """Print one JSON line per report."""
    security: PortSecurity = field(default_factory=PortSecurity)


def main(argv: list[str]) -> int:
    return run(parse(Options, argv, "join", _ABOUT, positional="config"))


def run(options: Options) -> int:
    """Join until SIGTERM or SIGINT, or until both inputs have ended."""
    if options.config is None:
        raise UsageError("CONFIG must be given: shoal join join.toml")
    if not options.every > 0:
        raise UsageError(f"--every must be > 0, got {options.every:g}")
    from shoal.data.joining.config import load_join
    from shoal.data.joining.pump import Pump
    from shoal.data.live import open_writer, parse_address

    config = load_join(options.config, options.state)
    if not config.out:
        raise UsageError(f"{options.config}: [join] out must say where samples go, such as redis://localhost/samples")
    with contextlib.ExitStack() as open_things:
        writer = open_writer(config.out)
        open_things.callback(writer.close)
        stop = open_things.enter_context(stop_event())
        out = parse_address(config.out)  # samples are numbered, so a topic gets them in one partition
        partition = out.options.get("partitions", "0").split(",")[0] if out.scheme == "kafka" else None

        def write(first: int, samples: Any) -> None:
            writer.append(samples, partition=partition, at=first)

        pump = Pump(config, write, to_end=options.to_end, note=_note)
        open_things.callback(pump.close)
        pump.measure()
        shown = Counted(
            "Shoal joiner", lambda: pump.measured, counters=COUNTERS, wrong=WRONG,
            units={"watermark_lag_s": "s", "memory_bytes": "bytes", "tail_bytes": "bytes"},
        )  # fmt: skip
        security = options.security.build()
        open_things.callback(
            serve_metrics(options.metrics_port, shown, security, as_json=options.json, at=options.metrics)
        )
        report = _Reports(options, pump, str(out))
        report.start()
        while not stop.is_set() and not pump.ended:
            pump.step(0.02)
            report.progress()
        pump.checkpoint()
        report.end("both inputs have ended" if pump.ended else "stopped")
    return 0


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


COUNTERS = ("impressions", "actions", "positives", "negatives", "negatives_dropped")
WRONG = {
    "late_impressions": "late impressions", "late_actions": "late actions",
    "duplicate_impressions": "duplicate impressions", "duplicate_actions": "duplicate actions",
    "unmatched_actions": "actions without impression", "excess_actions": "actions beyond max_actions",
    "broken_impressions": "broken impressions", "broken_actions": "broken actions", "lost_records": "lost records",
}  # fmt: skip
"""Counts that should be 0."""


class _Reports:
    """Lines printed during the run."""

    def __init__(self, options: Options, pump: Any, out: str) -> None:
        self._options, self._pump, self._out = options, pump, out
        self._next = 0.0
        self._before = (time.monotonic(), self._events())

    def _events(self) -> int:
        counts = self._pump.joiner.native.counters()
        return counts["impressions"] + counts["actions"]

    def start(self) -> None:
        from shoal.data.live import parse_address

        config, native = self._pump.config, self._pump.joiner.native
        if self._options.json:
            self._json("start", self._pump.measure())
            return
        inputs = " with ".join(str(parse_address(one.source)) for one in (config.impressions, config.actions))
        print(
            f"joining {inputs} into {self._out}: windows of {config.window}, state in {config.state}", file=sys.stderr
        )
        if native.emitted or native.open_impressions:
            print(
                f"resuming after {native.emitted:,} samples, with {native.open_impressions:,} open impressions",
                file=sys.stderr,
            )
        self._next = time.monotonic() + self._options.every

    def progress(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._options.every
        self._show("progress")

    def end(self, why: str) -> None:
        self._show("end", why)

    def _show(self, event: str, why: str = "") -> None:
        values, now, events = self._pump.measure(), time.monotonic(), self._events()
        rate = (events - self._before[1]) / max(1e-9, now - self._before[0])
        self._before = now, events
        if self._options.json:
            self._json(event, values | {"events_per_s": round(rate, 1)} | ({"why": why} if why else {}))
            return
        print((f"{why}; " if why else "") + line(values, rate), file=sys.stderr, flush=True)

    def _json(self, event: str, values: dict[str, Any]) -> None:
        print(json.dumps({"event": event, "time": time.time(), **values}), flush=True)


def line(values: dict[str, Any], rate: float) -> str:
    """Format one line of progress; counts that should be 0 are shown only if they are not."""
    lag = f", {values['watermark_lag_s']:,.0f} s behind" if "watermark_lag_s" in values else ""
    wrong = "".join(f", {values[name]:,} {text}" for name, text in WRONG.items() if values[name])
    dropped = f" ({values['negatives_dropped']:,} left out)" if values["negatives_dropped"] else ""
    return (
        f"{rate:,.0f} events/s, {values['samples']:,} samples: {values['positives']:,} positives, "
        f"{values['negatives']:,} negatives{dropped}; open {values['open_impressions']:,} "
        f"({values['spilled']:,} on disk), {values['memory_bytes'] / 2**20:,.0f} MiB{lag}{wrong}"
    )
