"""Write exports of a model for `shoal serve`, with rows from this process, other ranks or servers."""

from __future__ import annotations

import base64
import copy
import inspect
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.comm.ranks.ranks import Ranks
from shoal.durable import Draft, Series, file_bases
from shoal.errors import ConfigError
from shoal.serving.export.features import OUTPUTS, ServedFeatures
from shoal.serving.export.manifest import Manifest, TableSpec, TensorSpec
from shoal.serving.export.plan import free_second
from shoal.serving.export.tables import serving_config
from shoal.serving.export.trace import describe, export_program
from shoal.serving.server.servable import Servable, TableView
from shoal.serving.server.table_signatures import table_signatures
from shoal.stamps import Stamp
from shoal.table.checkpoint import naming
from shoal.table.config.messages import FloatCompressorConfig
from shoal.train.loop.rows.exported import ExportedRows


def write_export(
    base: str,
    *,
    model_name: str,
    net: nn.Module,
    features: ServedFeatures,
    tables: Sequence[ExportedRows],
    ranks: Ranks,
    step: int,
    stamps: Callable[[], Mapping[str, Stamp]],
    codec: str = "float32",
    keep: int | None = None,
    compiled: bool = False,
) -> str:
    """Write a version into the folder ``base``; return its path. All ranks must call it together.

    The version gets its name once it is complete. ``stamps`` is called before the rows are read. Only the newest
    ``keep`` versions in the folder are kept. With ``compiled``, the net is also compiled with AOTInductor if there is a
    compiler.

    Raises:
        OSError: a rank could not write; every rank raises, and the new version is removed.
        ConfigError: the net cannot be exported; the message gives the reason.
    """
    target = ranks.from_first(os.path.join(base, str(free_second(Path(base)))) if ranks.first else None)
    draft = Draft(target, ranks.from_first(os.urandom(8).hex() if ranks.first else None))
    counts = ranks.gather([naming.shard_count(-1, 0 if one.pages else one.table.size()) for one in tables])
    each = [max(of_table) for of_table in zip(*counts, strict=True)]
    bases = file_bases(one.name for one in tables)
    assets = os.path.join(draft.path, "assets")

    def begin() -> dict[str, Any]:
        if not ranks.first:
            return {}
        draft.begin()
        os.mkdir(assets)
        return {"stamps": dict(stamps()), "read_at": time.time()}

    def write() -> list[Any]:
        return [one.write(assets, bases[one.name], ranks, count) for one, count in zip(tables, each, strict=True)]

    def publish() -> None:
        if not ranks.first:
            return
        rows = [sum(part[place]["rows"] for part in written) for place in range(len(tables))]
        digests = {
            os.path.join("assets", name): digest for part in written for of_table in part
            for name, digest in of_table["files"].items()
        }  # fmt: skip
        manifest = _manifest(Path(draft.path), int(os.path.basename(target)), model_name, net, features, step, compiled)
        manifest.tables = [_spec(one, bases[one.name], count, codec) for one, count in zip(tables, rows, strict=True)]
        views = [TableView(one.empty()) for one in tables]
        pushes = table_signatures(views, lambda: Servable({}))
        manifest.signatures |= {key: made.spec for key, made in pushes.items() if made.push}
        manifest.stamps = {name: Stamp(*stamp) for name, stamp in begun["stamps"].items()}
        manifest.rows_read_at = begun["read_at"]
        draft.seal(manifest.fields(), digests)
        draft.publish()
        if keep is not None:
            prune_exports(base, keep)

    try:
        begun = ranks.together(begin)[0]
        written = ranks.together(write)
        ranks.together(publish)
    except BaseException:
        if ranks.first:
            draft.discard()
        raise
    return target


def _manifest(
    directory: Path, version: int, model_name: str, net: nn.Module, features: ServedFeatures, step: int, compiled: bool
) -> Manifest:
    """Write the files of the net and the vocabularies; return the manifest that describes them."""
    names = _forward_names(net)
    schema = features.schema
    equal = len({one.dim for one in features.pooling.values()}) <= 1
    equal = equal and all(one.max_length == 1 for one in features.pooling.values())
    widths = [one.dim * one.max_length for one in features.pooling.values()]
    rows = torch.zeros((2, len(widths), widths[0]) if equal and widths else (2, sum(widths)), device="cpu")
    arguments = dict(zip(names, (torch.zeros(2, len(schema.dense), device="cpu"), rows), strict=True))
    any_size = torch.export.Dim.AUTO
    own = copy.deepcopy(net).to("cpu")
    found = export_program(
        own, arguments, {name: {0: any_size} for name in names}, directory / "variables" / "program.pt2",
        compiled=compiled,
    )  # fmt: skip
    outputs = dict.fromkeys(OUTPUTS, TensorSpec("float", [None]))
    program = describe({}, list(OUTPUTS), compiled=found.compiled) | {"net_inputs": list(names)}
    return Manifest(
        model_name=model_name, sub_graph="standalone", version=version, global_step=step, program=program,
        signatures=features.signatures(outputs, found.row_wise), features=features.write(directory),
    )  # fmt: skip


def _forward_names(net: nn.Module) -> tuple[str, str]:
    """The names of the net's inputs: its numbers and its rows."""
    named = [
        one.name for one in inspect.signature(net.forward).parameters.values()
        if one.kind in (one.POSITIONAL_OR_KEYWORD,)
    ]  # fmt: skip
    if len(named) < 2:
        raise ConfigError(
            f"model {type(net).__name__}: forward must name its two arguments, the numbers and the rows, to be exported"
        )
    return named[0], named[1]


def _spec(one: ExportedRows, base: str, rows: int, codec: str) -> TableSpec:
    config = serving_config(one.empty().table_config, compressor(codec))
    config.initial_capacity = max(1, rows)
    return TableSpec(
        name=one.name, kind="hash", sub_tables=[], dims=[one.dim], asset_prefix=base, asset_dir="assets",
        slots={one.name: one.name}, configs=[base64.b64encode(config.SerializeToString()).decode()],
    )  # fmt: skip


def compressor(codec: str) -> FloatCompressorConfig:
    """The compressor of rows that ``[serve] codec`` names."""
    kind, _, number = codec.partition(":")
    made = FloatCompressorConfig()
    if kind == "half":
        made.fp16.SetInParent()
    elif kind == "fixed_r8":
        made.fixed_r8.r = float(number)
    elif kind == "one_bit":
        made.one_bit.amplitude = float(number)
    else:
        made.fp32.SetInParent()
    return made


def prune_exports(base: str, keep: int) -> list[str]:
    """Remove all versions but the newest ``keep``; return the removed ones."""
    return Series(base, "", 1).prune(keep)


def remove_drafts(base: str) -> None:
    """Remove incomplete versions left by a killed process."""
    if os.path.isdir(base):
        with os.scandir(base) as entries:
            for entry in entries:
                if entry.name.startswith(".tmp-") and entry.name.split("-")[1].isdecimal():
                    shutil.rmtree(entry.path, ignore_errors=True)
