"""`HashEmbedding`: a row per id, as `torch.nn.Embedding` but for any int64 id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.nn.module import TableModule
from shoal.nn.protocol import EmbeddingTable
from shoal.nn.read.asked import Asked, Located
from shoal.nn.read.jagged import Jagged, as_jagged, as_joined, is_keyed, on, split_keys
from shoal.nn.read.ops import Request
from shoal.nn.read.plan import Feature
from shoal.nn.read.refusal import notifies_ranks
from shoal.ragged import Ragged


class HashEmbedding(TableModule):
    """Looks up the row of each id.

    >>> import shoal, torch
    >>> from shoal.nn import HashEmbedding
    >>> embedding = HashEmbedding(shoal.HashTable(dim=2, initializer="zeros"))
    >>> embedding(torch.tensor([[7, 8, 9]])).shape
    torch.Size([1, 3, 2])

    A forward never writes. In training mode an unknown id gives the row that the table's initializer would create
    (zeros while the table's admission filter is active), in evaluation mode zeros; its first update creates the row.
    For how rows are updated see `EmbeddingBagCollection`.

    Args:
        table: one table for all ids, or a table per key. Ids by key are found and updated together.
        padding_idx: an id to ignore: it gives zeros and has no row and no gradient.
        insert_missing: False: an unknown id gives zeros in training mode, too.
        fused: see `EmbeddingBagCollection`.
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
        tables = self._tables
        self._read_features({name: Feature(tables.number(name)) for name in tables.named})

    @notifies_ranks
    def forward(self, ids: Any, offsets: Tensor | None = None) -> Any:
        """Return the rows of ids, in the form of the ids.

        An integer tensor of any shape gives ``[*shape, D]``; a ``torch.nested`` tensor in the jagged layout gives one;
        ``(values, offsets)``, lists of lists, `Ragged` and jagged objects give a `Ragged` of rows; ids by key (a
        mapping, or an object shaped like a KeyedJaggedTensor) give a dict of these.
        """
        return ids.result(self) if type(ids) is Located else self.ask(ids, offsets).result()

    def ask(self, ids: Any, offsets: Tensor | None = None) -> Asked:
        if type(ids) is not Tensor and is_keyed(ids):
            if isinstance(ids, Mapping):
                return self._by_key({key: (part, self.checked(as_jagged(part))) for key, part in ids.items()})
            keys, joined = as_joined(ids)
            parts = split_keys(ids, [str(key) for key in keys], joined)
            return self._by_key({key: (None, self.checked(part)) for key, part in zip(keys, parts, strict=True)})
        self._check_one()
        jagged = self.checked(as_jagged(ids, offsets))
        plan = self._tables.plan(1)
        values = on(jagged.values.reshape(-1), plan.device)
        request = Request(plan, [values], [[values.shape[0]]], [], [], 0, self.missing())
        return Asked(request, lambda outputs: self.shaped(ids, jagged, self._placed(outputs[0])))

    def _by_key(self, parts: dict[Any, tuple[Any, Jagged]]) -> Asked:
        for key in parts:
            self._check_key(str(key))

        def finish(rows: dict[str, Tensor]) -> dict[Any, Any]:
            return {key: self.shaped(part, jagged, rows[str(key)]) for key, (part, jagged) in parts.items()}

        return self.ask_rows({str(key): part for key, part in parts.items()}, finish)

    def ask_rows(self, parts: dict[str, tuple[Any, Jagged]], finish: Callable[[dict[str, Tensor]], Any]) -> Asked:
        """Request the rows of several features' ids, ``[N, D]`` each, with one find; ``finish`` gets them."""
        if not parts:
            return Asked(None, lambda outputs: finish({}))
        plan = self._tables.plan(len(parts) if self._tables.one else tuple(parts))
        flat = [jagged.values.reshape(-1) for _, jagged in parts.values()]
        ids = [torch.cat([on(flat[place], call.device) for place in call.places]) for call in plan.calls]
        sizes = [[flat[place].shape[0] for place in call.places] for call in plan.calls]

        def by_feature(outputs: list[Tensor]) -> Any:
            rows: list[Any] = [None] * len(parts)
            for call, own in zip(plan.calls, sizes, strict=True):
                for place, part in zip(call.places, outputs[call.output].split(own), strict=True):
                    rows[place] = self._placed(part)
            return finish(dict(zip(parts, rows, strict=True)))

        return Asked(Request(plan, ids, sizes, [], [], 0, self.missing()), by_feature)

    @staticmethod
    def checked(jagged: Jagged) -> Jagged:
        """Refuse offsets that do not fit the ids, before anything is read."""
        if jagged.offsets is None:
            return jagged
        return Jagged(jagged.values, Ragged(jagged.values, jagged.offsets).row_splits)

    @staticmethod
    def shaped(ids: Any, jagged: Jagged, rows: Tensor) -> Any:
        """Rows ``[N, D]`` in the form of their ids."""
        if jagged.offsets is None:
            return rows.view(*jagged.values.shape, rows.shape[1])
        if isinstance(ids, Tensor) and ids.is_nested:
            return torch.nested.nested_tensor_from_jagged(rows, jagged.offsets)
        return Ragged.trusted(rows, jagged.offsets)
