"""`AllToAllGroup`: tables over ranks that are found, read and updated with one exchange per direction for all."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError, DeadlineError, PeerError
from shoal.sharded.all_to_all.bags import add_gradients, pool_rows, take_rows
from shoal.sharded.all_to_all.exchange import FIND, ROWS, UPDATE, Call
from shoal.sharded.all_to_all.local import Local
from shoal.sharded.all_to_all.plan import Dealt, Plan, deal_out
from shoal.table.protocol import Features, Found, Group, Missing, Part, Step, Traits, group_of

_MISSING = {"zeros": 1, "initial": 2}
_TOLD = "The other ranks were told that this rank refused its part."


class AllToAllGroup:
    """Tables of one ``dim`` over the same ranks.

    ``find`` sends counts and ids (two exchanges), ``rows`` and ``pooled`` get the rows as they are then (one), and
    ``update`` sends gradients (one), whatever the number of tables. Every rank makes every call, also one without ids.
    Each exchange carries the number of its find and the names of the tables: ranks in different calls raise, all of
    them, before anything was changed. So they do when one of them refuses its input.

    An update makes a step for each distinct id and rank, on the sum of that rank's gradients over all parts, rank 0's
    first.
    """

    def __init__(self, tables: tuple[Any, ...]) -> None:
        self.tables = tables
        self.dim: int = tables[0].dim_size
        self._exchange = tables[0].exchange
        self._rank, self._ranks = tables[0].rank, tables[0].world_size
        self._names = tuple(table.name for table in tables)
        self._local = Local([table.table for table in tables], self._ranks)
        self._blocks = self._ranks * len(tables)
        self.traits = Traits(
            device=self._local.device, collective=True, remote=True, trains=self._local.trains, local_state=False
        )

    # --- finding ------------------------------------------------------------------------------------------------------

    def find(self, ids: Tensor, counts: Tensor, features: Features, *, missing: Missing) -> Found:
        number = self.tables[0].next_find()
        refused: Exception | None = None
        try:
            dealt = self._deal_out(ids, counts, features)
        except Exception as error:  # told to the others first, which would wait otherwise
            refused = error
            nobody = torch.empty(0, dtype=torch.int64, device=self._local.device)
            dealt = Dealt(nobody.int(), nobody, torch.zeros(self._blocks, dtype=torch.int32, device=nobody.device))
        call = Call(FIND, number, self._names, _MISSING[missing], refused is not None)
        k = len(self.tables)
        with self._exchange.ranks.turn:
            sizes = self._exchange.counts(call, dealt.sizes, k)
            if refused is not None:
                refused.add_note(_TOLD)
                raise refused
            came = self._exchange.counted_ids(dealt.ids, dealt.sizes, sizes, k)
        came = came.to(self._local.device)
        asked, served = dealt.sizes.tolist(), sizes.tolist()
        for place, table in enumerate(self.tables):
            table.last_spread = asked[place::k], served[place::k]
        kept = self._local.find(came, served, missing=missing)
        return Found(ids, counts, dealt.where, Plan(number, asked, served, came, kept).packed())

    def refused(self, error: Exception) -> Exception:
        """``error``, to be raised in place of a `find`, once the other ranks, which are in theirs, have been told.

        One that they know of already, since it came from them or from a call of this group, is not told again.
        """
        if isinstance(error, PeerError | DeadlineError) or _TOLD in getattr(error, "__notes__", ()):
            return error
        error.add_note(_TOLD)
        call = Call(FIND, self.tables[0].next_find(), self._names, _MISSING["zeros"], True)
        sizes = torch.zeros(self._blocks, dtype=torch.int32, device=self._local.device)
        self._exchange.counts(call, sizes, len(self.tables))
        return error

    def _deal_out(self, ids: Tensor, counts: Tensor, features: Features) -> Dealt:
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise ConfigError(f"tables {self._named()}: ids must be int64 [N], got {ids.dtype} {list(ids.shape)}")
        sizes = counts.tolist()
        if len(sizes) != len(features.tables) or min(sizes, default=0) < 0 or sum(sizes) != ids.numel():
            raise ConfigError(
                f"tables {self._named()}: counts must be one per feature ({len(features.tables)}) and add up to the "
                f"{ids.numel()} ids, got {sizes}"
            )
        if not all(0 <= table < len(self.tables) for table in features.tables):
            raise ConfigError(f"tables {self._named()}: features must read tables 0..{len(self.tables) - 1}")
        return deal_out(ids.contiguous(), sizes, features, len(self.tables), self._ranks, self.dim)

    def _named(self) -> str:
        return ", ".join(map(repr, self._names))

    # --- reading ------------------------------------------------------------------------------------------------------

    def rows(self, found: Found, features: Features, *, missing: Missing) -> Tensor:
        return take_rows(self._rows_of(found, missing), found.where, self.dim, features.padding is not None)

    def pooled(
        self,
        found: Found,
        features: Features,
        offsets: Tensor,
        weights: Tensor | None,
        out: Tensor,
        *,
        missing: Missing,
    ) -> None:
        pool_rows(self._rows_of(found, missing), found, features, offsets, weights, out, self.dim)

    def inserted(self, found: Found, create: Callable[[Tensor], Tensor]) -> Tensor:
        """The rows of one table's ids, from ``create(ids)`` on the rank that owns them, which may make new ones."""
        rows = self._rows_of(found, "initial", lambda plan: create(plan.came).reshape(-1))
        return take_rows(rows, found.where, self.dim, False)

    def _rows_of(self, found: Found, missing: Missing, read: Callable[[Plan], Tensor] | None = None) -> Tensor:
        """Flat: the row of each distinct id that this rank asked for, where ``found.where`` says."""
        plan = Plan.of(found, self._blocks)
        refused: Exception | None = None
        served, asked = (self._floats(counts, plan) for counts in (plan.served, plan.asked))
        try:
            if read is not None:
                flat = read(plan)
            else:
                flat = self._local.rows(plan.came, plan.served, plan.kept, missing=missing)
        except Exception as error:
            refused, flat = error, torch.zeros(sum(served), device=self._local.device)
        call = Call(ROWS, plan.number, self._names, _MISSING[missing], refused is not None)
        rows = self._exchange.rows(call, flat, served, asked)
        if refused is not None:
            refused.add_note(_TOLD)
            raise refused
        return rows.to(found.ids.device)

    def _floats(self, counts: Sequence[int], plan: Plan) -> list[int]:
        return [n * self.dim for n in plan.per_rank(counts, self._ranks)]

    # --- updating -----------------------------------------------------------------------------------------------------

    def update(self, parts: Sequence[Part], *, step: Step, each: Literal["sum", "occurrence"] = "sum") -> None:
        """One step per rank and distinct id. ``each`` must be "sum": an id is sent once for all of its occurrences."""
        refused: Exception | None = None
        plans: list[Plan] = []
        flats: list[Tensor] = []
        try:
            plans, flats = self._gradients(parts, each)
        except Exception as error:  # told to the others first, which would wait otherwise
            refused = error
            plans = self._plans(parts)
            flats = [torch.zeros(sum(plan.asked) * self.dim, device="cpu") for plan in plans]
        numbers = [plan.number for plan in plans]
        told = zlib.crc32(repr(numbers).encode()) if len(numbers) > 1 else 0
        call = Call(UPDATE, numbers[0] if numbers else 0, self._names, told, refused is not None)
        asked, served = ([self._floats(getattr(plan, what), plan) for plan in plans] for what in ("asked", "served"))
        flat = flats[0] if len(flats) == 1 else _by_rank(flats, asked, self._ranks)
        send, recv = ([sum(column) for column in zip(*lists, strict=True)] or [0] * self._ranks
                      for lists in (asked, served))  # fmt: skip
        came = self._exchange.gradients(call, self._exchange.cast(flat), send, recv)
        if refused is not None:
            refused.add_note(_TOLD)
            raise refused
        came = came.to(self._local.device)
        if len(plans) == 1:
            self._local.update(plans[0].came, plans[0].served, plans[0].kept, came, step)
            return
        if not plans:
            return
        k = len(self.tables)
        grads = iter(came.split([size for rank in zip(*served, strict=True) for size in rank]))
        ids = [plan.came.split(plan.per_rank(plan.served, self._ranks)) for plan in plans]
        for rank in range(self._ranks):
            finds = [
                (ids[p][rank], plan.served[rank * k : (rank + 1) * k], next(grads)) for p, plan in enumerate(plans)
            ]
            self._local.update_sums(finds, step)

    def _plans(self, parts: Sequence[Part]) -> list[Plan]:
        """Of the finds of the parts, in their order, each one once; none of what cannot be read."""
        plans: dict[int, Plan] = {}
        for part in parts:
            try:
                plan = Plan.of(part.found, self._blocks)
            except Exception:
                return []
            plans[plan.number] = plan
        return [plans[number] for number in sorted(plans)]

    def _gradients(self, parts: Sequence[Part], each: str) -> tuple[list[Plan], list[Tensor]]:
        """The finds of the parts in their order, and for each the summed gradients of the ids that it asked for."""
        if each != "sum":
            raise ConfigError(
                f"tables {self._named()}: each must be 'sum' in an update over ranks, which makes one step per "
                f"distinct id; got {each!r}"
            )
        if not self.traits.trains:
            raise ConfigError(f"tables {self._named()}: serving tables take no gradients")
        by_find: dict[int, tuple[Plan, list[Part]]] = {}
        for part in parts:
            plan = Plan.of(part.found, self._blocks)
            by_find.setdefault(plan.number, (plan, []))[1].append(part)
        found = [by_find[number] for number in sorted(by_find)]
        flats = [add_gradients(own, sum(plan.asked), self.dim) for plan, own in found]
        for (plan, _), flat in zip(found, flats, strict=True):
            self._check_finite(flat, plan)
        return [plan for plan, _ in found], flats

    def _check_finite(self, flat: Tensor, plan: Plan) -> None:
        """Refuses NaN and infinity for tables that do, before any rank has changed anything."""
        strict = [getattr(table.table, "on_bad_gradient", "ignore") == "raise" for table in self.tables]
        if not any(strict) or flat.numel() == 0 or bool(torch.isfinite(flat.sum())):
            return
        blocks = flat.split([n * self.dim for n in plan.asked])
        for block, values in enumerate(blocks):
            name = self._names[block % len(strict)]
            if strict[block % len(strict)] and not bool(torch.isfinite(values).all()):
                raise ConfigError(
                    f"table {name!r}: a gradient holds NaN or infinity; nothing was applied, on any rank. Clip it, or "
                    "set on_bad_gradient='skip'"
                )


def _by_rank(flats: Sequence[Tensor], sizes: Sequence[Sequence[int]], ranks: int) -> Tensor:
    """Rank after rank, and for each rank find after find."""
    parts = [flat.split(list(own)) for flat, own in zip(flats, sizes, strict=True)]
    if not parts:
        return torch.empty(0, device="cpu")
    return torch.cat([part[rank] for rank in range(ranks) for part in parts])


class OneRankGroup:
    """The group of the local tables under another name: what `AllToAllGroup` means on one rank."""

    def __init__(self, tables: tuple[Any, ...]) -> None:
        self.tables = tables
        self._group: Group = group_of([table.table for table in tables])
        self.dim = self._group.dim
        self.traits = Traits(
            device=self._group.traits.device, collective=True, trains=self._group.traits.trains,
            capturable=self._group.traits.capturable,
        )  # fmt: skip
        self.find = self._group.find
        self.rows = self._group.rows
        self.pooled = self._group.pooled
        self.update = self._group.update

    def refused(self, error: Exception) -> Exception:
        return error


def make_group(tables: tuple[Any, ...]) -> Group:
    """The group of tables over the same ranks."""
    return OneRankGroup(tables) if tables[0].world_size == 1 else AllToAllGroup(tables)
