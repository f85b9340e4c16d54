"""`HashEmbedding`: a row per id, as `torch.nn.Embedding` but for any int64 id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.nn.jagged import Jagged, as_jagged, as_keyed, is_keyed, split_keys
from shoal.nn.module import TableModule
from shoal.nn.ops import hash_rows
from shoal.nn.protocol import EmbeddingTable
from shoal.nn.slot import TableSlot
from shoal.ragged import Ragged


class HashEmbedding(TableModule):
    """Looks up ids, each of which has a row of its own.

    >>> import shoal, torch
    >>> from shoal.nn import HashEmbedding
    >>> embedding = HashEmbedding(shoal.HashTable(dim=2, initializer="zeros"))
    >>> embedding(torch.tensor([[7, 8, 9]])).shape
    torch.Size([1, 3, 2])

    In training mode an unknown id gets a row from the table's initializer (unless the table has an active admission
    filter, which counts updates); in evaluation mode it gives zeros and the table stays as it was. For how rows are
    updated see `HashEmbeddingBag`.

    Args:
        table: one table for all ids, or a table per key.
        padding_idx: an id that stands for none: zeros, no row, no gradient.
        insert_missing: False: never create rows in forward; the first update of an id does.
        fused: see `HashEmbeddingBag`.
    """

    def __init__(
        self,
        table: EmbeddingTable | Mapping[str, EmbeddingTable],
        *,
        padding_idx: int | None = None,
        insert_missing: bool = True,
        fused: bool | None = None,
    ) -> None:
        super().__init__(table, padding_idx=padding_idx, insert_missing=insert_missing, fused=fused)

    def forward(self, ids: Any, offsets: Tensor | None = None) -> Any:
        """The rows of ids, in the shape that the ids came in.

        An integer tensor of any shape gives ``[*shape, D]``; a ``torch.nested`` tensor in the jagged layout gives one;
        ``(values, offsets)``, lists of lists, `Ragged` and jagged objects give a `Ragged` of rows; ids by key (a
        mapping, or an object shaped like a KeyedJaggedTensor) give a dict of these.
        """
        if is_keyed(ids):
            if isinstance(ids, Mapping):
                return {key: self._embed(self._of_key(key), part, None) for key, part in ids.items()}
            parts = split_keys(*as_keyed(ids))
            return {key: self._ragged(self._of_key(key), part) for key, part in parts.items()}
        return self._embed(self._only(), ids, offsets)

    def _embed(self, slot: TableSlot, ids: Any, offsets: Any) -> Any:
        jagged = as_jagged(ids, offsets)
        if isinstance(ids, Tensor) and ids.is_nested:
            return torch.nested.nested_tensor_from_jagged(self._rows(slot, jagged.values), jagged.offsets)
        return self._ragged(slot, jagged)

    def _ragged(self, slot: TableSlot, jagged: Jagged) -> Any:
        values, offsets, _ = jagged
        if offsets is None:
            return self._rows(slot, values.reshape(-1)).view(*values.shape, slot.dim)
        checked = Ragged(values, offsets)  # offsets that do not fit are refused before a row is made
        return Ragged.trusted(self._rows(slot, values), checked.row_splits)

    def _rows(self, slot: TableSlot, values: Tensor) -> Tensor:
        create = self.training and self.insert_missing
        ids = values.to(slot.home).contiguous()
        return self._placed(hash_rows(ids, slot.anchor, slot.tape, slot.handle, slot.dim, create, self.padding_idx))
