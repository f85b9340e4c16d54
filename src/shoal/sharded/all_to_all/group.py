"""`AllToAllGroup`: tables whose rows are distributed over all ranks by id; ranks exchange rows and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.sharded.all_to_all.base import MISSING, RankGroup, checksum, reported
from shoal.sharded.all_to_all.exchange import FIND, ROWS, UPDATE, Call
from shoal.sharded.all_to_all.local import Local
from shoal.sharded.all_to_all.plan import Dealt, Plan, deal_out
from shoal.sharded.all_to_all.rounds import Send, Steps
from shoal.sharded.bags import add_gradients, pool_rows, take_rows
from shoal.table.protocol import EVERY, Features, Found, Group, Missing, Part, Step, Traits, group_of


class AllToAllGroup(RankGroup):
    """Tables of one ``dim`` whose rows are on the rank ``id mod W``.

    ``find`` sends counts and ids (two exchanges), ``rows`` and ``pooled`` get the current rows (one), and ``update``
    sends gradients (one), whatever the number of tables.

    An update makes one step per distinct id and rank, with the sum of that rank's gradients over all parts, in the
    order of the ranks.
    """

    def __init__(self, tables: tuple[Any, ...]) -> None:
        self._local = Local([table.table for table in tables], tables[0].world_size)
        super().__init__(tables, self._local.device, self._local.trains, pools=EVERY)
        self._blocks = self.ranks * len(tables)

    # --- finding ------------------------------------------------------------------------------------------------------

    def find_steps(self, ids: Tensor, counts: Tensor, features: Features, *, missing: Missing) -> Steps[Found]:
        number = self.tables[0].next_find()
        refused: Exception | None = None
        dealt: Dealt | None = None
        try:
            sizes = self.sizes(ids, counts, features)
            dealt = deal_out(ids.contiguous(), sizes, features, len(self.tables), self.ranks, self.dim)
        except Exception as error:  # the other ranks must learn of it first, or they would wait
            refused = error
        call = Call(FIND, number, self.names, MISSING[missing], refused is not None)
        k = len(self.tables)
        received = yield self.counts(call, None if dealt is None else dealt.sizes)
        if refused is not None or dealt is None:
            assert refused is not None
            raise reported(refused)
        send, recv = (each.view(self.ranks, k).sum(1).tolist() for each in (dealt.sizes, received))
        came = yield Send("ids", None, dealt.ids, send, recv)
        came = came.to(self.device)
        asked, served = dealt.sizes.tolist(), received.tolist()
        for place, table in enumerate(self.tables):
            table.last_spread = asked[place::k], served[place::k]
        kept = self._local.find(came, served, missing=missing)
        plan = Plan(number, asked, served, came, kept)
        return Found(ids, counts, dealt.where, self.remember(plan.packed(), plan))

    def _plan(self, found: Found) -> Plan:
        return self.recall(found) or Plan.of(found, self._blocks)

    def counts(self, call: Call, mine: Any) -> Send:
        if mine is None:
            mine = torch.zeros(self._blocks, dtype=torch.int32, device=self.device)
        each = [len(self.tables)] * self.ranks
        return Send("id_sizes", call, mine, each, each)

    # --- reading ------------------------------------------------------------------------------------------------------

    def rows_steps(self, found: Found, features: Features, *, missing: Missing) -> Steps[Tensor]:
        flat = yield from self._rows_of(found, missing)
        return take_rows(flat, found.where, self.dim, features.padding is not None)

    def pooled_steps(
        self,
        found: Found,
        features: Features,
        offsets: Tensor,
        weights: Tensor | None,
        out: Tensor,
        *,
        missing: Missing,
        marks: Tensor | None = None,
    ) -> Steps[None]:
        flat = yield from self._rows_of(found, missing)
        pool_rows(flat, found, features, offsets, weights, out, self.dim, marks)

    def inserted(self, found: Found, create: Callable[[Tensor], Tensor]) -> Tensor:
        """The rows of one table's ids, from ``create(ids)`` on the rank that owns them; it can insert new rows."""
        rows = self.together([self._rows_of(found, "initial", lambda plan: create(plan.came).reshape(-1))])[0]
        return take_rows(rows, found.where, self.dim, False)

    def _rows_of(self, found: Found, missing: Missing, read: Callable[[Plan], Tensor] | None = None) -> Steps[Tensor]:
        """The rows of the distinct ids that this rank requested, as a flat tensor that ``found.where`` indexes."""
        plan = self._plan(found)
        refused: Exception | None = None
        served, asked = (self._floats(counts, plan) for counts in (plan.served, plan.asked))
        try:
            if read is not None:
                flat = read(plan)
            else:
                flat = self._local.rows(plan.came, plan.served, plan.kept, missing=missing)
        except Exception as error:
            refused, flat = error, torch.zeros(sum(served), device=self.device)
        call = Call(ROWS, plan.number, self.names, MISSING[missing], refused is not None)
        rows = yield Send("embeddings", call, flat, served, asked)
        if refused is not None:
            raise reported(refused)
        return rows.to(found.ids.device)

    def _floats(self, counts: Sequence[int], plan: Plan) -> list[int]:
        return [n * self.dim for n in plan.per_rank(counts, self.ranks)]

    # --- updating -----------------------------------------------------------------------------------------------------

    def update_steps(
        self, parts: Sequence[Part], *, step: Step, each: Literal["sum", "occurrence"] = "sum"
    ) -> Steps[None]:
        refused: Exception | None = None
        plans: list[Plan] = []
        flats: list[Tensor] = []
        try:
            plans, flats = self._gradients(parts, each)
        except Exception as error:  # the other ranks must learn of it first, or they would wait
            refused = error
            plans = self._plans(parts)
            flats = [torch.zeros(sum(plan.asked) * self.dim, device="cpu") for plan in plans]
        numbers = [plan.number for plan in plans]
        detail = checksum(numbers) if len(numbers) > 1 else 0
        call = Call(UPDATE, numbers[0] if numbers else 0, self.names, detail, refused is not None)
        asked, served = ([self._floats(getattr(plan, what), plan) for plan in plans] for what in ("asked", "served"))
        flat = flats[0] if len(flats) == 1 else _by_rank(flats, asked, self.ranks)
        send, recv = ([sum(column) for column in zip(*lists, strict=True)] or [0] * self.ranks
                      for lists in (asked, served))  # fmt: skip
        came = yield Send("gradients", call, self.exchange.cast(flat), send, recv)
        if refused is not None:
            raise reported(refused)
        came = self.exchange.as_float(came).to(self.device)
        if len(plans) == 1:
            self._local.update(plans[0].came, plans[0].served, plans[0].kept, came, step)
            return
        if not plans:
            return
        k = len(self.tables)
        grads = iter(came.split([size for rank in zip(*served, strict=True) for size in rank]))
        ids = [plan.came.split(plan.per_rank(plan.served, self.ranks)) for plan in plans]
        for rank in range(self.ranks):
            finds = [
                (ids[p][rank], plan.served[rank * k : (rank + 1) * k], next(grads)) for p, plan in enumerate(plans)
            ]
            self._local.update_sums(finds, step)

    def _plans(self, parts: Sequence[Part]) -> list[Plan]:
        """The plans of the parts' finds, in order and without repeats; empty if one of them cannot be read."""
        plans: dict[int, Plan] = {}
        for part in parts:
            try:
                plan = self._plan(part.found)
            except Exception:
                return []
            plans[plan.number] = plan
        return [plans[number] for number in sorted(plans)]

    def _gradients(self, parts: Sequence[Part], each: str) -> tuple[list[Plan], list[Tensor]]:
        """The parts' finds in order, and for each the summed gradients of the ids that it requested."""
        self.check_update(each)
        found = self.by_find(parts, lambda part: self._plan(part.found))
        flats = [add_gradients(own, sum(plan.asked), self.dim) for plan, own in found]
        for (plan, _), flat in zip(found, flats, strict=True):
            self.check_finite(flat, self._by_table(flat, plan))
        return [plan for plan, _ in found], flats

    def _by_table(self, flat: Tensor, plan: Plan) -> Iterator[tuple[int, Tensor]]:
        for block, values in enumerate(flat.split([n * self.dim for n in plan.asked])):
            yield block % len(self.tables), values


def _by_rank(flats: Sequence[Tensor], sizes: Sequence[Sequence[int]], ranks: int) -> Tensor:
    """Concatenate the values of several finds, ordered by rank and then by find."""
    parts = [flat.split(list(own)) for flat, own in zip(flats, sizes, strict=True)]
    if not parts:
        return torch.empty(0, device="cpu")
    return torch.cat([part[rank] for rank in range(ranks) for part in parts])


class OneRankGroup:
    """A group over ranks when there is only one rank: the group of the local tables."""

    def __init__(self, tables: tuple[Any, ...]) -> None:
        self.tables = tables
        self._group: Group = group_of([table.table for table in tables])
        self.dim = self._group.dim
        self.traits = Traits(
            device=self._group.traits.device, collective=True, trains=self._group.traits.trains,
            capturable=self._group.traits.capturable, pools=self._group.traits.pools,
        )  # fmt: skip
        self.find = self._group.find
        self.rows = self._group.rows
        self.pooled = self._group.pooled
        self.update = self._group.update

    def refused(self, error: Exception) -> Exception:
        return error
