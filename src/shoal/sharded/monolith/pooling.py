"""Pools the rows of a sharded batch into layout tensors, and layout gradients back into rows, on CPU or GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.ops.layout import fused_embedding_to_layout, fused_embedding_to_layout_grad, nest_layout
from shoal.sharded.monolith.batch_bundle import OFFSETS, SIZES
from shoal.sharded.monolith.layout_config import PREFIX, ParserCtx, params_of
from shoal.table.export_mode import get_current_export_ctx, is_exporting


class Pooling:
    """The layouts of one parser context.

    Rows are one tensor per table and part. If ranks exchanged them, they are one flat buffer, and ``lengths`` has the
    number of floats of each list.
    """

    def __init__(self, ctx: ParserCtx, shards: int) -> None:
        self._ctx, self._shards = ctx, shards
        self._params = params_of(ctx)
        self._configs = self._params.feature_configs

    def forward(self, bundle: dict[str, Any], rows: Sequence[Tensor], lengths: Tensor | None) -> dict[str, Any]:
        """``{layout: tensor or list}``."""
        if self._on_gpu():
            rows = [r.cuda(non_blocking=True) for r in rows]
            for name in OFFSETS:
                bundle[PREFIX + name] = bundle[PREFIX + name].cuda(non_blocking=True)
        fid_offset, feature_offset, nfl_offset = (bundle[PREFIX + name] for name in OFFSETS)
        tensors = fused_embedding_to_layout(
            list(rows), None, fid_offset, feature_offset, nfl_offset, bundle[PREFIX + "batch_size"],
            self._ctx.parser_type, self._configs, self._shards, **self._sizes(bundle, lengths),
        )  # fmt: skip
        return nest_layout(self._configs, list(tensors))

    def backward(
        self, bundle: Mapping[str, Any], grads: Sequence[Tensor], shapes: Sequence[Tensor], lengths: Tensor | None,
        scale: Any = None,
    ) -> list[Tensor]:  # fmt: skip
        """The gradients of rows of these ``shapes``."""
        if self._on_gpu():
            shapes = [torch.empty_like(s, device="cuda") for s in shapes]
        fid_offset, feature_offset, nfl_offset = (bundle[PREFIX + name] for name in OFFSETS)
        return fused_embedding_to_layout_grad(
            nfl_offset, feature_offset, fid_offset, bundle[PREFIX + "batch_size"], list(shapes), None, list(grads),
            self._ctx.parser_type, self._configs, self._shards, layout_tensors_grad_scale=scale,
            **self._sizes(bundle, lengths),
        )  # fmt: skip

    def _sizes(self, bundle: Mapping[str, Any], lengths: Tensor | None) -> dict[str, Any]:
        if lengths is not None:
            return {"version": 4, "fid_list_emb_row_lenth": lengths}
        return {"version": 5, **{name: bundle[PREFIX + name] for name in SIZES if name != "batch_size"}}

    def _on_gpu(self) -> bool:
        ctx = get_current_export_ctx()
        wanted = ctx.with_remote_gpu if is_exporting() and ctx is not None else self._params.use_gpu
        return wanted and torch.cuda.is_available()
