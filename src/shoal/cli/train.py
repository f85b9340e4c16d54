"""`shoal train`: train a click model on files and streams, configured by a TOML file and flags."""

from __future__ import annotations

import os
import re
import signal
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.cli.shared.arguments import parse
from shoal.errors import ConfigError, UsageError

_ABOUT = """Train a click model on Criteo TSV, CSV, JSON, Parquet, TFRecord or example records, from files or streams.

For example, to try it (the first command writes data and try/criteo.toml; after Ctrl-C, run the second to resume):
  shoal train --init try
  shoal train try/criteo.toml

On your data; on two ranks; with parameter servers:
  shoal train my.toml --epochs 2 --model dlrm --set table.lr=0.1
  shoal launch -n 2 -m shoal train my.toml
  shoal train my.toml --ps 10.0.0.1:7100 10.0.0.2:7100

With a separate table for one feature, wider and with another optimizer; with rows in GPU memory:
  shoal train my.toml --set table.features.user.dim=64 table.features.user.optimizer=adam
  shoal train my.toml --device cuda --set table.device=cuda

On past files and then a stream, forever (SIGTERM saves a checkpoint and exits; run it again to resume exactly):
  shoal train my.toml --train 'days/*.parquet' 'kafka://broker:9092/clicks?group=ctr&from=2026-11-01'

Starting from the rows and weights of an earlier run, as far as they fit:
  shoal train new.toml --init-from old/run

Exit codes: 0 success (for a stream, also after SIGTERM), 1 failed (with --strict, also on a bad row), 2 wrong usage or
configuration, 3 stopped by [serve.guard], 130 interrupted, 143 stopped by SIGTERM (with --out, a checkpoint was written
if training had begun)."""


GUARD_EXIT = 3


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `shoal train`; each overrides a setting of the configuration."""

    config: Path | None = None
    """TOML file with [data], [table], [model], [train], [eval] and [out]; for --generate the file to write."""
    train: tuple[str, ...] | None = None
    """Training data: files (paths, folders, patterns), then live sources: redis://HOST/STREAM,
    kafka://HOST/TOPIC?group=NAME, dir:FOLDER (a folder that grows), - (standard input)."""
    eval: tuple[str, ...] | None = None
    """Files to evaluate on."""
    format: str | None = None
    """criteo, csv, tsv, json, parquet, tfrecord, example or example_batch."""
    model: str | None = None
    """deepfm, dlrm, dcn, two_tower, or your own package.module:Class."""
    epochs: int | None = None
    """Passes over the files."""
    batch_size: int | None = None
    """Samples per step on each rank."""
    max_steps: int | None = None
    """Stop after this many steps."""
    lr: float | None = None
    """Learning rate of the dense part; set that of rows with --set table.lr=…"""
    dim: int | None = None
    """Columns of a row."""
    seed: int | None = None
    """Seed of weights, rows and sample order."""
    device: str | None = None
    """Device of the dense part: cpu, cuda, cuda:1; set that of rows with --set table.device=…"""
    threads: int | None = None
    """Threads of torch and of the tables; by default all CPUs."""
    staleness: int | None = None
    """Number of steps by which rows are read early, so that reads and updates overlap with the dense part. 0, the
    default, is exact; 1 hides waits for parameter servers and other ranks."""
    sequential: bool = False
    """Read, exchange ids and train one after the other. By default the next batches are prepared while a step
    computes, with bit-identical results."""
    ps: tuple[str, ...] | None = None
    """Addresses of the parameter servers that hold the rows, in shard order; or REGISTRY#GROUP for a group."""
    out: str | None = None
    """Folder for checkpoints; a run resumes from the newest one there."""
    keep: int | None = None
    """Number of checkpoints to keep, in addition to the best one with --patience."""
    checkpoint_steps: int | None = None
    """Steps between checkpoints."""
    log_steps: int | None = None
    """Steps between reports."""
    eval_steps: int | None = None
    """Steps between evaluations; by default at the end of each epoch."""
    patience: int | None = None
    """Stop after this many evaluations without a new best, and end with the best model."""
    tensorboard: str | None = None
    """Folder for TensorBoard logs."""
    metrics: str | None = None
    """host:port of the status page and /metrics, for Prometheus and `shoal top`; port 0 picks a free one, `off` turns
    it off. Default: a free port of 127.0.0.1. Off loopback it needs TLS and tokens: --set out.metrics_tls_cert=…"""
    set: tuple[str, ...] | None = None
    """Any settings: section.name=value, with values as in TOML; can be repeated."""
    strict: bool = False
    """Stop at the first bad row."""
    fresh: bool = False
    """Start from scratch: existing checkpoints in --out are moved to a folder before-DATE there."""
    init_from: str | None = None
    """Start with the rows and weights of another run's checkpoint or folder, as far as they fit; prints what was taken,
    what is new and what was left out."""
    json: bool = False
    """Print one JSON object per line on stdout."""
    init: Path | None = None
    """Write a folder with generated data and a starter configuration."""
    generate: str | None = None
    """criteo:N writes N lines of Criteo-like data to the file CONFIG (.tsv or .tsv.gz)."""


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
    # Set before torch is imported: its idle threads then stop spinning soon and leave the CPUs to the tables' threads.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    flags = parse(Flags, argv, "train", _ABOUT, positional="config")
    if flags.generate is not None:
        return _generate(flags)
    if flags.init is not None:
        return _init(flags)
    from shoal.train.loop.toml import load_config

    if flags.config is None and flags.train is None:
        raise UsageError("CONFIG.toml or --train FILE … must be given; --init DIR writes a first configuration")
    return _train(flags, load_config(flags.config, changes(flags)))


def changes(flags: Flags) -> dict[str, Any]:
    """Return the settings that the flags give, by section.name."""
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
        _Signals(live=bool(config.data.live)) as signals,
        make_reporter(config, ranks.rank, as_json=flags.json) as reporter,
        trainer(
            config,
            ranks=ranks,
            reporter=reporter,
            stop=lambda: bool(signals.received),
            fresh=flags.fresh,
            init_from=flags.init_from,
        ) as one,
    ):
        signals.running = True
        result = one.run()
    if result["why"] == "guard":
        return GUARD_EXIT
    return signals.exit_code() if result["why"] == "interrupted" else 0


class _Signals:
    """Ctrl-C and SIGTERM: the first ends the loop after its step, a second Ctrl-C ends it at once.

    Before ``running`` is set, the first ends the process at once: the trainer may be waiting for its servers.
    """

    def __init__(self, *, live: bool) -> None:
        self.live, self.running = live, False
        self.received: list[int] = []

    def exit_code(self) -> int:
        if self.live and signal.SIGTERM in self.received:
            return 0  # the normal end of a run on a stream
        return 128 + (self.received[0] if self.received else signal.SIGINT)  # another rank may have received the signal

    def _receive(self, number: int, _: Any) -> None:
        repeated = number in self.received  # a launcher may send SIGTERM after the terminal's SIGINT
        self.received.append(number)
        if number == signal.SIGINT and (repeated or not self.running):
            raise KeyboardInterrupt
        if number == signal.SIGTERM and not self.running:
            raise SystemExit(self.exit_code())

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _generate(flags: Flags) -> int:
    from shoal.data.generate import CriteoLike, write_criteo

    found = re.fullmatch(r"criteo:([0-9]+(?:_[0-9]+)*)", flags.generate or "")
    if found is None:
        raise ConfigError(f"--generate must be criteo:N, such as criteo:1000000, got {flags.generate!r}")
    if flags.config is None:
        raise ConfigError("--generate needs the file to write: shoal train --generate criteo:1000000 data.tsv")
    if not flags.config.name.endswith((".tsv", ".tsv.gz")):  # a configuration is not overwritten by mistake
        raise ConfigError(f"--generate must write to a file named .tsv or .tsv.gz, got {str(flags.config)!r}")
    rows = int(found[1])
    size = write_criteo(flags.config, CriteoLike(rows=rows, seed=flags.seed or 0))
    print(f"{flags.config}: {rows:,} lines, {size / 1e6:.1f} MB", file=sys.stderr)
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

# [table.features.C3]        # a separate table for one feature; other settings are as in [table]
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
patience = 0                 # stop after this many evaluations without a new best; 0: never

[out]
dir = "run"                  # checkpoints; run the same command again to resume from the newest
every_steps = 200
log_steps = 50
"""
