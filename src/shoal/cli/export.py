"""`shoal export`: turn a `shoal train` checkpoint into a version for `shoal serve`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from shoal.cli.shared.arguments import parse
from shoal.errors import UsageError

_ABOUT = """Turn a `shoal train` checkpoint into a version for `shoal serve`. For example:

  shoal export run/ckpt-0001000 --out exports/ctr
  shoal export run --out exports/ctr --model clicks
  shoal export run --out exports/ctr --ps-dir /srv/ps         # rows on parameter servers
  shoal serve exports/ctr

With [serve] dir = "exports/ctr" in its configuration, a run exports by itself. The served model accepts raw features
and ids.

Exit codes: 0 success, 1 the checkpoint is damaged or the version could not be written, 2 wrong usage."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    checkpoint: str | None = None
    """A ckpt-... folder, or the folder of a run for its newest checkpoint."""
    out: str | None = None
    """Folder for the versions; its name becomes the model's name."""
    model: str | None = None
    """The model's name, if not that of the folder."""
    codec: str = "float32"
    """How replicas store rows: float32, half, fixed_r8:R or one_bit:A."""
    keep: int | None = None
    """Number of newest versions to keep in the folder; all by default."""
    ps_dir: tuple[str, ...] = ()
    """For a run with parameter servers: the folders (`shoal ps --dir`) that hold its rows."""
    compiled: bool = False
    """Also compile the net with AOTInductor, which needs a C++ compiler; `shoal serve --compiled` runs it."""
    json: bool = False
    """Print one JSON object on stdout."""


def main(argv: list[str]) -> int:
    flags = parse(Flags, argv, "export", _ABOUT, positional="checkpoint")
    if flags.checkpoint is None or flags.out is None:
        raise UsageError("CHECKPOINT and --out must both be given: shoal export CHECKPOINT --out DIR")
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
