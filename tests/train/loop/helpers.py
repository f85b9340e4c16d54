"""Helpers for the tests of the trainer: a small run in this process, and its reports."""

import resource
from contextlib import contextmanager

from shoal.train.loop.measure.reporter import Reporter
from shoal.train.loop.trainer import trainer
from shoal.trainer import load_config

SMALL = {
    "model.hidden": [4], "data.shuffle_rows": 1024, "table.dim": 2, "train.batch_size": 128, "train.threads": 1,
    "data.prefetch": 0, "out.every_s": 0.0, "out.auc_window": 1000,
}  # fmt: skip


class Told(Reporter):
    """Remembers what a run says; ``on_step`` is called after every step."""

    def __init__(self, on_step=lambda step: None):
        self.notes, self.saves, self.evaluations, self.ended = [], [], [], None
        self._on_step = on_step

    def tick(self, *, step, epoch, samples):
        self._on_step(step)

    def evaluated(self, **values):
        self.evaluations.append(values)

    def saved(self, *, step, path, seconds):
        self.saves.append(step)

    def note(self, text):
        self.notes.append(text)

    def end(self, **values):
        self.ended = values


def settings(data, out=None, **more):
    """A configuration; names have ``_dot_`` for a dot."""
    given = SMALL | {"data.train": [str(data / "train.tsv")]}
    if out is not None:
        given["out.dir"] = str(out)
    return load_config(None, given | {name.replace("_dot_", "."): value for name, value in more.items()})


def run(config, told=None, **options):
    """Trains to the end; what was said."""
    told = told or Told()
    with trainer(config, reporter=told, **options) as one:
        one.run()
    return told


def open_run(config, **options):
    """A trainer as it is before its first step, and what it said."""
    told = Told()
    return trainer(config, reporter=told, **options), told


@contextmanager
def file_limit():
    """A function that limits the size of files which this process writes, as a full disk would; None lifts it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))

    try:
        yield limit
    finally:
        limit(None)


def folders(out):
    return sorted(path.name for path in out.iterdir())
