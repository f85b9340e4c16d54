"""`shoal train`: a click model on your files, from a TOML file and flags."""

from __future__ import annotations

import os
import signal
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.cli.shared.arguments import parse
from shoal.errors import ConfigError, UsageError

_ABOUT = """Train a model on files of clicks: Criteo TSV, CSV, Parquet, TFRecord or example records.

To try it (the first writes data and try/criteo.toml; after Ctrl-C run the second again to resume):

  shoal train --init try

  shoal train try/criteo.toml

On your data, on two ranks, against parameter servers:

  shoal train my.toml --epochs 2 --model dlrm --set table.lr=0.1

  shoal launch -n 2 -m shoal train my.toml

  shoal train my.toml --ps 10.0.0.1:7100 10.0.0.2:7100

A feature with a table of its own, wider and with another optimizer; rows in GPU memory:

  shoal train my.toml --set table.features.user.dim=64 table.features.user.optimizer=adam

  shoal train my.toml --device cuda --set table.device=cuda

On a history and then a stream, for ever (SIGTERM ends it with a checkpoint; run it again to resume exactly):

  shoal train my.toml --train 'days/*.parquet' 'kafka://broker:9092/clicks?group=ctr&from=2026-11-01'

With the rows and weights of an earlier run, as far as they fit:

  shoal train new.toml --init-from old/run

Exit codes: 0 done (a run on a stream also after SIGTERM), 1 failed (with --strict also a bad row), 2 wrong usage or
configuration, 3 ended by [serve.guard], 130 interrupted, or 143 by SIGTERM (a checkpoint was written if there is an
--out)."""


GUARD_EXIT = 3


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Without a flag the configuration decides."""

    config: Path | None = None
    """TOML file with [data], [table], [model], [train], [eval] and [out]; for --generate the file to write."""
    train: tuple[str, ...] | None = None
    """What to learn from: files (paths, folders, patterns), then sources that never end: redis://HOST/STREAM,
    kafka://HOST/TOPIC?group=NAME, dir:FOLDER (one that grows), - (standard input)."""
    eval: tuple[str, ...] | None = None
    """Files to evaluate on."""
    format: str | None = None
    """criteo, csv, tsv, json, parquet, tfrecord, example or example_batch."""
    model: str | None = None
    """deepfm, dlrm, dcn, two_tower, or package.module:Class of yours."""
    epochs: int | None = None
    """Passes over the files."""
    batch_size: int | None = None
    """Samples of a step, on each rank."""
    max_steps: int | None = None
    """End after so many steps."""
    lr: float | None = None
    """Of the dense part; that of the rows is --set table.lr=…"""
    dim: int | None = None
    """Width of a row."""
    seed: int | None = None
    """Of weights, rows and order."""
    device: str | None = None
    """Where the dense part computes: cpu, cuda, cuda:1; rows are where --set table.device=… says."""
    threads: int | None = None
    """Of torch and of the tables; by default all CPUs."""
    staleness: int | None = None
    """Steps by which rows are read early, so that reads and updates are made beside the dense part; 0, the default, is
    exact, and 1 hides waits for parameter servers and other ranks."""
    sequential: bool = False
    """Read, exchange ids and learn one after the other. By default the next batches are made ready while a step
    computes, with the same results, to the last bit."""
    ps: tuple[str, ...] | None = None
    """Parameter servers that hold the rows, in the order of their shards; REGISTRY#GROUP for those of a group."""
    out: str | None = None
    """Folder for checkpoints; a run that finds one there resumes from it."""
    keep: int | None = None
    """Checkpoints that stay, besides the best one where there is a --patience."""
    checkpoint_steps: int | None = None
    """Steps between checkpoints."""
    log_steps: int | None = None
    """Steps between reports."""
    eval_steps: int | None = None
    """Steps between evaluations; by default at the end of each epoch."""
    patience: int | None = None
    """Stop after so many evaluations without a new best, and end with the best model."""
    tensorboard: str | None = None
    """Folder for TensorBoard."""
    metrics: str | None = None
    """host:port of the status page and /metrics, for Prometheus and `shoal top`; port 0 takes a free one, `off` none.
    By default it is on a free port of 127.0.0.1. Elsewhere it needs TLS and tokens: --set out.metrics_tls_cert=…"""
    set: tuple[str, ...] | None = None
    """Any settings: section.name=value, values as in TOML; as often as you like."""
    strict: bool = False
    """End at the first bad row."""
    fresh: bool = False
    """Begin anew: checkpoints that are in --out are moved into a folder before-DATE there."""
    init_from: str | None = None
    """A checkpoint of another run, or its folder, whose rows and weights this one begins with as far as they fit. It
    says what was taken, what is new and what was left out."""
    json: bool = False
    """One JSON object a line on stdout, for machines."""
    init: Path | None = None
    """Write a folder with generated data and a configuration to begin with."""
    generate: str | None = None
    """criteo:N writes N lines of Criteo-like data to CONFIG (a .tsv or .tsv.gz)."""


_WHERE = {
    "train": "data.train", "eval": "data.eval", "format": "data.format", "model": "model.name",
    "epochs": "train.epochs", "batch_size": "train.batch_size", "max_steps": "train.max_steps", "lr": "train.lr",
    "dim": "table.dim", "seed": "train.seed", "device": "train.device", "threads": "train.threads", "ps": "train.ps",
    "staleness": "train.staleness",
    "out": "out.dir", "keep": "out.keep", "checkpoint_steps": "out.every_steps", "log_steps": "out.log_steps",
    "eval_steps": "eval.every_steps", "patience": "eval.patience", "tensorboard": "out.tensorboard",
    "metrics": "out.metrics",
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Runs the command."""
    # Before torch is imported: its idle threads then spin for a moment only and leave the CPUs to the tables' threads.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    flags = parse(Flags, argv, "train", _ABOUT, positional="config")
    if isinstance(flags, int):
        return flags
    if flags.generate is not None:
        return _generate(flags)
    if flags.init is not None:
        return _init(flags)
    from shoal.train.loop.toml import load_config

    if flags.config is None and flags.train is None:
        raise UsageError("what to train on? Give a CONFIG.toml or --train FILE …; --init DIR writes a first one")
    return _train(flags, load_config(flags.config, changes(flags)))


def changes(flags: Flags) -> dict[str, Any]:
    """What the flags say, by section and name."""
    given = {_WHERE[name]: getattr(flags, name) for name in _WHERE if getattr(flags, name) is not None}
    if flags.strict:
        given["train.strict"] = True
    if flags.sequential:
        given["train.pipeline"] = False
    for one in flags.set or ():
        key, equals, text = one.partition("=")
        if not equals:
            hint = "; a configuration must come before --set" if one.endswith(".toml") else ""
            raise ConfigError(f"--set must be section.name=value, such as table.lr=0.1, got {one!r}{hint}")
        try:
            given[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            given[key.strip()] = text  # a bare text needs no quotes on the command line
    return given


def _train(flags: Flags, config: Any) -> int:
    from shoal.cli.train_console import make_reporter
    from shoal.comm.ranks.torch_ranks import start_ranks
    from shoal.train.loop.trainer import trainer

    if config.out.metrics is None:
        config = replace(config, out=replace(config.out, metrics="127.0.0.1:0"))
    ranks = start_ranks()
    with (
        _signals() as stop,
        make_reporter(config, ranks.rank, as_json=flags.json) as reporter,
        trainer(
            config,
            ranks=ranks,
            reporter=reporter,
            stop=lambda: bool(stop),
            fresh=flags.fresh,
            init_from=flags.init_from,
        ) as one,
    ):
        result = one.run()
    if result["why"] == "guard":
        return GUARD_EXIT
    if result["why"] != "interrupted" or (config.data.live and signal.SIGTERM in stop):
        return 0  # a run that never ends by itself was told to
    return 128 + (stop[0] if stop else signal.SIGINT)  # it may have been another rank that was asked


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The first Ctrl-C (or SIGTERM) asks the loop to end after its step; a second Ctrl-C ends at once."""
    got: list[int] = []

    def ask(number: int, _: Any) -> None:
        if number == signal.SIGINT and number in got:  # a launcher may send SIGTERM behind the terminal's SIGINT
            raise KeyboardInterrupt
        got.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _generate(flags: Flags) -> int:
    from shoal.data.generate import CriteoLike, write_criteo

    kind, _, rows = (flags.generate or "").partition(":")
    if kind != "criteo" or not rows.replace("_", "").isdigit():
        raise ConfigError(f"--generate must be criteo:N, such as criteo:1000000, got {flags.generate!r}")
    if flags.config is None:
        raise ConfigError("--generate needs the file to write: shoal train --generate criteo:1000000 data.tsv")
    size = write_criteo(flags.config, CriteoLike(rows=int(rows), seed=flags.seed or 0))
    print(f"{flags.config}: {int(rows):,} lines, {size / 1e6:.1f} MB", file=sys.stderr)
    return 0


def _init(flags: Flags) -> int:
    from shoal.data.generate import CriteoLike, write_criteo

    folder = flags.init
    assert folder is not None
    target, (train, held) = folder / "criteo.toml", INIT_ROWS
    if target.exists():
        raise ConfigError(f"--init: {target} exists already; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_criteo(folder / "train.tsv", CriteoLike(rows=train, seed=1))
        write_criteo(folder / "eval.tsv", CriteoLike(rows=held, seed=1, first_row=train))
        target.write_text(STARTER)
    except OSError as error:
        raise ConfigError(f"--init: cannot write to {str(folder)!r} ({error.strerror or error})") from None
    print(f"Wrote {train + held:,} lines of clicks and {target}. Next:\n\n  shoal train {target}\n", file=sys.stderr)
    return 0


INIT_ROWS = (400_000, 40_000)
STARTER = """\
# shoal train criteo.toml
# Paths are relative to this file. Every setting: docs/training.md.

[data]
format = "criteo"            # or csv, tsv, json, parquet, tfrecord, example, example_batch
train = ["train.tsv"]        # paths, folders, patterns; .gz too
eval = ["eval.tsv"]
shuffle_rows = 65536

[table]                      # one row per distinct category, made when it is first seen
dim = 16
optimizer = "adagrad"
lr = 0.02
# device = "cuda"            # rows in GPU memory; with device = "cuda" in [train], too

# [table.features.C3]        # a table of its own for one feature; what is not set is as in [table]
# optimizer = "adam"         # also dim, lr, combiner, initializer, expire_after, admit_after, table
# lr = 0.002

[model]
name = "deepfm"              # or dlrm, dcn, two_tower, package.module:Class
hidden = [256, 128]

[train]
epochs = 1
batch_size = 1024
lr = 0.001

[eval]
patience = 0                 # stop after so many evaluations without a new best

[out]
dir = "run"                  # checkpoints; run the same command again to resume from the newest
every_steps = 200
log_steps = 50
"""
