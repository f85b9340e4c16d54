"""The signatures of an embedding shard: lookups of rows, and pushes of fresh ones."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.serving.manifest import SignatureSpec, TensorSpec
from shoal.serving.quantise import asked, asked_multi, decode, decode_multi, multi_bytes, wire_dtype
from shoal.serving.servable import Servable, Signature, Tensors, touched_at
from shoal.serving.status import invalid_argument
from shoal.serving.table_view import TableView, as_views
from shoal.table.messages import EntryConfig

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
            return {alias: view.lookup_sub(number, inputs[alias]) for alias, (view, number) in slots.items()}

        signatures["lookup"] = Signature(spec, lookup)
    if singles := [view for view in views if not view.multi]:
        signatures["hashtable_assign"] = _assign_signature(singles, owner)
    for view in views:
        if view.multi:
            signatures[f"{view.name}/raw_assign"] = _raw_assign_signature(view, owner)
            signatures["raw_lookup"] = _raw_lookup_signature(view)
    return signatures


def _apply(owner: Callable[[], Servable], write: Callable[[Servable], None]) -> None:
    """One push, to the servable and to the version that is about to replace it."""
    servable = owner()
    with servable.push_lock:
        write(servable)
        if servable.successor is not None:
            write(servable.successor)


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
        work = []
        for view in views:
            ids, values = inputs[f"{view.name}_id"], inputs[f"{view.name}_value"]
            if len(ids) != len(values):
                raise invalid_argument(f"table {view.name!r}: {len(ids)} ids for {len(values)} rows of values")
            work.append((view.name, ids, decode(codecs[view.name], values)))

        def write(servable: Servable) -> None:
            for name, ids, values in work:
                if len(ids) and name in servable.tables:
                    servable.tables[name].assign_sub(0, ids, values, None)

        _apply(owner, write)
        for view, (_, ids, _) in zip(views, work, strict=True):
            view.count_push(len(ids), touched_at.get())
        return {f"{name}_result": torch.tensor(len(ids), dtype=torch.int32, device="cpu") for name, ids, _ in work}

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
            flat = decode_multi(codecs, sizes, flat)

        def write(servable: Servable) -> None:
            target = servable.tables.get(view.name)
            if target is None or target.dims != view.dims:
                return
            begin = 0
            for number, (count, dim) in enumerate(zip(counts.tolist(), view.dims, strict=True)):
                part = ids[int(splits[number]) : int(splits[number]) + count]
                if count:
                    target.assign_sub(number, part, flat[begin : begin + count * dim].reshape(count, dim), None)
                begin += count * dim

        _apply(owner, write)
        view.count_push(len(ids), touched_at.get())
        return {"result": torch.tensor(0, dtype=torch.int32, device="cpu")}

    accepts = {"flat_value": ("uint8",)} if codecs else None
    return Signature(spec, raw_assign, push=True, accepts=accepts, hints={"flat_value": codecs} if codecs else None)


def live_servable(tables: Any) -> Servable:
    """A servable over tables of this process, given as :func:`as_views` takes them."""
    views = as_views(tables)
    servable = Servable({}, {view.name: view for view in views})
    servable.signatures = table_signatures(views, lambda: servable)
    return servable
