"""`shoal export`: a checkpoint of `shoal train` as a version that `shoal serve` serves."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from shoal.cli.shared.arguments import parse
from shoal.errors import UsageError

_ABOUT = """Write a version for `shoal serve` from a checkpoint of `shoal train`. For example:

  shoal export run/ckpt-0001000 --out exports/ctr

  shoal export run --out exports/ctr --model clicks

  shoal export run --out exports/ctr --ps-dir /srv/ps         (its rows were on parameter servers)

  shoal serve exports/ctr

A run exports its model itself with [serve] dir = "exports/ctr". The version takes raw features and ids.

Exit codes: 0 done, 1 the checkpoint is damaged or the version could not be written, 2 wrong usage."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    checkpoint: str | None = None
    """A folder ckpt-..., or the folder of a run: its newest checkpoint."""
    out: str | None = None
    """Folder of the versions; its name is that of the model."""
    model: str | None = None
    """Another name of the model."""
    codec: str = "float32"
    """How replicas store rows: float32, half, fixed_r8:R or one_bit:A."""
    keep: int | None = None
    """Versions that stay in the folder, the newest ones; by default all."""
    ps_dir: tuple[str, ...] = ()
    """Of a run with parameter servers: the folders (`shoal ps --dir`) where these keep its rows."""
    compiled: bool = False
    """Compile the net with AOTInductor, too, where there is a C++ compiler; `shoal serve --compiled` runs it."""
    json: bool = False
    """One JSON object on stdout."""


def main(argv: list[str]) -> int:
    """Runs the command."""
    flags = parse(Flags, argv, "export", _ABOUT, positional="checkpoint")
    if isinstance(flags, int):
        return flags
    if flags.checkpoint is None or flags.out is None:
        raise UsageError("what to export, and where to? Use shoal export CHECKPOINT --out DIR")
    from shoal.train.loop.export import prune_exports
    from shoal.train.loop.export_checkpoint import export_checkpoint
    from shoal.train.loop.serve_config import ServeConfig

    serve = ServeConfig(dir=flags.out, model=flags.model, codec=flags.codec, keep=flags.keep or 1)
    path = export_checkpoint(
        flags.checkpoint, flags.out, model=serve.name, codec=serve.codec, ps_dirs=flags.ps_dir, compiled=flags.compiled
    )
    if flags.keep is not None:
        prune_exports(flags.out, serve.keep)
    if flags.json:
        print(json.dumps({"path": path, "model": serve.name}))
    else:
        print(f"Wrote {path}. Next:\n\n  shoal serve {flags.out}\n", file=sys.stderr)
    return 0
