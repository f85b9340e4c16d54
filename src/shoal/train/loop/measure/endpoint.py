"""``[out] metrics``: the state of a run as a status page and as Prometheus metrics over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shoal.observe.endpoint import Shown, process_metrics
from shoal.observe.exposition import Family, render
from shoal.observe.history import Figures
from shoal.observe.page import Part, chart, page, pill, table, tile
from shoal.train.loop.measure.reporter import Reporter

_GAUGES = {
    "auc": "AUC of all samples so far, each predicted before training on it",
    "window_auc": "AUC of the newest samples, each predicted before training on it",
    "logloss": "Mean loss per sample",
    "calibration": "Predicted clicks over clicks",
    "rows": "Rows of all tables",
    "table_bytes": "Memory of the tables in this process",
    "epoch": "Current pass over the files",
    "lag_records": "Unread records of the sources of all ranks",
    "lag_s": "Age of the last record that was read, on the rank that is furthest behind",
}

_FIGURES = (
    "auc", "window_auc", "logloss", "calibration", "rows", "table_bytes", "resident_bytes", "lag_records", "lag_s"
)  # fmt: skip


class Run(Shown):
    """The state of a run on its status page: the newest report and the latest events.

    Args:
        name: the model's name.
        progress: returns the current (step, samples); called from any thread.
        trip: returns why the guard has stopped the pushes; "" if it has not.
    """

    counters = ("samples", "bad_rows")

    def __init__(self, name: str, progress: Callable[[], tuple[int, int]], trip: Callable[[], str]) -> None:
        super().__init__()
        self._name, self._progress, self.trip = name, progress, trip
        self.values: Mapping[str, Any] = {}
        self.about: Mapping[str, Any] = {}
        self.counts = {"checkpoints": 0, "exports": 0, "checkpoint_failures": 0, "export_failures": 0}
        self.done_at: dict[str, float] = {}
        """When the last checkpoint and the last export were written."""
        self.last: dict[str, tuple[int, str]] = {}
        """Their steps and paths."""
        self.evaluation: Mapping[str, Any] = {}
        self.ended = ""

    def status(self) -> dict[str, Any]:
        step, samples = self._progress()
        values = {key: each for key, each in self.values.items() if isinstance(each, int | float | str | dict)}
        return {
            **values, "step": step, "samples": samples, "model": self._name, "guard": self.trip(), **self.counts,
            "tables": self.values.get("tables", {}), "ended": self.ended,
            "since_checkpoint_s": self._since("checkpoint"), "since_export_s": self._since("export"),
            "evaluation": {key: each for key, each in self.evaluation.items() if isinstance(each, int | float)},
        }  # fmt: skip

    def _since(self, what: str) -> float | None:
        return time.time() - self.done_at[what] if what in self.done_at else None

    def figures(self) -> Figures:
        step, samples = self._progress()
        values = self.values
        return {
            "samples": samples, "bad_rows": values.get("bad_rows", 0), "step": step,
            **{name: values.get(name) for name in _FIGURES}, "checkpoint_age": self._since("checkpoint"),
            "export_age": self._since("export"),
        }  # fmt: skip

    def page(self) -> Part:
        found = self.status()
        why = found["guard"]
        state = pill("guard: pushes stopped", "bad", why) if why else pill(self.ended or "running", "good")
        sources = self.about.get("sources") or ()
        return page(
            f"Shoal trainer, {self._name}",
            about=", ".join(filter(None, [
                f"{self.about['world']} ranks" if self.about.get("world", 1) > 1 else "",
                f"batches of {self.about['batch_size']:,}" if "batch_size" in self.about else "",
                f"from {', '.join(sources)}" if sources else "",
            ])),
            state=state,
            tiles=[
                tile("samples per second", found.get("samples_per_s")),
                tile("step", found["step"]),
                tile("samples", found["samples"]),
                tile("AUC, newest samples", found.get("window_auc"), "digits"),
                tile("logloss", found.get("logloss"), "digits"),
                tile("calibration", found.get("calibration"), "digits", hint="predicted clicks over clicks"),
                tile("rows", found.get("rows")),
                tile("memory", found.get("resident_bytes"), "bytes"),
                tile("behind the source", found.get("lag_s"), "s"),
                tile("checkpoint", found["since_checkpoint_s"], "ago", "bad" if found["checkpoint_failures"] else "",
                     f"{found['checkpoint_failures']} could not be written"),
                tile("export", found["since_export_s"], "ago", "bad" if found["export_failures"] else ""),
                tile("bad rows", found.get("bad_rows", 0), tone="warn" if found.get("bad_rows") else ""),
            ],
            charts=[
                chart("samples learnt", {"samples": "samples", "bad rows": "bad_rows"}, "per_s"),
                chart("AUC", {"newest samples": "window_auc", "all": "auc"}, "digits"),
                chart("logloss", {"logloss": "logloss"}, "digits"),
                chart("calibration", {"calibration": "calibration"}, "digits"),
                chart("model step", {"step": "step"}),
                chart("rows", {"rows": "rows"}),
                chart("memory", {"process": "resident_bytes", "tables": "table_bytes"}, "bytes"),
                chart("age", {"checkpoint": "checkpoint_age", "export": "export_age", "source": "lag_s"}, "s"),
            ],
            tables=[
                table("Tables", ["table", ("rows", "n"), ("memory", "bytes")], [
                    [name, each["rows"], each["bytes"]] for name, each in found["tables"].items()
                ]),
                table("Written", ["what", ("step", "n"), ("when", "ago"), "path"], [
                    [what, step, self._since(what), path] for what, (step, path) in self.last.items()
                ]),
                table("Last evaluation", ["figure", ("value", "digits")], sorted(found["evaluation"].items())),
            ],
        )  # fmt: skip

    def metrics(self) -> bytes:
        return process_metrics() + render(self._families())

    def _families(self) -> Iterator[Family]:
        step, samples = self._progress()
        values = self.values
        yield Family("shoal_train_step", "gauge", "Steps so far").add(step)
        yield Family("shoal_train_samples", "counter", "Samples learnt").add(samples)
        yield Family("shoal_train_bad_rows", "counter", "Rows left out").add(values.get("bad_rows", 0))
        for name, text in _GAUGES.items():
            if isinstance(values.get(name), int | float):
                yield Family(f"shoal_train_{name}", "gauge", text).add(values[name])
        for name, count in self.counts.items():
            yield Family(f"shoal_train_{name}", "counter", name.replace("_", " ").capitalize()).add(count)
        for what in ("checkpoint", "export"):
            if (age := self._since(what)) is not None:
                yield Family(f"shoal_train_{what}_age_seconds", "gauge", f"Since the last {what} was written").add(age)
        reason = self.trip()
        text = "1 while the guard has stopped pushes and exports"
        yield Family("shoal_train_guard_tripped", "gauge", text, ("reason",)).add(float(bool(reason)), reason)


class Watched(Reporter):
    """Records all events for the status page and passes them on to another reporter."""

    def __init__(self, reporter: Reporter, run: Run) -> None:
        self._to, self._run = reporter, run

    def start(self, **values: Any) -> None:
        self._run.about = values
        self._to.start(**values)

    def tick(self, *, step: int, epoch: int, samples: int) -> None:
        self._to.tick(step=step, epoch=epoch, samples=samples)

    def progress(self, **values: Any) -> None:
        self._run.values = values
        self._to.progress(**values)

    def evaluated(self, **values: Any) -> None:
        self._run.evaluation = values
        self._to.evaluated(**values)

    def saved(self, *, step: int, path: str, seconds: float) -> None:
        self._wrote("checkpoint", step, path)
        self._to.saved(step=step, path=path, seconds=seconds)

    def exported(self, *, step: int, path: str, seconds: float) -> None:
        self._wrote("export", step, path)
        self._to.exported(step=step, path=path, seconds=seconds)

    def _wrote(self, what: str, step: int, path: str) -> None:
        self._run.counts[f"{what}s"] += 1
        self._run.done_at[what] = time.time()
        self._run.last[what] = step, path

    def failed(self, what: str, text: str) -> None:
        self._run.counts[f"{what}_failures"] += 1
        self._run.errors.note(text, where=what)
        self._to.failed(what, text)

    def bad_row(self, *, where: str, why: str) -> None:
        self._run.errors.note(f"{where}: {why}", where="bad row", level="warning")
        self._to.bad_row(where=where, why=why)

    def note(self, text: str) -> None:
        self._run.errors.note(text, where="note", level="warning")
        self._to.note(text)

    def alert(self, text: str) -> None:
        self._run.errors.note(text, where="guard", level="error" if self._run.trip() else "warning")
        self._to.alert(text)

    def end(self, **values: Any) -> None:
        self._run.values = values
        self._run.ended = values["why"]
        self._to.end(**values)
