"""What distributed tables do while a model is exported: sub-graphs ``ps_<i>`` with signatures, and remote lookups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.sharded.metrics import model_name
from shoal.sharded.route import Route
from shoal.table.export_mode import get_current_export_ctx

RemotePredict = Callable[..., list[Tensor]]

_remote_predict: RemotePredict | None = None


def set_remote_predict(call: RemotePredict | None) -> None:
    """How exported models reach the parts on parameter servers: `shoal.serving.remote_predict`, or None.

    Without one, a lookup during a distributed export is answered by the parts that were built for it, which are empty:
    it gives zeros of the right shape, as an export needs.
    """
    global _remote_predict
    _remote_predict = call


def export_parts(parts: Sequence[Any], dims: Mapping[str, int], *, native: bool) -> None:
    """Puts part ``i`` into sub-graph ``ps_<i>`` of the export under way, with its signatures."""
    ctx = get_current_export_ctx()
    if ctx is None:
        return
    for i, part in enumerate(parts):
        graph = ctx.sub_graph(f"ps_{i}")
        ids = {slot: {"dtype": "int64", "shape": [None]} for slot in dims}
        rows = {slot: {"dtype": "float32", "shape": [None, dim]} for slot, dim in dims.items()}
        ctx.add_signature(graph, "lookup", ids, rows)
        if native:
            ctx.add_signature(
                graph, "raw_lookup",
                {"id": {"dtype": "int64", "shape": [None]}, "id_split": {"dtype": "int64", "shape": [None]}},
                {"flat_emb": {"dtype": "float32", "shape": [None]}},
            )  # fmt: skip
        del part


def remote_lookup(table: Any, route: Route, names: Sequence[str], *, model_native: bool) -> list[Tensor]:
    """Each part's flat rows of a route from the serving processes of the parts, or zeros where nobody serves yet."""
    if _remote_predict is None:
        return [torch.zeros(floats.stop - floats.start) for floats in route.floats]
    result = []
    for i in range(len(table.tables)):
        common = {
            "model_name": f"{model_name()}:ps_{i}", "task": i, "old_model_name": f"ps_{i}", "model_version": -1,
            "max_rpc_deadline_millis": table.max_rpc_deadline_millis,
        }  # fmt: skip
        if model_native:
            splits = torch.tensor([0, *route.counts[i]]).cumsum(0)
            [found] = _remote_predict(
                ["id", "id_split"], [route.ids[i], splits], ["flat_emb"], output_types=[torch.float32],
                signature_name="raw_lookup", **common,
            )  # fmt: skip
            result.append(found.reshape(-1).contiguous())
            continue
        slots = sorted(names)
        ids = dict(zip(names, torch.split(route.ids[i], route.counts[i]), strict=True))
        rows = _remote_predict(
            slots, [ids[slot] for slot in slots], slots, output_types=[torch.float32] * len(slots),
            signature_name="lookup", **common,
        )  # fmt: skip
        found = dict(zip(slots, rows, strict=True))
        result.append(torch.cat([found[name].reshape(-1) for name in names]))
    return result
