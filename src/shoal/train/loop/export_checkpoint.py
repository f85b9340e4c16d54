"""Export a checkpoint without the run that wrote it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from shoal.comm.ranks.ranks import SingleRank
from shoal.durable import MANIFEST, Saved, read_folder
from shoal.errors import ConfigError, DataError
from shoal.models.build import build_model
from shoal.models.inputs import Inputs
from shoal.serving.export.features import ServedFeatures
from shoal.sharded.ps.reshard import kept_checkpoints
from shoal.sharded.ps.server.checkpoint import Checkpoint
from shoal.stamps import Stamp
from shoal.table.checkpoint import restore_table
from shoal.table.checkpoint.chain import checkpoints_of
from shoal.table.checkpoint.manifest import Manifest
from shoal.table.config.optim import Sgd
from shoal.table.table import HashTable
from shoal.train.loop.checkpoint import load_model
from shoal.train.loop.export import write_export
from shoal.train.loop.rows.exported import ExportedRows


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    out: str,
    *,
    model: str | None = None,
    codec: str = "float32",
    ps_dirs: Sequence[str] = (),
    compiled: bool = False,
) -> str:
    """Write a version for `shoal serve` from a checkpoint of `shoal train`; return its path.

    Args:
        checkpoint: a folder ``ckpt-…``, or the folder of a run, whose newest complete checkpoint is used.
        out: the folder of the versions.
        model: the name that servers and clients use, by default that of ``out``.
        codec: how replicas store rows, as in ``[serve] codec``.
        ps_dirs: for a run with parameter servers, the folders (``shoal ps --dir``) where these keep its rows.
        compiled: also compile the net with AOTInductor if there is a compiler.

    Raises:
        ConfigError: there is no such checkpoint, or it does not have everything that an export needs.
        DataError: the checkpoint is damaged; nothing is written.
    """
    saved = _find(os.fspath(checkpoint))
    manifest = Manifest.of(saved)
    content = manifest.content
    if not isinstance(content.get("identity"), dict):
        raise ConfigError(f"{saved.folder} was not written by `shoal train`")
    if "served" not in content:
        raise ConfigError(
            f"{saved.folder} was written by an earlier version and does not describe its features; resume from it with "
            "`shoal train` and [serve] dir to export it"
        )
    features = ServedFeatures.read(content["served"], Path(saved.folder))
    progress = content["progress"]
    stamp = Stamp(int(progress.get("run", 0)), manifest.step + int(progress.get("other_changes", 0)))
    kept = _kept(saved, content.get("servers"), ps_dirs)
    if kept:
        dims = {one.table: one.dim for one in features.pooling.values()}
        tables = [ExportedRows(_rows_of_servers(kept, table, dim)) for table, dim in dims.items()]
    else:
        tables = [ExportedRows(_rows(saved, described)) for described in content["tables"]]
    sources = {f"ps_{one['shard']}": Stamp(int(one.fields.get("run", 0)), one["version"]) for one in kept}
    return write_export(
        out,
        model_name=model or os.path.basename(os.path.abspath(out)),
        net=_net(saved, content["identity"]["model"], features),
        features=features,
        tables=tables,
        ranks=SingleRank(),
        step=manifest.step,
        stamps=lambda: {"trainer": stamp, **sources},
        codec=codec,
        compiled=compiled,
    )


def _find(path: str) -> Saved:
    if os.path.isfile(os.path.join(path, MANIFEST)):
        return read_folder(path)
    if not os.path.isdir(path):
        raise ConfigError(f"there is no checkpoint {path!r}; pass a folder ckpt-… or the folder of a run")
    whole = checkpoints_of(path).whole()
    if not whole:
        raise ConfigError(f"{path!r} has no complete checkpoint; pass a folder ckpt-… or the folder of a run")
    found = whole[-1].saved
    assert found is not None
    return found


def _kept(saved: Saved, servers: dict[str, Any] | None, folders: Sequence[str]) -> list[Checkpoint]:
    """The parameter servers' checkpoints with the rows of ``saved``, by shard; empty if ``saved`` has the rows."""
    if servers is None:
        if folders:
            raise ConfigError(f"{saved.folder} contains its rows; leave out --ps-dir")
        return []
    if servers.get("kept") is None:
        raise ConfigError(
            f"{saved.folder} has no rows, because they were on parameter servers without --dir; export from the run "
            "instead, with [serve] dir"
        )
    if not folders:
        raise ConfigError(
            f"{saved.folder} has no rows, because parameter servers keep them ({', '.join(servers['addresses'])}); "
            "pass the folders that these were started with: --ps-dir DIR"
        )
    return kept_checkpoints(folders, servers["kept"])


def _rows_of_servers(kept: Sequence[Checkpoint], name: str, dim: int) -> HashTable:
    """The weights of a table from all shards."""
    table = HashTable(dim, optimizer=Sgd(), initializer="zeros", name=name)
    parts = [one for one in kept if name in one.tables]
    for part in parts:
        part.verify(name)
    if parts:
        restore_table(table, [str(part.path / part.tables[name]["file"]) for part in parts], False)
    return table


def _net(saved: Saved, model: dict[str, Any], features: ServedFeatures) -> nn.Module:
    inputs = Inputs(
        dense=features.schema.dense, sparse=features.schema.sparse,
        dims=tuple(one.dim for one in features.pooling.values()),
        lengths=tuple(one.max_length for one in features.pooling.values()),
    )  # fmt: skip
    net = build_model(model["name"], inputs, model["options"])
    load_model(saved, net)
    return net


def _rows(saved: Saved, described: dict[str, Any]) -> HashTable:
    """The weights of a table, without optimizer state."""
    try:
        table = HashTable(int(described["dim"]), optimizer=Sgd(), initializer="zeros", name=described["name"])
        base = os.path.join(saved.folder, described["file"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{saved.manifest} was not written by `shoal train` ({error!r})") from error
    restore_table(table, base, False, saved=saved)
    return table
