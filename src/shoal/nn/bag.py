"""`HashEmbeddingBag`: the pooled rows of bags of ids, as `torch.nn.EmbeddingBag` but for any int64 id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.nn.collection import EmbeddingBagCollection, with_end
from shoal.nn.protocol import EmbeddingTable
from shoal.nn.read.asked import Asked, Located
from shoal.nn.read.jagged import as_bags, as_jagged, is_keyed, join
from shoal.nn.read.refusal import notifies_ranks


class HashEmbeddingBag(EmbeddingBagCollection):
    """Looks up bags of ids, each id with its own row, and pools the rows of each bag.

    >>> import shoal, torch
    >>> from shoal.nn import HashEmbeddingBag
    >>> table = shoal.HashTable(dim=2, optimizer=shoal.Sgd(lr=1.0), initializer="zeros")
    >>> bag = HashEmbeddingBag(table, combiner="sum")
    >>> bag([[7, 8], [], [7]]).sum().backward()
    >>> table.lookup(torch.tensor([7, 8, 9]))
    tensor([[-2., -2.],
            [-1., -1.],
            [ 0.,  0.]])

    With a mapping of tables it is an `EmbeddingBagCollection` with one feature per table. See that class for unknown
    ids (a forward never writes; the first update of an id creates its row) and for when rows are updated.

    Args:
        table: one table for all ids, or a table per key.
        combiner: ``"sum"``, ``"mean"``, ``"sqrtn"``, ``"max"``, ``"firstn"`` or a `Combiner`; see
            `EmbeddingBagCollection`, also for the other arguments.
        output: the result for ids by key. ``"concat"``: side by side in the order of the tables (of the batch's keys
            if there is one table); a batch must hold every key. ``"dict"``: by key; a batch may hold only some.
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
        super().__init__(
            table,  # pyrefly: ignore[bad-argument-type]
            combiner=combiner,
            max_length=max_length,
            output=output,
            padding_idx=padding_idx,
            include_last_offset=include_last_offset,
            insert_missing=insert_missing,
            fused=fused,
        )

    @notifies_ranks
    def forward(  # pyrefly: ignore[bad-override]
        self, ids: Any, offsets: Tensor | None = None, per_sample_weights: Any = None
    ) -> Any:
        """Return the pooled rows of each bag: ``[B, D]``, or ``[B, max_length, D]`` for firstn.

        ``ids`` are ``(values, offsets)`` (as one argument or two), lists of lists, a `Ragged`, a ``torch.nested``
        jagged tensor, a dense ``[B, L]`` tensor, or an object shaped like a JaggedTensor. ``offsets`` are int64
        ``[B + 1]``, rising from 0 to the number of values. ``per_sample_weights``, shaped like the ids, multiply their
        rows and get gradients.

        Ids by key, in a mapping or an object shaped like a KeyedJaggedTensor, give ``[B, K * D]`` or a dict by key.
        """
        if type(ids) is Located:
            return ids.result(self)
        return self.ask(ids, offsets, per_sample_weights).result()

    def ask(  # pyrefly: ignore[bad-override]
        self, ids: Any, offsets: Tensor | None = None, per_sample_weights: Any = None
    ) -> Asked:
        if type(ids) is not Tensor and is_keyed(ids):
            return self._by_key(ids, per_sample_weights)
        tables = self._tables
        if not tables.one:
            raise ConfigError(
                f"{type(self).__name__} has one table for each of {list(tables.named)}, so ids must come by key"
            )
        if not self.include_last_offset:
            if offsets is not None:
                offsets = with_end(ids, offsets)
            elif type(ids) is tuple and len(ids) > 1 and isinstance(ids[0], Tensor) and ids[0].dim() == 1:
                ids = (ids[0], with_end(ids[0], ids[1]), *ids[2:])
        bags = as_bags(as_jagged(ids, offsets, per_sample_weights), tables.distinct[0].name)
        weights = bags.weights
        plan = tables.plan(1, weights is not None and weights.requires_grad and torch.is_grad_enabled())
        values, at = bags.values, bags.offsets
        straight = values.is_contiguous() and at is not None and at.is_contiguous() and weights is None
        if not straight or values.device != plan.device:
            bags = join([bags], plan.device)

        def finish(out: Any, combined: dict[int, Tensor]) -> Tensor:
            return self._placed(plan.places[0].shaped(out) if plan.fused else combined[0])

        return self._pooled(plan, [bags], [[bags.values.shape[0]]], bags.length >= 0, finish)
