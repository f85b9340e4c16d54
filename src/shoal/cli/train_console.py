"""Output of `shoal train`: a live line on a terminal, plain lines elsewhere, or JSON lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from shoal.cli.shared.console import make_console
from shoal.observe.finite import finite
from shoal.train.loop.config import Config
from shoal.train.loop.measure.reporter import Reporter

_LISTED = 6


@contextmanager
def make_reporter(config: Config, rank: int, *, as_json: bool) -> Iterator[Reporter]:
    """Yield the reporter for this output; ranks other than 0 report only bad rows."""
    if as_json:
        yield JsonReporter(rank)
    elif rank == 0 and sys.stderr.isatty():
        with LiveReporter(config) as live:
            yield live
    else:
        yield PlainReporter(rank)


def _say(text: str, to: TextIO) -> None:
    """Write a line in one call: `shoal launch` follows unbuffered files, and print writes the newline separately."""
    to.write(f"{text}\n")
    to.flush()


class JsonReporter(Reporter):
    """One JSON object per line on stdout; ``event`` names its kind."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def _write(self, event: str, values: dict[str, Any]) -> None:
        _say(json.dumps({"event": event, "rank": self._rank, **finite(values)}), sys.stdout)

    def start(self, **values: Any) -> None:
        self._write("start", values)

    def progress(self, **values: Any) -> None:
        self._write("progress", values)

    def evaluated(self, **values: Any) -> None:
        self._write("eval", values)

    def saved(self, *, step: int, path: str, seconds: float) -> None:
        self._write("checkpoint", {"step": step, "path": path, "seconds": seconds})

    def exported(self, *, step: int, path: str, seconds: float) -> None:
        self._write("export", {"step": step, "path": path, "seconds": seconds})

    def bad_row(self, *, where: str, why: str) -> None:
        self._write("bad_row", {"where": where, "why": why})

    def note(self, text: str) -> None:
        self._write("note", {"text": text})

    def alert(self, text: str) -> None:
        self._write("alert", {"text": text})

    def end(self, **values: Any) -> None:
        self._write("end", values)


class PlainReporter(Reporter):
    """Plain lines on stderr, the result on stdout."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank

    def say(self, text: str) -> None:
        _say(text, sys.stderr)

    def start(self, **values: Any) -> None:
        ranks = f" on {values['world']} ranks" if values["world"] > 1 else ""
        files = "1 file" if values["files"] == 1 else f"{values['files']} files"
        if values["sources"]:
            then = f"{files}, then " if values["files"] else ""
            files = then + ", ".join(values["sources"])
        self.say(
            f"{values['model']}, {values['parameters']:,} dense parameters, {files}, "
            f"batches of {values['batch_size']:,}{ranks}"
        )
        for one in values["tables"]:
            self.say(_table_line(one))
        if values.get("metrics"):
            self.say(f"status page http://{values['metrics']}/")
        if values["resumed"]:
            self.say(f"resuming from {values['resumed']} at step {values['step']:,}")

    def progress(self, **values: Any) -> None:
        self.say(_line(values))

    def evaluated(self, **values: Any) -> None:
        best = ", the best so far" if values["is_best"] else ""
        names = {"pr_auc": "PR-AUC", "gauc": "GAUC", "ndcg": "NDCG"}
        more = "".join(f", {name} {values[key]:.4f}" for key, name in names.items() if key in values)
        self.say(
            f"evaluation at step {values['step']:,}: AUC {values['auc']:.4f}{more}, logloss {values['logloss']:.4f}, "
            f"calibration {values['calibration']:.3f} on {values['samples']:,} samples{best}"
        )
        if values.get("buckets"):
            buckets = (f"{one['predicted']:.3f}/{one['happened']:.3f}" for one in values["buckets"])
            self.say(f"  predicted/happened by bucket: {' '.join(buckets)}")

    def saved(self, *, step: int, path: str, seconds: float) -> None:
        self.say(f"checkpoint {path} ({seconds:.1f} s)")

    def exported(self, *, step: int, path: str, seconds: float) -> None:
        self.say(f"export {path} ({seconds:.1f} s)")

    def bad_row(self, *, where: str, why: str) -> None:
        prefix = f"rank {self._rank}: " if self._rank else ""
        self.say(f"{prefix}bad row skipped: {where}: {why} (later ones are only counted; --strict stops at the first)")

    def note(self, text: str) -> None:
        self.say(f"note: {text}")

    def alert(self, text: str) -> None:
        self.say(f"ALERT: {text}")

    def end(self, **values: Any) -> None:
        print(summary(values), flush=True)


class LiveReporter(PlainReporter):
    """A live line at the bottom of a terminal."""

    _REFRESH_S = 0.1

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._console = make_console(stderr=True)
        from rich.live import Live
        from rich.text import Text

        self._text = Text
        self._live = Live(Text("reading …"), console=self._console, refresh_per_second=10, transient=True)
        self._epochs = config.train.epochs
        self._known: dict[str, Any] = {}
        self._drawn, self._mark, self._mark_samples = 0.0, time.monotonic(), 0

    def __enter__(self) -> LiveReporter:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(self._text(text))

    def start(self, **values: Any) -> None:
        super().start(**values)
        self._mark = time.monotonic()

    def tick(self, *, step: int, epoch: int, samples: int) -> None:
        now = time.monotonic()
        if now - self._drawn < self._REFRESH_S:
            return
        self._drawn = now
        if not self._mark_samples or now - self._mark > 3:
            if self._mark_samples:
                self._known["live_rate"] = (samples - self._mark_samples) / (now - self._mark)
            self._mark, self._mark_samples = now, samples
        self._live.update(self._line(step, epoch, samples))

    def _line(self, step: int, epoch: int, samples: int) -> Any:
        known = self._known
        rate = known.get("live_rate", known.get("samples_per_s"))
        line = self._text.assemble(
            (f"epoch {min(epoch + 1, self._epochs)}/{self._epochs} ", "dim"), (f"step {step:,} ", "bold"),
            f"{samples:,} samples ", (f"{rate:,.0f}/s " if rate else "", "cyan"),
        )  # fmt: skip
        if "auc" in known:
            line.append(f"AUC {known['auc']:.4f} ", "bold green")
            line.append(f"(last {known['window_auc']:.4f}) ", "green")
            line.append(f"logloss {known['logloss']:.4f} ")
            rows = "" if known["rows"] is None else f"{known['rows']:,} rows "
            line.append(_eta(known).removeprefix(", ") + (" " if _eta(known) else ""))
            line.append(_lag(known).removeprefix(", ") + (" " if _lag(known) else ""), "yellow")
            line.append(f"{rows}{known['resident_bytes'] / 2**30:.2f} GiB", "dim")
        return line

    def progress(self, **values: Any) -> None:
        self._known.update(values)
        super().progress(**values)

    def end(self, **values: Any) -> None:
        self._live.stop()
        super().end(**values)


def _table_line(one: dict[str, Any]) -> str:
    """Describe a table: ``table features.user: user, dim 32, adam, 0 rows``."""
    names = one["features"]
    features = ", ".join(names) if len(names) <= _LISTED else f"{len(names)} features, {names[0]} to {names[-1]}"
    rows = "" if one["rows"] is None else f", {one['rows']:,} rows"
    return f"table {one['name']}: {features or 'no features'}, dim {one['dim']}, {one['optimizer']}{rows}"


def _tables(values: dict[str, Any]) -> str:
    """Describe the rows and memory of each table, if there are several."""
    if len(values["tables"]) < 2:
        return ""
    tables = (
        f"{name} {'' if one['rows'] is None else format(one['rows'], ',') + ' rows'} {one['bytes'] / 2**20:,.0f} MiB"
        for name, one in values["tables"].items()
    )
    return f"\ntables: {'; '.join(tables)}"


def _line(values: dict[str, Any]) -> str:
    rows = "" if values["rows"] is None else f", {values['rows']:,} rows"
    bad = f", {values['bad_rows']:,} bad rows" if values["bad_rows"] else ""
    bad += _lag(values)
    return (
        f"step {values['step']:,}: {values['samples_per_s']:,.0f} samples/s, AUC {values['auc']:.4f} "
        f"(last {values['window_auc']:.4f}), logloss {values['logloss']:.4f}, calibration {values['calibration']:.3f}"
        f"{rows}{_eta(values)}, table {values['table_bytes'] / 2**20:,.0f} MiB, "
        f"process {values['resident_bytes'] / 2**20:,.0f} MiB{bad}"
    )


def _lag(values: dict[str, Any]) -> str:
    """``, lag 1,200 records (3.1 s)``."""
    records, seconds = values.get("lag_records"), values.get("lag_s")
    if records is None and seconds is None:
        return ""
    if records is None:
        return f", lag {seconds:.1f} s"
    return f", lag {records:,} records" + ("" if not seconds else f" ({seconds:.1f} s)")


def _eta(values: dict[str, Any]) -> str:
    """``, 3 min to go``."""
    seconds = values.get("eta_s")
    if seconds is None:
        return ""
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    size, unit = next((each for each in units if seconds >= 2 * each[0]), units[-1])
    return f", {seconds / size:.0f} {unit} to go"


def summary(values: dict[str, Any]) -> str:
    """Describe the end of a run."""
    why = {
        "finished": "finished", "early_stop": "stopped early: no new best", "max_steps": "stopped at max_steps",
        "stopped": "stopped by a hook", "guard": "stopped by [serve.guard]",
        "interrupted": "interrupted",
    }[values["why"]]  # fmt: skip
    path = values["checkpoint"]
    if values["why"] == "interrupted":
        why += "; nothing was saved, because there is no --out" if path is None else (
            "; run the same command to resume from the checkpoint"
        )  # fmt: skip
    return f"{why} after {values['seconds']:.1f} s; {_line(values)}{_which(values)}{_tables(values)}"


def _which(values: dict[str, Any]) -> str:
    """Say which model a run with early stopping ends with, and where the best one is."""
    path, kept = values["checkpoint"], values["kept_step"]
    if kept is None:
        if values["why"] != "early_stop":
            return ""
        return f"; the model is from the last step, {values['step']:,}" + (
            "; with --out it would be the best one" if path is None else ""
        )
    best = f"step {kept:,}, the best ({values['metric']} {values['kept_value']:.4f})"
    if values["model_step"] == kept:
        return f"; the model in {path} is from {best}"
    return f"; the model in {path} is from the last step; the one from {best}, is saved next to it"
