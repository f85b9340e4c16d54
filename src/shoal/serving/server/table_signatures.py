"""The signatures of an embedding shard: lookups of rows, and pushes of fresh ones."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.serving.export.manifest import SignatureSpec, TensorSpec
from shoal.serving.server.hand_over import DROPPED, count_rows, place_of
from shoal.serving.server.servable import Servable, Signature, TableView, Tensors, as_views
from shoal.serving.status import invalid_argument
from shoal.serving.sync.push import push_info
from shoal.serving.sync.quantise import asked, asked_multi, check_codecs, decode, decode_multi, multi_bytes, wire_dtype
from shoal.table.config.messages import EntryConfig

SERVING = EntryConfig.SERVING


def table_signatures(views: Sequence[TableView], owner: Callable[[], Servable]) -> dict[str, Signature]:
    """An embedding shard's: ``lookup``, ``raw_lookup``, ``hashtable_assign``, ``<mtable>/raw_assign``."""
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


Rows = tuple[TableView, int, torch.Tensor, torch.Tensor]
"""(table, sub-table number, ids, values)"""


def _apply(owner: Callable[[], Servable], work: Sequence[Rows]) -> None:
    """Writes the rows of one push to the servable and to the version that is about to replace it."""
    servable = owner()
    read_at = push_info.get().read_at or time.time()
    with servable.push_lock:
        for view, number, ids, values in work:
            if len(ids):
                view.assign_sub(number, ids, values, read_at)
        if servable.successor is None:
            return
        for view, number, ids, values in work:
            where, into = place_of(servable.successor, view, number)
            if into is None:
                count_rows(view.name, DROPPED, len(ids))  # the switch has said so
            elif len(ids):
                into.assign_sub(where, ids, values, read_at)


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
        check_codecs(hints, inputs, push_info.get().codec)
        work: list[Rows] = []
        for view in views:
            ids, values = inputs[f"{view.name}_id"], inputs[f"{view.name}_value"]
            if len(ids) != len(values):
                raise invalid_argument(f"table {view.name!r}: {len(ids)} ids for {len(values)} rows of values")
            work.append((view, 0, ids, decode(codecs[view.name], values)))
        _apply(owner, work)
        for view, _, ids, _ in work:
            view.count_push(len(ids), push_info.get().touched_at)
        return {
            f"{view.name}_result": torch.tensor(len(ids), dtype=torch.int32, device="cpu") for view, _, ids, _ in work
        }

    return Signature(spec, assign, push=True, accepts=accepts, hints=hints)


def _splits(view: TableView, ids: torch.Tensor, splits: torch.Tensor, repeats: bool) -> None:
    count = len(view.sub_tables)
    length = len(splits) - 1
    if length < 0 or length % count or (length != count and not repeats):
        raise invalid_argument(
            f"multi-table {view.name!r}: id_split has {len(splits)} entries; {count} tables need {count + 1}"
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
        return {"flat_emb": view.table.raw_lookup((inputs["id"], inputs["id_split"]))}

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
        counts = splits[1:] - splits[:-1]
        sizes = (counts * dims).tolist()
        packed = flat.dtype == torch.uint8
        need = sum(multi_bytes(codecs, sizes) if packed else sizes)
        if need != len(flat):
            unit = "bytes" if packed else "values"
            raise invalid_argument(f"multi-table {view.name!r}: these ids need {need} {unit}, got {len(flat)}")
        if packed:
            check_codecs({"flat_value": codecs}, inputs, push_info.get().codec)
            flat = decode_multi(codecs, sizes, flat)
        rows = zip(ids.split(counts.tolist()), flat.split(sizes), view.dims, strict=True)
        _apply(owner, [(view, number, part, values.view(-1, dim)) for number, (part, values, dim) in enumerate(rows)])
        view.count_push(len(ids), push_info.get().touched_at)
        return {"result": torch.tensor(0, dtype=torch.int32, device="cpu")}

    accepts = {"flat_value": ("uint8",)} if codecs else None
    return Signature(spec, raw_assign, push=True, accepts=accepts, hints={"flat_value": codecs} if codecs else None)


def live_servable(tables: Any) -> Servable:
    """A servable over tables of this process, given as :func:`as_views` takes them."""
    views = as_views(tables)
    for view in views:
        view.logs_pushes = False  # no version comes after these tables
    servable = Servable({}, {view.name: view for view in views})
    servable.signatures = table_signatures(views, lambda: servable)
    return servable
