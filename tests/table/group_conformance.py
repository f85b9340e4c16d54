"""The conformance suite of `shoal.table.protocol.Group`, which compares each kind with single CPU tables.

A test of a kind runs each of `CASES` with a `Kind`. Cases that need what a kind lacks (`erase`, say) end early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.errors import ConfigError
from shoal.table.pooling import pool_columns, row_gradients
from shoal.table.protocol import (
    EVERY,
    FIRSTN,
    MAX,
    MEAN,
    SQRTN,
    SUM,
    Features,
    Found,
    Part,
    Step,
    groups_of,
    marks_shape,
)

DIM = 4
SEED = 11


@dataclass
class Kind:
    """A kind of table. ``make(count, **options)`` gives that many empty tables of `DIM`, made with the options of
    ``shoal.HashTable``, among them ``seed``."""

    make: Callable[..., list[Any]]
    exact: bool = True
    """Results are those of CPU tables to the last bit; else to float32's precision."""
    device: str = "cpu"
    settle: Callable[[list[Any]], None] = field(default=lambda tables: [table.as_op() for table in tables])
    """Waits until updates are done; raises what they raised late."""
    has: frozenset[str] = frozenset({"initial", "occurrence", "lr_scale", "raises", "schedule"})
    """What not every kind can do."""
    bags: bool = False
    """Finds get the offsets of bags in place of counts, for kinds whose traits say ``takes_bags``."""
    rounds: int = 10
    """How often threads do what they do."""

    def same(self, ours: Tensor, want: Tensor) -> None:
        if self.exact:
            assert torch.equal(ours.cpu(), want)
        else:
            torch.testing.assert_close(ours.cpu(), want, rtol=1e-5, atol=1e-6)


class Batch:
    """Bags of several features over several tables, with everything that the calls of a group take."""

    def __init__(self, kind: Kind, tables: list[Any], features: Features, bags: int = 5, seed: int = 0, low: int = 0):
        ((self.group, places),) = groups_of(tables)
        assert places == list(range(len(tables)))
        make = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 5, (len(features.tables), bags), generator=make)
        n = int(lengths.sum())
        self.ids = torch.randint(low, low + 20, (n,), generator=make).to(kind.device)
        self.counts = lengths.sum(1)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)]).to(kind.device)
        self.weights = torch.rand(n, generator=make).to(kind.device)
        self.grad = torch.randn(bags, features.width, generator=make).to(kind.device)
        self.row_grad = torch.randn(n, DIM, generator=make).to(kind.device)
        self.features, self.bags, self.by_bags = features, bags, kind.bags

    def find(self, missing: Any = "zeros") -> Found:
        counts = self.offsets if self.by_bags else self.counts
        return self.group.find(self.ids, counts, self.features, missing=missing)

    def pooled(self, found: Found, weights: Tensor | None, missing: Any = "zeros") -> Tensor:
        out = torch.full((self.bags, self.features.width), 9.0, device=self.ids.device)
        self.group.pooled(found, self.features, self.offsets, weights, out, missing=missing)
        return out

    def marked(self, found: Found, weights: Tensor | None, missing: Any = "zeros") -> tuple[Tensor, Tensor]:
        """What is pooled, and its marks."""
        out = torch.full((self.bags, self.features.width), 9.0, device=self.ids.device)
        marks = torch.zeros(marks_shape(self.ids.numel(), DIM), dtype=torch.uint8, device=self.ids.device)
        self.group.pooled(found, self.features, self.offsets, weights, out, missing=missing, marks=marks)
        return out, marks

    def part(self, found: Found, weights: Tensor | None = None, marks: Tensor | None = None) -> Part:
        return Part(found, self.features, self.grad, self.offsets, weights, marks)

    def row_part(self, found: Found) -> Part:
        return Part(found, self.features, self.row_grad)


TWO = Features(tables=(0, 1), combiners=(SUM, MEAN), columns=(0, DIM), width=2 * DIM)
SHARED = Features(
    tables=(1, 0, 1), combiners=(SQRTN, SUM, MEAN), columns=(2 * DIM + 1, 0, DIM), width=3 * DIM + 3, padding=3
)
MIXED = Features(
    tables=(1, 0, 1, 0), combiners=(MAX, FIRSTN, MEAN, MAX), columns=(3 * DIM + 1, 0, 4 * DIM + 3, 2 * DIM),
    width=5 * DIM + 4, padding=3, lengths=(1, 2, 1, 1),
)  # fmt: skip


def judges(count: int, **options: Any) -> list[Any]:
    return [shoal.HashTable(DIM, seed=SEED, **options) for _ in range(count)]


def pair(kind: Kind, count: int = 2, **options: Any) -> tuple[list[Any], list[Any]]:
    """Tables of a kind, and CPU tables that the same is done to one by one."""
    return kind.make(count, seed=SEED, **options), judges(count, **options)


def fill(kind: Kind, tables: list[Any], judge: list[Any]) -> None:
    """Rows for half of the ids that batches ask for."""
    ids = torch.arange(0, 20, 2)
    for number, (table, plain) in enumerate(zip(tables, judge, strict=True)):
        values = torch.arange(ids.numel() * DIM).float().view(-1, DIM) / 7 - number
        table.assign(ids.to(kind.device), values.to(kind.device))
        plain.assign(ids, values)
    kind.settle(tables)


def want_rows(batch: Batch, judge: list[Any], start: list[Any] | None = None) -> Tensor:
    """The rows of a batch from tables one by one; unknown ids from ``start``, tables that have their initial rows."""
    out = []
    parts = batch.ids.cpu().split(batch.counts.tolist())
    for table, ids in zip(batch.features.tables, parts, strict=True):
        rows = judge[table].lookup(ids)
        if start is not None:
            unknown = ~judge[table].contains(ids)
            rows[unknown] = start[table].lookup(ids[unknown], insert_missing=True)
        out.append(rows)
    rows = torch.cat(out)
    if batch.features.padding is not None:
        rows[batch.ids.cpu() == batch.features.padding] = 0
    return rows


def host(part: Part) -> Part:
    found = Found(*(tensor.cpu() for tensor in part.found.tensors()))
    move = lambda tensor: None if tensor is None else tensor.cpu()  # noqa: E731
    return Part(found, part.features, part.grad.cpu(), move(part.offsets), move(part.weights), move(part.marks))


def apply(judge: list[Any], parts: list[Part], step: int = 0, dedup: bool = True) -> None:
    """What `Group.update` means, table by table."""
    ids: list[list[Tensor]] = [[] for _ in judge]
    grads: list[list[Tensor]] = [[] for _ in judge]
    for part in map(host, parts):
        rows = row_gradients(part, DIM)
        sizes = part.found.sizes(part.features)
        for table, own, grad in zip(part.features.tables, part.found.ids.split(sizes), rows.split(sizes), strict=True):
            keep = torch.ones_like(own, dtype=torch.bool)
            if part.features.padding is not None:
                keep = own != part.features.padding
            ids[table].append(own[keep])
            grads[table].append(grad[keep])
    for table, own, grad in zip(judge, ids, grads, strict=True):
        if own:
            table.apply_gradients(torch.cat(own), torch.cat(grad), step, enable_dedup=dedup)


def compare(kind: Kind, tables: list[Any], judge: list[Any], upto: int = 25) -> None:
    kind.settle(tables)
    ids = torch.arange(upto)
    for table, plain in zip(tables, judge, strict=True):
        kind.same(table.lookup(ids.to(kind.device)), plain.lookup(ids))


# --- reading ----------------------------------------------------------------------------------------------------------


def rows_are_those_of_lookups(kind: Kind) -> None:
    tables, judge = pair(kind)
    fill(kind, tables, judge)
    for features in (TWO, SHARED):
        batch = Batch(kind, tables, features)
        found = batch.find()
        kind.same(batch.group.rows(found, features, missing="zeros"), want_rows(batch, judge))


def unknown_ids_are_answered_with_their_initial_rows(kind: Kind) -> None:
    if "initial" not in kind.has:
        return
    tables, judge = pair(kind)
    fill(kind, tables, judge)
    for features in (TWO, SHARED):
        batch = Batch(kind, tables, features)
        found = batch.find("initial")
        want = want_rows(batch, judge, judges(2))
        kind.same(batch.group.rows(found, features, missing="initial"), want)
        for weights in (None, batch.weights):
            out = torch.full((batch.bags, features.width), 9.0)
            pool_columns(want, Found(*(t.cpu() for t in found.tensors())), features, batch.offsets.cpu(),
                         None if weights is None else weights.cpu(), out)  # fmt: skip
            torch.testing.assert_close(batch.pooled(found, weights, "initial").cpu(), out, rtol=1e-5, atol=1e-6)


def reading_changes_nothing(kind: Kind) -> None:
    tables, judge = pair(kind)
    fill(kind, tables, judge)
    batch = Batch(kind, tables, TWO)
    for _ in range(3):
        found = batch.find("initial")
        batch.group.rows(found, TWO, missing="initial")
        batch.pooled(found, None, "initial")
    kind.settle(tables)
    assert [table.size() for table in tables] == [10, 10]
    compare(kind, tables, judge)


def pooled_rows_are_sums_of_rows(kind: Kind) -> None:
    tables, judge = pair(kind)
    fill(kind, tables, judge)
    for features in (TWO, SHARED):
        batch = Batch(kind, tables, features, seed=3)
        found = batch.find()
        plain = Found(*(tensor.cpu() for tensor in found.tensors()))
        for weights in (None, batch.weights):
            want = torch.full((batch.bags, features.width), 9.0)
            pool_columns(want_rows(batch, judge), plain, features, batch.offsets.cpu(),
                         None if weights is None else weights.cpu(), want)  # fmt: skip
            torch.testing.assert_close(batch.pooled(found, weights).cpu(), want, rtol=1e-5, atol=1e-6)


def largest_and_first_rows_are_pooled(kind: Kind) -> None:
    tables, judge = pair(kind)
    fill(kind, tables, judge)
    for bags, missing in ((5, "zeros"), (40, "initial")):
        batch = Batch(kind, tables, MIXED, bags=bags, seed=bags)
        if not batch.group.traits.pools >= EVERY or (missing == "initial" and "initial" not in kind.has):
            return
        found = batch.find(missing)
        plain = Found(*(tensor.cpu() for tensor in found.tensors()))
        rows = want_rows(batch, judge, judges(2) if missing == "initial" else None)
        for weights in (None, batch.weights):
            want = torch.full((batch.bags, MIXED.width), 9.0)
            marks = torch.zeros(marks_shape(rows.shape[0], DIM), dtype=torch.uint8)
            pool_columns(
                rows, plain, MIXED, batch.offsets.cpu(), None if weights is None else weights.cpu(), want, marks
            )
            got, own = batch.marked(found, weights, missing)
            torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-6)
            largest = torch.tensor([kind == MAX for kind in MIXED.combiners]).repeat_interleave(batch.counts)
            largest &= batch.ids.cpu() != MIXED.padding
            assert torch.equal(own.cpu()[largest], marks[largest])


def rows_are_read_when_they_are_asked_for(kind: Kind) -> None:
    tables, judge = pair(kind)
    batch = Batch(kind, tables, TWO)
    found = batch.find()
    fill(kind, tables, judge)
    kind.same(batch.group.rows(found, TWO, missing="zeros"), want_rows(batch, judge))


def nothing_to_find_gives_nothing(kind: Kind) -> None:
    tables, judge = pair(kind)
    fill(kind, tables, judge)
    batch = Batch(kind, tables, TWO)
    none, counts = batch.ids[:0], torch.zeros(2, dtype=torch.int64)
    found = batch.group.find(none, counts, TWO, missing="initial")
    assert batch.group.rows(found, TWO, missing="initial").shape == (0, DIM)
    for bags in (3, 0):
        out = torch.full((bags, 2 * DIM), 9.0, device=kind.device)
        offsets = torch.zeros(2 * bags + 1, dtype=torch.int64, device=kind.device)
        batch.group.pooled(found, TWO, offsets, None, out, missing="initial")
        assert not out.any()
        batch.group.update([Part(found, TWO, out, offsets)], step=Step())
    batch.group.update([], step=Step())
    compare(kind, tables, judge)
    assert [table.size() for table in tables] == [10, 10]


# --- updating ---------------------------------------------------------------------------------------------------------


def updates_are_those_of_single_tables(kind: Kind) -> None:
    for optimizer in (shoal.Sgd(lr=0.5), shoal.Adagrad(lr=0.5)):
        tables, judge = pair(kind, optimizer=optimizer)
        fill(kind, tables, judge)
        for number, features in enumerate((TWO, SHARED, TWO)):
            batch = Batch(kind, tables, features, seed=number)
            part = batch.part(batch.find("initial"), batch.weights if number else None)
            batch.group.update([part], step=Step(number))
            apply(judge, [part], number)
            part = batch.row_part(batch.find("initial"))
            batch.group.update([part], step=Step(number))
            apply(judge, [part], number)
        compare(kind, tables, judge)


def gradients_reach_largest_and_first_rows(kind: Kind) -> None:
    for optimizer in (shoal.Sgd(lr=0.5), shoal.Adagrad(lr=0.5)):
        tables, judge = pair(kind, optimizer=optimizer)
        fill(kind, tables, judge)
        for number, bags in enumerate((5, 60, 5)):
            batch = Batch(kind, tables, MIXED, bags=bags, seed=number)
            if not batch.group.traits.pools >= EVERY:
                return
            found, weights = batch.find("initial"), batch.weights if number else None
            marks = batch.marked(found, weights, "initial")[1]
            parts = [batch.part(found, weights, marks)]
            if number == 2:  # the values that were read count, whatever happens to the rows
                other = Batch(kind, tables, TWO, seed=9)
                between = other.part(other.find("initial"))
                other.group.update([between], step=Step(number))
                apply(judge, [between], number)
                parts += [other.part(other.find("initial")), batch.row_part(found)]
            batch.group.update(parts, step=Step(number))
            apply(judge, parts, number)
        compare(kind, tables, judge)


def all_parts_make_one_step(kind: Kind) -> None:
    tables, judge = pair(kind, optimizer=shoal.Adagrad(lr=0.5))
    fill(kind, tables, judge)
    one, other = Batch(kind, tables, TWO, seed=1), Batch(kind, tables, SHARED, seed=2)
    parts = [one.part(one.find("initial")), other.part(other.find("initial"), other.weights)]
    parts.append(one.row_part(parts[0].found))
    one.group.update(parts, step=Step())
    apply(judge, parts)
    compare(kind, tables, judge)


def what_was_found_can_be_used_twice(kind: Kind) -> None:
    tables, judge = pair(kind, optimizer=shoal.Adagrad(lr=0.5))
    batch = Batch(kind, tables, TWO)
    part = batch.part(batch.find("initial"))
    for step in range(2):
        batch.group.update([part], step=Step(step))
        apply(judge, [part], step)
    compare(kind, tables, judge)


def every_occurrence_can_make_a_step(kind: Kind) -> None:
    if "occurrence" not in kind.has:
        return
    tables, judge = pair(kind, optimizer=shoal.Adagrad(lr=0.5))
    fill(kind, tables, judge)
    batch = Batch(kind, tables, TWO)
    part = batch.row_part(batch.find("initial"))
    batch.group.update([part], step=Step(), each="occurrence")
    apply(judge, [part], dedup=False)
    compare(kind, tables, judge)


def rates_follow_the_step_and_the_scale(kind: Kind) -> None:
    if "schedule" not in kind.has:
        return
    rate = shoal.table.PolynomialDecay(1.0, 10, 0.1)
    tables, judge = pair(kind, optimizer=shoal.Sgd(lr=rate))
    batch = Batch(kind, tables, TWO)
    part = batch.part(batch.find("initial"))
    batch.group.update([part], step=Step(7))
    apply(judge, [part], 7)
    compare(kind, tables, judge)
    if "lr_scale" not in kind.has:
        return
    tables = kind.make(2, seed=SEED, optimizer=shoal.Sgd(lr=1.0))
    judge = [shoal.HashTable(DIM, seed=SEED, optimizer=shoal.Sgd(lr=lr)) for lr in (0.5, 2.0)]
    batch = Batch(kind, tables, TWO)
    part = batch.part(batch.find("initial"))
    batch.group.update([part], step=Step(0, lr_scale=(0.5, 2.0)))
    apply(judge, [part])
    compare(kind, tables, judge)


def erased_ids_are_made_again(kind: Kind) -> None:
    tables, judge = pair(kind, optimizer=shoal.Adagrad(lr=0.5))
    if not hasattr(tables[0], "erase"):
        return
    fill(kind, tables, judge)
    batch = Batch(kind, tables, TWO)
    part = batch.part(batch.find("initial"))
    for table, plain in zip(tables, judge, strict=True):
        gone, more = torch.arange(0, 20, 4), torch.arange(100, 140)
        table.erase(gone.to(kind.device))
        table.assign(more.to(kind.device), torch.ones(40, DIM, device=kind.device))  # reuses the rows
        plain.erase(gone)
        plain.assign(more, torch.ones(40, DIM))
    batch.group.update([part], step=Step())
    apply(judge, [part])
    compare(kind, tables, judge, upto=140)


def cleared_and_restored_tables_are_found_again(kind: Kind) -> None:
    tables, judge = pair(kind, optimizer=shoal.Adagrad(lr=0.5))
    if not hasattr(tables[0], "clear"):
        return
    fill(kind, tables, judge)
    batch = Batch(kind, tables, TWO)
    part = batch.part(batch.find("initial"))
    for table, plain in zip(tables, judge, strict=True):
        table.clear()
        plain.clear()
    fill(kind, tables[:1], judge[:1])
    batch.group.update([part], step=Step())
    apply(judge, [part])
    compare(kind, tables, judge)


def tables_may_grow_between_find_and_update(kind: Kind) -> None:
    tables, judge = pair(kind, optimizer=shoal.Adagrad(lr=0.5))
    fill(kind, tables, judge)
    batch = Batch(kind, tables, TWO)
    part = batch.part(batch.find("initial"))
    many = torch.arange(1000, 21_000)
    for table, plain in zip(tables, judge, strict=True):
        table.assign(many.to(kind.device), torch.ones(many.numel(), DIM, device=kind.device))
        plain.assign(many, torch.ones(many.numel(), DIM))
    batch.group.update([part], step=Step())
    apply(judge, [part])
    compare(kind, tables, judge, upto=3000)


def another_update_may_come_between(kind: Kind) -> None:
    tables, judge = pair(kind, optimizer=shoal.Adagrad(lr=0.5))
    one, other = Batch(kind, tables, TWO, seed=1), Batch(kind, tables, SHARED, seed=2)
    first, second = one.part(one.find("initial")), other.part(other.find("initial"))
    for part in (second, first):
        one.group.update([part], step=Step())
        apply(judge, [part])
    compare(kind, tables, judge)


def a_bad_gradient_changes_nothing(kind: Kind) -> None:
    if "raises" not in kind.has:
        return
    tables, judge = pair(kind)
    fill(kind, tables, judge)
    batch = Batch(kind, tables, TWO, bags=40)
    batch.grad[:, DIM:] = float("nan")  # in the second table: nothing is applied to the first either

    def update() -> None:
        batch.group.update([batch.part(batch.find("initial"))], step=Step())
        kind.settle(tables)

    with pytest.raises(ConfigError, match="NaN"):
        update()
    compare(kind, tables, judge)
    assert [table.size() for table in tables] == [10, 10]


def padding_alone_changes_nothing(kind: Kind) -> None:
    tables, judge = pair(kind)
    fill(kind, tables, judge)
    batch = Batch(kind, tables, SHARED)
    batch.ids.fill_(3)
    found = batch.find("initial")
    assert not batch.group.rows(found, SHARED, missing="initial").any()
    batch.group.update([batch.part(found)], step=Step())
    compare(kind, tables, judge)
    assert [table.size() for table in tables] == [10, 10]


def any_id_has_a_row(kind: Kind) -> None:
    tables, judge = pair(kind, 1, optimizer=shoal.Adagrad(lr=0.5))
    features = Features((0,), (SUM,), (0,), DIM)
    batch = Batch(kind, tables, features)
    extreme = torch.tensor([0, -1, -(2**63), 2**63 - 1, 1 << 48, 0, -1])
    batch.ids, batch.counts = extreme.to(kind.device), torch.tensor([7])
    batch.offsets = torch.tensor([0, 2, 2, 5, 7, 7], device=kind.device)
    part = batch.part(batch.find("initial"))
    batch.group.update([part], step=Step())
    apply(judge, [part])
    kind.settle(tables)
    kind.same(tables[0].lookup(extreme.to(kind.device)), judge[0].lookup(extreme))


def threads_may_use_a_group_at_once(kind: Kind) -> None:
    tables, judge = pair(kind, optimizer=shoal.Adagrad(lr=0.5))
    batches = [Batch(kind, tables, TWO, seed=number, low=100 * number) for number in range(4)]
    parts: dict[int, Part] = {}
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            batch = batches[number]
            for _ in range(kind.rounds):
                parts[number] = batch.part(batch.find("initial"))
                batch.pooled(parts[number].found, None, "initial")
                batch.group.update([parts[number]], step=Step())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=[number], daemon=True) for number in range(4)]
    [thread.start() for thread in threads]
    [thread.join(120) for thread in threads]
    assert not failed
    assert not any(thread.is_alive() for thread in threads)
    for number in range(4):
        for _ in range(kind.rounds):
            apply(judge, [parts[number]])
    compare(kind, tables, judge, upto=320)


CASES = [
    rows_are_those_of_lookups,
    unknown_ids_are_answered_with_their_initial_rows,
    reading_changes_nothing,
    pooled_rows_are_sums_of_rows,
    largest_and_first_rows_are_pooled,
    rows_are_read_when_they_are_asked_for,
    nothing_to_find_gives_nothing,
    updates_are_those_of_single_tables,
    gradients_reach_largest_and_first_rows,
    all_parts_make_one_step,
    what_was_found_can_be_used_twice,
    every_occurrence_can_make_a_step,
    rates_follow_the_step_and_the_scale,
    erased_ids_are_made_again,
    cleared_and_restored_tables_are_found_again,
    tables_may_grow_between_find_and_update,
    another_update_may_come_between,
    a_bad_gradient_changes_nothing,
    padding_alone_changes_nothing,
    any_id_has_a_row,
    threads_may_use_a_group_at_once,
]
"""Each takes a `Kind`."""
SEVERAL = frozenset(case for case in CASES if case is not any_id_has_a_row)
"""Cases that need a group of two tables."""
