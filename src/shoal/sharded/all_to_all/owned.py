"""`OwnedGroup`: tables held by single ranks, whole or as columns; bags are pooled where the rows are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.sharded.all_to_all.base import MISSING, RankGroup, checksum, reported
from shoal.sharded.all_to_all.exchange import FIND, ROWS, UPDATE, Call
from shoal.sharded.all_to_all.held import Asked, Bucket, Held, Wired
from shoal.sharded.all_to_all.lists import Lists, bag_lists, distinct_lists
from shoal.sharded.all_to_all.plan import pack, unpack
from shoal.sharded.all_to_all.rounds import Send, Steps, room_for
from shoal.sharded.bags import add_gradients, pool_rows, take_rows
from shoal.table.protocol import Features, Found, Missing, Part, Step


@dataclass(frozen=True)
class _Plan:
    """The unpacked contents of a `Found`."""

    number: int
    bags: int
    counts: list[int]
    """``[K]``: the number of ids that this rank sent, by table."""
    asked: list[list[Asked]]
    """Requests to this rank, by sending rank and bucket."""
    kept: list[list[list[Tensor]]]
    """The tensors that the buckets keep for them, in the same order."""


class OwnedGroup(RankGroup):
    """Tables of one ``dim``, each on one rank or cut into columns on several.

    ``find`` sends counts and ids (two exchanges), as bags if it is given their offsets; ``pooled`` then gets pooled
    rows and ``update`` sends their gradients (one exchange each), whatever the number of tables and slices. Without
    offsets, or with weights, ranks exchange rows, once per distinct id.

    An update makes one step per distinct id and rank, with the sum of that rank's gradients over all parts, in the
    order of the ranks.
    """

    def __init__(self, tables: tuple[Any, ...]) -> None:
        ranks, dim = tables[0].world_size, tables[0].dim_size
        self._buckets: list[list[Bucket]] = [[] for _ in range(ranks)]
        held: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(ranks)]
        firsts = []
        for k, table in enumerate(tables):
            slices = table.way.slices(dim, ranks)
            firsts.append((slices[0].rank, k))
            for rank, begin, end in slices:
                held[rank].setdefault(end - begin, []).append((k, begin))
        for rank, widths in enumerate(held):
            for width, own in sorted(widths.items()):
                numbers, begins = zip(*own, strict=True)
                self._buckets[rank].append(Bucket(width, numbers, begins))
        self._order = [k for _, k in sorted(firsts)]
        """The order in which the rows of uncut tables are received."""
        self._cut = any(bucket.width != dim for own in self._buckets for bucket in own)
        self._held = [Held(bucket, tables) for bucket in self._buckets[tables[0].rank]]
        self._wirings: dict[Features, list[list[Wired]]] = {}
        self._last: tuple[Features | None, list[list[Wired]]] = (None, [])
        super().__init__(
            tables, tables[0].device, all(not table.table.serving for table in tables), takes_bags=True
        )  # fmt: skip

    def _wired(self, features: Features) -> list[list[Wired]]:
        last, wired = self._last
        if last is features:
            return wired
        found = self._wirings.get(features)
        if found is None:
            made = [[Wired.of(bucket, features) for bucket in own] for own in self._buckets]
            found = self._wirings[features] = made
        self._last = features, found
        return found

    # --- finding ------------------------------------------------------------------------------------------------------

    def find_steps(self, ids: Tensor, counts: Tensor, features: Features, *, missing: Missing) -> Steps[Found]:
        number = self.tables[0].next_find()
        refused: Exception | None = None
        lists: Lists | None = None
        try:
            ids = ids.to(self.device)
            sizes = self.sizes(ids, counts, features)
            if counts.shape[0] == len(features.tables):
                lists = distinct_lists(ids, sizes, features, self._order, self.dim)
            else:
                lists = bag_lists(ids, counts, sizes, features, self._order, self.named())
        except Exception as error:  # the other ranks must learn of it first, or they would wait
            refused = error
        call = Call(FIND, number, self.names, MISSING[missing], refused is not None)
        received = yield self.counts(call, lists)
        if refused is not None or lists is None:
            assert refused is not None
            raise reported(refused)
        wired, mine = self._wired(features), self._buckets[self.rank]
        each = 1 + sum(len(bucket.tables) for bucket in mine)
        heads = [row.tolist() for row in received.view(self.ranks, each)]
        flat, send = self._sent(lists, wired)
        recv = [sum(_sizes(head, mine, wired[self.rank])) for head in heads]
        came = yield Send("ids", None, flat, send, recv)
        came = came.to(self.device)
        served = [sum(head[1:]) for head in heads]
        for k, table in enumerate(self.tables):
            asked = [lists.counts[k] if any(k in b.tables for b in own) else 0 for own in self._buckets]
            table.last_spread = asked, served
        blocks = self._asked(heads, came, wired)
        kept = [
            [held.find(wire, asked, missing=missing)
             for held, wire, asked in zip(self._held, wired[self.rank], own, strict=True)]
            for own in blocks
        ]  # fmt: skip
        values = [lists.bags, *lists.counts, *(word for head in heads for word in head)]
        every = [came, *(tensor for own in kept for tensors in own for tensor in tensors)]
        packed = pack(number, values, every)
        self.remember(packed, _Plan(number, lists.bags, lists.counts, blocks, kept))
        return Found(ids, counts, lists.where, packed)

    def counts(self, call: Call, mine: Any) -> Send:
        """Send every rank the number of bags, and the number of ids of each table that it holds."""
        words: list[int] = []
        for own in self._buckets:
            words.append(-1 if mine is None else mine.bags)
            words += [0 if mine is None else mine.counts[k] for bucket in own for k in bucket.tables]
        send = [1 + sum(len(bucket.tables) for bucket in own) for own in self._buckets]
        flat = torch.tensor(words, dtype=torch.int64, device="cpu")
        return Send("id_sizes", call, flat, send, [send[self.rank]] * self.ranks)

    def _sent(self, lists: Lists, wired: list[list[Wired]]) -> tuple[Tensor, list[int]]:
        """The values for every rank: for each of its buckets the lengths of bags, then ids."""
        of_table = dict(zip(self._order, lists.ids.split([lists.counts[k] for k in self._order]), strict=True))
        pieces, send = [], []
        for rank, own in enumerate(self._buckets):
            mine = []
            for bucket, wire in zip(own, wired[rank], strict=True):
                if lists.lengths is not None:
                    mine.append(lists.lengths[wire.order].view(-1))
                mine += [of_table[k] for k in bucket.tables]
            send.append(sum(piece.numel() for piece in mine))
            pieces += mine
        return torch.cat([lists.ids[:0], *pieces]), send

    def _asked(self, heads: Sequence[Sequence[int]], came: Tensor, wired: list[list[Wired]]) -> list[list[Asked]]:
        """Each rank's requests to the buckets of this rank."""
        mine, wires = self._buckets[self.rank], wired[self.rank]
        found, at = [], 0
        for head in heads:
            own, words = [], iter(head[1:])
            for bucket, wire in zip(mine, wires, strict=True):
                counts = [next(words) for _ in bucket.tables]
                offsets = None
                if head[0] >= 0:
                    lengths = came[at : at + head[0] * len(wire.order)]
                    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
                    at += lengths.numel()
                ids = came[at : at + sum(counts)]
                at += ids.numel()
                own.append(Asked(ids, counts, head[0], offsets))
            found.append(own)
        return found

    def _plan(self, found: Found, features: Features) -> _Plan:
        recent = self.recall(found)
        if recent is not None:
            return recent
        number, values, tensors = unpack(found)
        mine, k = self._buckets[self.rank], len(self.tables)
        each = 1 + sum(len(bucket.tables) for bucket in mine)
        if len(values) != 1 + k + each * self.ranks or not tensors:
            raise ConfigError(f"found must be a result of find of a group of {k} tables")
        words = values[1 + k :]
        heads = [words[r * each : (r + 1) * each] for r in range(self.ranks)]
        asked = self._asked(heads, tensors[0], self._wired(features))
        rest = iter(tensors[1:])
        kept = [[[next(rest) for _ in range(held.kept)] for held in self._held] for _ in range(self.ranks)]
        return _Plan(number, values[0], values[1 : 1 + k], asked, kept)

    # --- reading ------------------------------------------------------------------------------------------------------

    def rows_steps(self, found: Found, features: Features, *, missing: Missing) -> Steps[Tensor]:
        plan = self._plan(found, features)
        flat = yield from self._answers(plan, features, missing, False)
        where = self._where(plan, found, features)
        return take_rows(self._joined(flat, plan), where, self.dim, features.padding is not None)

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
        plan = self._plan(found, features)
        flat = yield from self._answers(plan, features, missing, weights is None)
        if weights is None and plan.bags == 0:
            return
        if weights is None and plan.bags > 0:
            for span, bucket, wire in self._spans(plan, features, True):
                block = flat[span].view(plan.bags, -1)
                for i, f in enumerate(wire.order):
                    begin = features.columns[f] + bucket.begins[wire.pooled.tables[i]]
                    out[:, begin : begin + bucket.width] = block[:, i * bucket.width : (i + 1) * bucket.width]
            return
        found = found._replace(where=self._where(plan, found, features))
        pool_rows(self._joined(flat, plan), found, features, offsets, weights, out, self.dim)

    def inserted(self, found: Found, create: Callable[[Tensor], Tensor]) -> Tensor:
        """The rows of one table's ids, from ``create(ids)`` on the ranks that hold them; it can insert new rows."""
        features = Features()
        plan = self._plan(found, features)
        flat = self.together([self._answers(plan, features, "initial", False, create)])[0]
        return take_rows(self._joined(flat, plan), found.where, self.dim, False)

    def _answers(
        self,
        plan: _Plan,
        features: Features,
        missing: Missing,
        bags: bool,
        create: Callable[[Tensor], Tensor] | None = None,
    ) -> Steps[Tensor]:
        """The bags or rows that this rank requested, flat, by rank and bucket."""
        wires, refused = self._wired(features)[self.rank], None
        sizes = [self._served(own, wires, bags) for own in plan.asked]
        flat = self._room(sum(map(sum, sizes)))
        try:
            room = iter(flat.split([size for own in sizes for size in own]))
            for own, kept in zip(plan.asked, plan.kept, strict=True):
                for asked, wire, held, tensors in zip(own, wires, self._held, kept, strict=True):
                    to = next(room)
                    if bags and asked.bags >= 0:
                        if to.numel():
                            held.pooled(wire, asked, tensors, to.view(asked.bags, -1), missing=missing)
                    elif create is not None:
                        to.copy_(create(asked.ids).reshape(-1))
                    elif to.numel():
                        held.rows(wire, asked, tensors, to.view(-1, held.bucket.width), missing=missing)
        except Exception as error:
            refused = error
        call = Call(ROWS, plan.number, self.names, 2 * MISSING[missing] + bags, refused is not None)
        recv = [0] * self.ranks
        for rank, size in self._expected(plan, features, bags):
            recv[rank] += size
        came = yield Send("embeddings", call, flat, [sum(own) for own in sizes], recv)
        if refused is not None:
            raise reported(refused)
        return came

    def _served(self, asked: Sequence[Asked], wires: Sequence[Wired], bags: bool) -> list[int]:
        """The number of floats between one rank and each bucket of this rank."""
        own = zip(asked, wires, self._held, strict=True)
        return [_floats(part, wire, held.bucket.width, bags) for part, wire, held in own]

    def _expected(self, plan: _Plan, features: Features, bags: bool) -> Iterator[tuple[int, int]]:
        """The number of floats between this rank and each bucket of each rank, for this rank's requests."""
        for rank, (own, wires) in enumerate(zip(self._buckets, self._wired(features), strict=True)):
            for bucket, wire in zip(own, wires, strict=True):
                if bags and plan.bags >= 0:
                    yield rank, plan.bags * len(wire.order) * bucket.width
                else:
                    yield rank, sum(plan.counts[k] for k in bucket.tables) * bucket.width

    def _spans(self, plan: _Plan, features: Features, bags: bool) -> Iterator[tuple[slice, Bucket, Wired]]:
        wires = (wire for own in self._wired(features) for wire in own)
        buckets = (bucket for own in self._buckets for bucket in own)
        at = 0
        for bucket, wire, (_, size) in zip(buckets, wires, self._expected(plan, features, bags), strict=True):
            yield slice(at, at + size), bucket, wire
            at += size

    def _joined(self, flat: Tensor, plan: _Plan) -> Tensor:
        """Join received slices into rows, in the group's order of tables."""
        if not self._cut:
            return flat
        out = self._room(sum(plan.counts) * self.dim).view(-1, self.dim)
        at = 0
        for own in self._buckets:
            for bucket in own:
                for k, begin in zip(bucket.tables, bucket.begins, strict=True):
                    size = plan.counts[k] * bucket.width
                    part = flat[at : at + size].view(-1, bucket.width)
                    out[self._rows_of(plan, k), begin : begin + bucket.width] = part
                    at += size
        return out.view(-1)

    def _rows_of(self, plan: _Plan, k: int) -> slice:
        begin = sum(plan.counts[other] for other in self._order[: self._order.index(k)])
        return slice(begin, begin + plan.counts[k])

    def _where(self, plan: _Plan, found: Found, features: Features) -> Tensor:
        """`Found.where`, computed here for finds of bags, whose ``where`` is empty."""
        if plan.bags < 0:
            return found.where
        sizes, n = found.sizes(features), found.ids.numel()
        order = [f for k in self._order for f in range(len(sizes)) if features.tables[f] == k]
        at = torch.arange(n, device=found.ids.device).split(sizes)
        every = torch.cat([at[f] for f in order]) if order else torch.arange(0, device=found.ids.device)
        if features.padding is not None:
            every = every[found.ids[every] != features.padding]
        where = torch.full((n,), -1, dtype=torch.int32, device=found.ids.device)
        where[every] = torch.arange(every.numel(), dtype=torch.int32, device=found.ids.device) * self.dim
        return where

    def _room(self, size: int) -> Tensor:
        return room_for(size, torch.float32, self.device)

    # --- updating -----------------------------------------------------------------------------------------------------

    def update_steps(
        self, parts: Sequence[Part], *, step: Step, each: Literal["sum", "occurrence"] = "sum"
    ) -> Steps[None]:
        refused: Exception | None = None
        finds: list[tuple[_Plan, Features, bool]] = []
        given: list[list[Part]] = []
        try:
            self.check_update(each)
            for plan, own in self.by_find(parts, lambda part: self._plan(part.found, part.features)):
                bags = all(part.offsets is not None and part.weights is None for part in own)
                finds.append((plan, own[0].features, bags))
                given.append(own)
        except Exception as error:  # the other ranks must learn of it first, or they would wait
            refused = error
        flat, send, room = self._laid_out(finds)
        try:
            for (plan, _, bags), own, to in zip(finds, given, room, strict=True):
                self._gradients(plan, own, bags, to)
        except Exception as error:
            refused = refused or error
            flat.zero_()
        detail = checksum([(plan.number, bags) for plan, _, bags in finds])
        call = Call(UPDATE, finds[0][0].number if finds else 0, self.names, detail, refused is not None)
        sizes = [
            [self._served(plan.asked[rank], self._wired(features)[self.rank], bags) for plan, features, bags in finds]
            for rank in range(self.ranks)
        ]
        came = yield Send("gradients", call, self.exchange.cast(flat), send, [sum(map(sum, own)) for own in sizes])
        if refused is not None:
            raise reported(refused)
        came = self.exchange.as_float(came).to(self.device)
        room = iter(came.split([size for own in sizes for find in own for size in find]))
        for rank in range(self.ranks):
            grads = [[next(room) for _ in self._held] for _ in finds]
            for b, held in enumerate(self._held):
                asks = []
                for (plan, features, bags), own in zip(finds, grads, strict=True):
                    asked, wire = plan.asked[rank][b], self._wired(features)[self.rank][b]
                    bagged = bags and asked.bags >= 0
                    shape = (asked.bags, wire.pooled.width) if bagged else (-1, held.bucket.width)
                    asks.append((wire, asked, plan.kept[rank][b], own[b].view(shape), bagged))
                held.update(asks, step)

    def _laid_out(self, finds: Sequence[tuple[_Plan, Features, bool]]) -> tuple[Tensor, list[int], list[list[Tensor]]]:
        """A buffer for the gradients of finds, ordered by rank; the number of floats per rank; and, for each find, the
        parts of the buffer for each rank's buckets."""
        expected = [list(self._expected(*find)) for find in finds]
        order = [(rank, number, size) for number, own in enumerate(expected) for rank, size in own]
        order.sort(key=lambda one: one[:2])  # stable: within a rank and a find, the order of `_expected`
        flat = self._room(sum(size for _, _, size in order))
        send, room = [0] * self.ranks, [[] for _ in finds]
        for (rank, number, size), to in zip(order, flat.split([size for _, _, size in order]), strict=True):
            send[rank] += size
            room[number].append(to)
        return flat, send, room

    def _gradients(self, plan: _Plan, parts: Sequence[Part], bags: bool, room: Sequence[Tensor]) -> None:
        """Write the gradients of one find, for each bucket of each rank, to ``room``."""
        features, skipping = parts[0].features, self._skipping()
        if bags and plan.bags >= 0:
            shape = [plan.bags, features.width]
            for part in parts:
                if part.grad.dtype != torch.float32 or list(part.grad.shape) != shape:
                    raise ConfigError(f"grad must be float32 {shape}, got {part.grad.dtype} {list(part.grad.shape)}")
            grad = parts[0].grad if len(parts) == 1 else torch.stack([part.grad for part in parts]).sum(0)
            if skipping and not self.is_finite(grad):
                grad = grad.clone()
                for k, begin in zip(features.tables, features.columns, strict=True):
                    if k in skipping:
                        self._spoil_bad_rows(grad[:, begin : begin + self.dim])
            for (_, bucket, wire), to in zip(self._spans(plan, features, True), room, strict=True):
                block = to.view(plan.bags, len(wire.order) * bucket.width)
                blocks = []
                for i, (f, place) in enumerate(zip(wire.order, wire.pooled.tables, strict=True)):
                    begin = features.columns[f] + bucket.begins[place]
                    columns = block[:, i * bucket.width : (i + 1) * bucket.width]
                    columns.copy_(grad[:, begin : begin + bucket.width])
                    blocks.append((bucket.tables[place], columns))
                self.check_finite(to, blocks)
            return
        own = [
            part._replace(found=part.found._replace(where=self._where(plan, part.found, part.features)))
            for part in parts
        ]
        rows = add_gradients(own, sum(plan.counts), self.dim).view(-1, self.dim)
        if skipping and not self.is_finite(rows):
            for k in skipping:
                self._spoil_bad_rows(rows[self._rows_of(plan, k)])
        for (_, bucket, _), to in zip(self._spans(plan, features, False), room, strict=True):
            at, blocks = 0, []
            for k, begin in zip(bucket.tables, bucket.begins, strict=True):
                block = rows[self._rows_of(plan, k), begin : begin + bucket.width]
                to[at : at + block.numel()].view(block.shape).copy_(block)
                at += block.numel()
                blocks.append((k, block))
            self.check_finite(to, blocks)

    def _skipping(self) -> list[int]:
        """The tables that skip bad gradients, if there are tables in slices."""
        if not self._cut:
            return []
        return [k for k, table in enumerate(self.tables) if getattr(table.table, "on_bad_gradient", "") == "skip"]

    def _spoil_bad_rows(self, rows: Tensor) -> None:
        """Make all columns of a bad gradient NaN, so that all slices of the table skip it."""
        rows[~self.exchange.cast(rows).isfinite().all(1)] = torch.nan


def _sizes(head: Sequence[int], buckets: Sequence[Bucket], wired: Sequence[Wired]) -> Iterator[int]:
    """The number of int64 values received for each bucket."""
    words = iter(head[1:])
    for bucket, wire in zip(buckets, wired, strict=True):
        yield sum(next(words) for _ in bucket.tables) + max(0, head[0]) * len(wire.order)


def _floats(asked: Asked, wired: Wired, width: int, bags: bool) -> int:
    """The number of floats in one bucket's answer, and in its gradients."""
    return (asked.bags * len(wired.order) if bags and asked.bags >= 0 else sum(asked.counts)) * width
