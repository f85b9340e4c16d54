"""`HashEmbeddingBag`: the pooled rows of bags of ids, as `torch.nn.EmbeddingBag` but for any int64 id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.nn.jagged import Jagged, as_bags, as_jagged, as_keyed, is_keyed, split_keys
from shoal.nn.module import TableModule
from shoal.nn.ops import hash_bag, hash_rows
from shoal.nn.pooling import CUSTOM, FIRSTN, MEAN, as_pool
from shoal.nn.protocol import EmbeddingTable
from shoal.nn.slot import TableSlot
from shoal.ops.ragged_ops import fused_value_rowids
from shoal.ops.reduce.by_index import mean_by_index, sum_by_index
from shoal.ops.reduce.by_splits import first_n
from shoal.ragged import Ragged


class HashEmbeddingBag(TableModule):
    """Looks up bags of ids, each id with a row of its own, and pools the rows of each bag.

    >>> import shoal, torch
    >>> from shoal.nn import HashEmbeddingBag
    >>> table = shoal.HashTable(dim=2, optimizer=shoal.Sgd(lr=1.0), initializer="zeros")
    >>> bag = HashEmbeddingBag(table, combiner="sum")
    >>> bag([[7, 8], [], [7]]).sum().backward()
    >>> table.lookup(torch.tensor([7, 8, 9]))
    tensor([[-2., -2.],
            [-1., -1.],
            [ 0.,  0.]])

    Where gradients go: into the rows when ``backward`` ends, by the table's own optimizer, one step per pass and id.
    Once a `SparseOptimizer` holds the table they wait for its ``step`` instead. ``fused`` makes the choice explicit.

    In training mode an unknown id gets a row from the table's initializer (unless the table has an active admission
    filter, which counts updates); in evaluation mode it counts as a row of zeros and the table stays as it was.

    Args:
        table: one table for all ids, or a table per key.
        combiner: ``"sum"``; ``"mean"`` (over the number of ids); ``"firstn"``, the first ``max_length`` rows as a
            sequence, padded with zeros; or a `Combiner`. One that you derive from `Combiner` with a ``combine`` of its
            own gets the rows of all ids, and autograd goes through it.
        output: of ids by key: ``"concat"``, side by side in the order of the tables (of the batch's keys if there is
            one table), for which a batch holds every key; or ``"dict"``, for which it may hold some.
        padding_idx: an id that stands for none: it does not count, has no row and no gradient.
        include_last_offset: False if offsets are ``[B]``, the end left out, which is `torch.nn.EmbeddingBag`'s default.
        insert_missing: False: never create rows in forward; the first update of an id does.
        fused: True: rows are updated in backward, always; a `SparseOptimizer` over the model leaves the table out.
            False: gradients wait for a `SparseOptimizer`, always. All modules of a table agree.
    """

    def __init__(
        self,
        table: EmbeddingTable | Mapping[str, EmbeddingTable],
        *,
        combiner: Any = "sum",
        max_length: int | None = None,
        output: Literal["concat", "dict"] = "concat",
        padding_idx: int | None = None,
        include_last_offset: bool = True,
        insert_missing: bool = True,
        fused: bool | None = None,
    ) -> None:
        super().__init__(table, padding_idx=padding_idx, insert_missing=insert_missing, fused=fused)
        self._kind, self._length = as_pool(combiner, max_length)
        if output not in ("concat", "dict"):
            raise ConfigError(f"HashEmbeddingBag: output is 'concat' or 'dict', got {output!r}")
        self.output = output
        self.combiner = combiner
        self.include_last_offset = include_last_offset

    def forward(self, ids: Any, offsets: Tensor | None = None, per_sample_weights: Any = None) -> Any:
        """The pooled rows of each bag: ``[B, D]``, or ``[B, max_length, D]`` for firstn.

        ``ids`` are ``(values, offsets)`` (as one argument or two), lists of lists, a `Ragged`, a ``torch.nested``
        jagged tensor, a dense ``[B, L]`` tensor, or an object shaped like a JaggedTensor. ``offsets`` are int64
        ``[B + 1]``, rising from 0 to the number of values. ``per_sample_weights``, shaped like the ids, multiply their
        rows and get gradients.

        Ids by key, in a mapping or an object shaped like a KeyedJaggedTensor, give ``[B, K * D]`` or a dict by key.
        """
        if is_keyed(ids):
            return self._keyed(*as_keyed(ids, per_sample_weights))
        if offsets is not None and not self.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_tensor([len(ids)])])
        bags = as_bags(as_jagged(ids, offsets, per_sample_weights), self._only().table.name)
        return self._pooled(self._only(), bags)

    def _keyed(self, keys: list[str], joined: Jagged) -> Any:
        if self._slot is not None and keys:
            # One table: one lookup over all keys.
            out = self._pooled(self._slot, joined)
            parts = list(out.view(len(keys), -1, *out.shape[1:]).unbind(0))
        else:
            split = split_keys(keys, joined)
            slots = {key: self._of_key(key) for key in split}
            keys = keys if self.output == "dict" else self._every_key(split)
            parts = [self._pooled(slots[key], split[key]) for key in keys]
        if self.output == "dict":
            return dict(zip(keys, parts, strict=True))
        if not parts:
            raise ConfigError("HashEmbeddingBag: there are no keys, so there is nothing to put side by side")
        return torch.cat(parts, dim=-1)

    def _every_key(self, batch: Mapping[Any, Any]) -> list[Any]:
        """The batch's keys in the order of the tables, none missing: else columns would be taken for others."""
        given = {str(key): key for key in batch}
        missing = [key for key in self._slots if key not in given]
        if missing:
            raise ConfigError(
                f"HashEmbeddingBag puts {list(self._slots)} side by side, but the batch lacks {missing}; give it empty "
                "bags for them, or use output='dict'"
            )
        return [given[key] for key in self._slots]

    def _pooled(self, slot: TableSlot, bags: Jagged) -> Tensor:
        values, offsets, weights = bags
        assert offsets is not None
        if slot.home.type == "cuda" or self._kind == CUSTOM:
            return self._placed(self._pooled_there(slot, values, offsets, weights))
        weights = None if weights is None else weights.to("cpu").contiguous()
        out = hash_bag(
            values.to("cpu").contiguous(),
            offsets.to("cpu").contiguous(),
            weights,
            slot.anchor,
            slot.tape,
            slot.handle,
            slot.dim,
            self._kind,
            self._length,
            self.training and self.insert_missing,
            self.padding_idx,
            weights is not None and weights.requires_grad and torch.is_grad_enabled(),
        )
        return self._placed(out)

    def _pooled_there(self, slot: TableSlot, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """The rows where the table has them, pooled there by torch."""
        ids = ids.to(slot.home).contiguous()
        bags = Ragged(ids, offsets.to(slot.home))
        if self.padding_idx is not None:
            keep = ids != self.padding_idx
            left = torch.nn.functional.pad(keep.cumsum(0), (1, 0))[bags.row_splits]
            ids, bags = ids[keep], Ragged.trusted(ids[keep], left)
            weights = None if weights is None else weights.to(slot.home)[keep]
        create = self.training and self.insert_missing
        rows = hash_rows(ids, slot.anchor, slot.tape, slot.handle, slot.dim, create, None)
        if weights is not None:
            rows = rows * weights.to(slot.home)[:, None]
        if self._kind == CUSTOM:
            return self.combiner.combine(bags, rows)
        if self._kind == FIRSTN:
            return first_n(rows, bags.row_splits, self._length)
        reduce = mean_by_index if self._kind == MEAN else sum_by_index
        return reduce(fused_value_rowids(bags), rows, bags.nrows())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, combiner={self.combiner!r}"
