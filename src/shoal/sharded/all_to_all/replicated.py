"""`ReplicatedGroup`: small tables with all rows on every rank; only gradients are sent, to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.sharded.all_to_all.base import MISSING, RankGroup, checksum, reported
from shoal.sharded.all_to_all.exchange import FIND, ROWS, UPDATE, Call
from shoal.sharded.all_to_all.local import update_sums
from shoal.sharded.all_to_all.plan import Dealt, deal_out, pack, unpack
from shoal.sharded.all_to_all.rounds import Send, Steps, no_exchanges, room_for
from shoal.sharded.bags import add_gradients
from shoal.table.protocol import Features, Found, Group, Missing, Part, Step, groups_of


class _Plan:
    """The unpacked contents of a `Found`."""

    def __init__(self, number: int, counts: list[list[int]], tensors: list[Tensor]) -> None:
        self.number = number
        self.counts = counts
        """``[W][K]``: the number of distinct ids of every rank, by table."""
        self.ids, self.where, *self.kept = tensors


class ReplicatedGroup(RankGroup):
    """Tables of one ``dim`` with all rows on every rank.

    Reading is local. ``find`` exchanges the numbers of distinct ids (one exchange), and ``update`` sends ids and
    gradients to all ranks (one); each rank then applies every rank's update, in the order of the ranks, so that all
    ranks have bit-identical rows.
    """

    def __init__(self, tables: tuple[Any, ...]) -> None:
        self._groups: list[tuple[Group, list[int]]] = groups_of([table.table for table in tables])
        first = self._groups[0][0].traits
        trains = all(group.traits.trains for group, _ in self._groups)
        pools = frozenset.intersection(*(group.traits.pools for group, _ in self._groups))
        super().__init__(tables, first.device, trains, pools=pools)
        self._wirings: dict[Features, list[tuple[list[int], Features]]] = {}

    # --- finding ------------------------------------------------------------------------------------------------------

    def find_steps(self, ids: Tensor, counts: Tensor, features: Features, *, missing: Missing) -> Steps[Found]:
        number = self.tables[0].next_find()
        refused: Exception | None = None
        dealt: Dealt | None = None
        kept: list[Tensor] = []
        try:
            ids = ids.to(self.device)
            sizes = self.sizes(ids, counts, features)
            dealt = deal_out(ids.contiguous(), sizes, features, len(self.tables), 1, self.dim)
            for (group, _), (own, wired) in zip(self._groups, self._wired(features), strict=True):
                some, each = self._some(ids, sizes, own)
                found = group.find(some, each, wired, missing=missing)
                kept += [found.where, found.came]
        except Exception as error:  # the other ranks must learn of it first, or they would wait
            refused = error
        call = Call(FIND, number, self.names, MISSING[missing], refused is not None)
        received = yield self.counts(call, dealt)
        if refused is not None or dealt is None:
            assert refused is not None
            raise reported(refused)
        tensors = [dealt.ids, dealt.where, *kept]
        plan = _Plan(number, self._by_rank(received.tolist()), tensors)
        return Found(ids, counts, dealt.where, self.remember(pack(number, received.tolist(), tensors), plan))

    def _by_rank(self, counts: list[int]) -> list[list[int]]:
        k = len(self.tables)
        return [counts[r * k : (r + 1) * k] for r in range(self.ranks)]

    def _plan(self, found: Found) -> _Plan:
        recent = self.recall(found)
        if recent is not None:
            return recent
        number, values, tensors = unpack(found)
        if len(values) != len(self.tables) * self.ranks or len(tensors) < 3:
            raise ConfigError(f"found must be a result of find of a group of {len(self.tables)} tables")
        return _Plan(number, self._by_rank(values), tensors)

    def counts(self, call: Call, mine: Any) -> Send:
        k = len(self.tables)
        sizes = torch.zeros(k, dtype=torch.int64, device="cpu") if mine is None else mine.sizes.long().cpu()
        return Send("id_sizes", call, sizes.repeat(self.ranks), [k] * self.ranks, [k] * self.ranks)

    def _wired(self, features: Features) -> list[tuple[list[int], Features]]:
        """For each local group: the numbers of the features that it serves, and their `Features`."""
        found = self._wirings.get(features)
        if found is None:
            found = []
            for _, places in self._groups:
                own = [f for f, table in enumerate(features.tables) if table in places]
                pick = lambda values, own=own: tuple(values[f] for f in own) if values else ()  # noqa: E731
                tables = tuple(places.index(features.tables[f]) for f in own)
                wired = Features(
                    tables, pick(features.combiners), pick(features.columns), features.width, features.padding,
                    pick(features.lengths),
                )  # fmt: skip
                found.append((own, wired))
            self._wirings[features] = found
        return found

    def _some(self, values: Tensor, sizes: Sequence[int], own: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The elements of the features ``own``, and their counts."""
        counts = torch.tensor([sizes[f] for f in own], dtype=torch.int64, device="cpu")
        if len(own) == len(sizes):
            return values.contiguous(), counts
        parts = values.split(list(sizes))
        return torch.cat([values[:0], *(parts[f] for f in own)]), counts

    # --- reading ------------------------------------------------------------------------------------------------------

    def rows_steps(self, found: Found, features: Features, *, missing: Missing) -> Steps[Tensor]:
        yield from no_exchanges()
        plan = self._plan(found)
        sizes = found.sizes(features)
        out: Tensor | None = None
        for number, (group, _) in enumerate(self._groups):
            own, wired = self._wired(features)[number]
            ids, counts = self._some(found.ids, sizes, own)
            rows = group.rows(Found(ids, counts, *plan.kept[2 * number : 2 * number + 2]), wired, missing=missing)
            if len(self._groups) == 1:
                return rows
            out = torch.empty(found.ids.numel(), self.dim, device=rows.device) if out is None else out
            parts = out.split(sizes)
            for f, part in zip(own, rows.split(counts.tolist()), strict=True):
                parts[f].copy_(part)
        assert out is not None
        return out

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
        yield from no_exchanges()
        plan = self._plan(found)
        sizes = found.sizes(features)
        for number, (group, _) in enumerate(self._groups):
            own, wired = self._wired(features)[number]
            ids, counts = self._some(found.ids, sizes, own)
            at, factors = offsets, weights
            if len(own) != len(sizes):
                lengths = offsets.diff().view(len(sizes), -1)[own].reshape(-1)
                at = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
                factors = None if weights is None else self._some(weights, sizes, own)[0]
            some = Found(ids, counts, *plan.kept[2 * number : 2 * number + 2])
            marked = marks
            if marks is not None and len(own) != len(sizes):
                marked = marks.new_empty(ids.numel(), marks.shape[1])
            more = {} if marked is None else {"marks": marked}  # groups without max pooling do not accept the argument
            group.pooled(some, wired, at, factors, out, missing=missing, **more)
            if marks is not None and marked is not None and marked is not marks:
                parts = marks.split(sizes)
                for f, part in zip(own, marked.split(counts.tolist()), strict=True):
                    parts[f].copy_(part)

    def inserted(self, found: Found, create: Callable[[Tensor], Tensor]) -> Tensor:
        """The rows of one table's ids. ``create(ids)`` inserts them on every rank, in the order of requesting ranks."""
        plan = self._plan(found)

        def steps() -> Steps[Tensor]:
            n = plan.ids.numel()
            call = Call(ROWS, plan.number, self.names, 3)
            recv = [sum(own) for own in plan.counts]
            return (yield Send("ids", call, plan.ids.repeat(self.ranks), [n] * self.ranks, recv))

        for ids in self.together([steps()])[0].to(self.device).split([sum(own) for own in plan.counts]):
            create(ids)
        return self.tables[0].table.lookup(found.ids.to(self.device))

    # --- updating -----------------------------------------------------------------------------------------------------

    def update_steps(
        self, parts: Sequence[Part], *, step: Step, each: Literal["sum", "occurrence"] = "sum"
    ) -> Steps[None]:
        refused: Exception | None = None
        finds: list[tuple[_Plan, Tensor]] = []
        try:
            self.check_update(each)
            for plan, own in self.by_find(parts, lambda part: self._plan(part.found)):
                flat = add_gradients(own, plan.ids.numel(), self.dim)
                for k, values in enumerate(flat.split([n * self.dim for n in plan.counts[self.rank]])):
                    self.check_finite(values, [(k, values)])
                finds.append((plan, self.exchange.cast(flat)))
        except Exception as error:  # the other ranks must learn of it first, or they would wait
            refused = error
            finds = []
        detail = checksum([plan.number for plan, _ in finds])
        call = Call(UPDATE, finds[0][0].number if finds else 0, self.names, detail, refused is not None)
        item = self.exchange.backward_dtype.itemsize
        sizes = [
            [(sum(plan.counts[r]) * 8, _aligned(sum(plan.counts[r]) * self.dim * item)) for plan, _ in finds]
            for r in range(self.ranks)
        ]
        recv = [sum(a + b for a, b in own) for own in sizes]
        mine = recv[self.rank]
        sent = room_for(mine * self.ranks, torch.uint8, self.device)
        for begin in range(0, mine * self.ranks, max(1, mine)):
            at = begin
            for (plan, flat), (ids, grads) in zip(finds, sizes[self.rank], strict=True):
                sent[at : at + ids].copy_(plan.ids.view(torch.uint8))
                sent[at + ids : at + ids + flat.numel() * item].copy_(flat.view(torch.uint8))
                at += ids + grads
        came = yield Send("gradients", call, sent, [mine] * self.ranks, recv)
        if refused is not None:
            raise reported(refused)
        room = iter(came.to(self.device).split([size for own in sizes for pair in own for size in pair]))
        for rank in range(self.ranks):
            given = []
            for plan, _ in finds:
                n, ids, raw = sum(plan.counts[rank]), next(room).view(torch.int64), next(room)
                grads = raw[: n * self.dim * item].view(self.exchange.backward_dtype)
                if n:
                    given.append((ids, plan.counts[rank], self.exchange.as_float(grads)))
            if given:
                update_sums(self._groups, given, step)


def _aligned(size: int) -> int:
    """``size`` in bytes, rounded up to the alignment of ids."""
    return -(-size // 8) * 8
