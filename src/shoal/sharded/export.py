"""The export of distributed tables: sub-graphs ``ps_<i>`` with signatures, and remote lookups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.sharded.metrics import model_name
from shoal.sharded.route import Route
from shoal.table.export_mode import get_current_export_ctx, is_exporting

RemotePredict = Callable[..., list[Tensor]]

_remote_predict: RemotePredict | None = None


def set_remote_predict(call: RemotePredict | None) -> None:
    """Set the function by which exported models read parts on servers: `shoal.serving.remote_predict`, or None.

    Without one, a lookup during a distributed export returns zeros of the right shape.
    """
    global _remote_predict
    _remote_predict = call


def export_parts(parts: Sequence[Any], dims: Mapping[str, int], *, native: bool) -> None:
    """Add each part ``i`` to the current export as sub-graph ``ps_<i>``, with its signatures."""
    ctx = get_current_export_ctx()
    if ctx is None:
        return
    ids = {slot: {"dtype": "int64", "shape": [None]} for slot in dims}
    rows = {slot: {"dtype": "float32", "shape": [None, dim]} for slot, dim in dims.items()}
    for i in range(len(parts)):
        graph = ctx.sub_graph(f"ps_{i}")
        ctx.add_signature(graph, "lookup", ids, rows)
        if native:
            ctx.add_signature(
                graph, "raw_lookup",
                {"id": {"dtype": "int64", "shape": [None]}, "id_split": {"dtype": "int64", "shape": [None]}},
                {"flat_emb": {"dtype": "float32", "shape": [None]}},
            )  # fmt: skip


def remote_lookup(table: Any, route: Route, names: Sequence[str], *, model_native: bool) -> list[Tensor]:
    """Each part's flat rows of a route, from the parts' serving processes; zeros if no remote call is set."""
    result = []
    for i, (ids, counts) in enumerate(zip(route.ids, route.counts, strict=True)):
        sizes = [n * dim for n, dim in zip(counts, route.dims, strict=True)]
        deadline = table.max_rpc_deadline_millis
        if model_native:
            result.append(predict_raw(i, ids, torch.tensor([0, *counts], device="cpu").cumsum(0), sum(sizes), deadline))
            continue
        wanted = dict(zip(names, torch.split(ids, counts), strict=True))
        found = predict_slots(i, wanted, dict(zip(names, route.dims, strict=True)), deadline)
        result.append(torch.cat([found[name] for name in names]))
    return result


def predict_raw(ps: int, ids: Tensor, splits: Tensor, floats: int, deadline_millis: int) -> Tensor:
    """The flat rows of a native part. ``ids`` are those of all its tables; ``splits`` has where those of each begin."""
    if _remote_predict is None:
        return torch.zeros(floats, device="cpu")
    [found] = _remote_predict(
        ["id", "id_split"], [ids, splits], ["flat_emb"], output_types=[torch.float32],
        signature_name="raw_lookup", **_where(ps, deadline_millis),
    )  # fmt: skip
    return found.reshape(-1).contiguous()


def predict_slots(
    ps: int, ids: Mapping[str, Tensor], dims: Mapping[str, int], deadline_millis: int
) -> dict[str, Tensor]:
    """The flat rows of each table of a part. The request lists tables in sorted order."""
    if _remote_predict is None:
        return {slot: torch.zeros(ids[slot].numel() * dims[slot], device="cpu") for slot in ids}
    slots = sorted(ids)
    rows = _remote_predict(
        slots, [ids[slot] for slot in slots], slots, output_types=[torch.float32] * len(slots),
        signature_name="lookup", **_where(ps, deadline_millis),
    )  # fmt: skip
    return {slot: found.reshape(-1).contiguous() for slot, found in zip(slots, rows, strict=True)}


def _where(ps: int, deadline_millis: int) -> dict[str, Any]:
    return {
        "model_name": f"{model_name()}:ps_{ps}", "task": ps, "old_model_name": f"ps_{ps}", "model_version": -1,
        "max_rpc_deadline_millis": deadline_millis,
    }  # fmt: skip


def check_writable(verb: str) -> None:
    """Raise while a model is exported."""
    if is_exporting():
        raise RuntimeError(f"{verb} is not possible while exporting: exported tables are read-only")
