"""The signatures of an embedding shard: lookups of rows, and pushes of fresh ones."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.serving.export.manifest import SignatureSpec, TensorSpec
from shoal.serving.server.hand_over import DROPPED, count_rows, place_of
from shoal.serving.server.rounds import Rounds, Rows
from shoal.serving.server.servable import Servable, Signature, TableView, Tensors, as_views
from shoal.serving.status import StatusError, invalid_argument
from shoal.serving.sync.push import CODEC, VERSION, PushInfo, push_info
from shoal.serving.sync.quantize import (
    asked,
    asked_multi,
    check_codecs,
    decode,
    decode_multi,
    fingerprint,
    multi_bytes,
    wire_dtype,
)
from shoal.table.config.messages import EntryConfig

SERVING = EntryConfig.SERVING


def table_signatures(views: Sequence[TableView], owner: Callable[[], Servable]) -> dict[str, Signature]:
    """An embedding shard's signatures: ``lookup``, ``raw_lookup``, ``hashtable_assign``, ``<mtable>/raw_assign``."""
    signatures: dict[str, Signature] = {}
    slots = {alias: (view, view.sub_tables.index(sub)) for view in views for alias, sub in view.slots.items()}
    if slots:
        spec = SignatureSpec(
            {alias: TensorSpec("int64", [None]) for alias in slots},
            {alias: TensorSpec("float", [None, view.dims[number]]) for alias, (view, number) in slots.items()},
        )

        def lookup(inputs: Tensors) -> Tensors:
            return {alias: view.lookups[number](inputs[alias]) for alias, (view, number) in slots.items()}

        signatures["lookup"] = Signature(spec, lookup)
    if singles := [view for view in views if not view.multi]:
        signatures["hashtable_assign"] = _assign_signature(singles, owner)
    for view in views:
        if view.multi:
            signatures[f"{view.name}/raw_assign"] = _raw_assign_signature(view, owner)
            signatures["raw_lookup"] = _raw_lookup_signature(view)
    return signatures


def _apply(owner: Callable[[], Servable], work: Sequence[Rows]) -> None:
    """Hold the rows of one push for their round, or write them at once if the sender does not use rounds.

    Rows written at once also go to the version that is about to replace this one.
    """
    servable, info = owner(), push_info.get()
    for view, number, _, values in work:  # before any of them is written
        if values is not None and view.refuses(number, values):
            name = view.sub_tables[number]
            raise invalid_argument(
                f"table {name!r}: pushed values must be finite, got NaN or infinity; nothing was written"
            )
    if info.round:
        servable.rounds.stage(info, work)
        return
    if info.deleted:
        raise invalid_argument("deletions must be part of a round")
    read_at = info.read_at or time.time()
    with servable.push_lock:
        for view, number, ids, values in work:
            if len(ids) and values is not None:
                view.assign_sub(number, ids, values, read_at)
        if servable.successor is not None:
            for view, number, ids, values in work:
                where, into = place_of(servable.successor, view, number)
                if into is None:
                    count_rows(view.name, DROPPED, len(ids))  # the version switch has reported it
                elif len(ids) and values is not None:
                    into.assign_sub(where, ids, values, read_at)
    servable.refreshed(read_at)
    rows: dict[str, int] = {}
    for view, _, ids, _ in work:
        rows[view.name] = rows.get(view.name, 0) + len(ids)
    for name, count in rows.items():
        servable.tables[name].count_push(count, info.touched_at)
    info.record(servable.version, rows=sum(rows.values()))


def _check(owner: Callable[[], Servable], codecs: Mapping[str, str], inputs: Tensors) -> PushInfo:
    """The push's metadata; a push for another version is refused, with the expected values."""
    info = push_info.get()
    if info.round:
        owner().rounds.expect(info)
    try:
        check_codecs(codecs, inputs, info.codec)
    except StatusError as error:
        error.metadata = ((CODEC, fingerprint(codecs)), (VERSION, str(owner().version)))
        raise
    return info


def _assign_signature(views: Sequence[TableView], owner: Callable[[], Servable]) -> Signature:
    spec = SignatureSpec()
    accepts: dict[str, tuple[str, ...]] = {}
    codecs: dict[str, str] = {}
    hints: dict[str, str] = {}
    for view in views:
        spec.inputs[f"{view.name}_id"] = TensorSpec("int64", [None])
        spec.inputs[f"{view.name}_value"] = TensorSpec("float", [None, view.dims[0]])
        spec.outputs[f"{view.name}_result"] = TensorSpec("int32", [])
        codec = codecs[view.name] = (
            asked(view.configs()[0]) if view.configs()[0].entry_config.entry_type == SERVING else ""
        )
        if codec:
            accepts[f"{view.name}_value"] = (wire_dtype(codec),)
            hints[f"{view.name}_value"] = codec

    def assign(inputs: Tensors) -> Tensors:
        info = _check(owner, hints, inputs)
        work: list[Rows] = []
        for view in views:
            ids, values = inputs[f"{view.name}_id"], inputs[f"{view.name}_value"]
            wanted = 0 if info.deleted else len(ids)
            if len(values) != wanted:
                ids_are = "ids to delete" if info.deleted else "ids"
                raise invalid_argument(
                    f"table {view.name!r}: values must have {wanted} rows for {len(ids)} {ids_are}, got {len(values)}"
                )
            work.append((view, 0, ids, None if info.deleted else decode(codecs[view.name], values)))
        _apply(owner, work)
        return {
            f"{view.name}_result": torch.tensor(len(ids), dtype=torch.int32, device="cpu") for view, _, ids, _ in work
        }

    tables = [(view.name, view.dims[0]) for view in views]
    return Signature(spec, assign, push=True, accepts=accepts, hints=hints, tables=tables)


def _splits(view: TableView, ids: torch.Tensor, splits: torch.Tensor, repeats: bool) -> None:
    count = len(view.sub_tables)
    length = len(splits) - 1
    if length < 0 or length % count or (length != count and not repeats):
        raise invalid_argument(
            f"multi-table {view.name!r}: id_split must have {count + 1} entries for {count} tables, got {len(splits)}"
        )
    if splits[0] != 0 or splits[-1] != len(ids) or bool((splits[1:] < splits[:-1]).any()):
        raise invalid_argument(
            f"multi-table {view.name!r}: id_split must rise from 0 to the {len(ids)} ids, got {splits[:8].tolist()}"
        )


def _raw_lookup_signature(view: TableView) -> Signature:
    spec = SignatureSpec(
        {"id": TensorSpec("int64", [None]), "id_split": TensorSpec("int64", [None])},
        {"flat_emb": TensorSpec("float", [None])},
    )

    def raw_lookup(inputs: Tensors) -> Tensors:
        _splits(view, inputs["id"], inputs["id_split"], repeats=True)
        given = (inputs["id"].to(view.device), inputs["id_split"])
        return {"flat_emb": view.table.raw_lookup(given).cpu()}

    return Signature(spec, raw_lookup)


def _raw_assign_signature(view: TableView, owner: Callable[[], Servable]) -> Signature:
    spec = SignatureSpec(
        {
            "id": TensorSpec("int64", [None]),
            "id_split": TensorSpec("int64", [None]),
            "flat_value": TensorSpec("float", [None]),
        },
        {"result": TensorSpec("int32", [])},
    )
    dims = torch.tensor(view.dims, device="cpu")
    stored = all(config.entry_config.entry_type == SERVING for config in view.configs())
    codecs = asked_multi(view.configs()) if stored else ""

    def raw_assign(inputs: Tensors) -> Tensors:
        ids, splits, flat = inputs["id"], inputs["id_split"], inputs["flat_value"]
        _splits(view, ids, splits, repeats=False)
        info = push_info.get()
        if info.round:
            owner().rounds.expect(info)
        counts = splits[1:] - splits[:-1]
        if info.deleted:
            if len(flat):
                raise invalid_argument(f"multi-table {view.name!r}: deletions must have no values, got {len(flat)}")
            _apply(owner, [(view, number, part, None) for number, part in enumerate(ids.split(counts.tolist()))])
            return {"result": torch.tensor(0, dtype=torch.int32, device="cpu")}
        sizes = (counts * dims).tolist()
        packed = flat.dtype == torch.uint8
        need = sum(multi_bytes(codecs, sizes) if packed else sizes)
        if need != len(flat):
            unit = "bytes" if packed else "values"
            raise invalid_argument(
                f"multi-table {view.name!r}: flat_value must have {need} {unit} for these ids, got {len(flat)}"
            )
        if packed:
            _check(owner, {"flat_value": codecs}, inputs)
            flat = decode_multi(codecs, sizes, flat)
        rows = zip(ids.split(counts.tolist()), flat.split(sizes), view.dims, strict=True)
        _apply(owner, [(view, number, part, values.view(-1, dim)) for number, (part, values, dim) in enumerate(rows)])
        return {"result": torch.tensor(0, dtype=torch.int32, device="cpu")}

    accepts = {"flat_value": ("uint8",)} if codecs else None
    hints = {"flat_value": codecs} if codecs else None
    tables = list(zip(view.sub_tables, view.dims, strict=True))
    return Signature(spec, raw_assign, push=True, accepts=accepts, hints=hints, tables=tables)


def live_servable(tables: Any) -> Servable:
    """A servable over tables of this process, given as :func:`as_views` takes them."""
    views = as_views(tables)
    names = [view.name for view in views]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"names of tables that are served together must be unique, got {twice[0]!r} twice")
    for view in views:
        view.logs_pushes = False  # live tables have no next version
    servable = Servable({}, {view.name: view for view in views})
    servable.signatures = table_signatures(views, lambda: servable)
    Rounds(servable)
    return servable
