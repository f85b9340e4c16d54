"""What modules, trainer and servers ask of tables: find the rows of a batch once, read them, update them.

A batch of ids is located once per step, by `Group.find`; `rows` and `pooled` read what was found, and `update` writes
it. A group is one table, or several that are served in one call: by one pass on a CPU, one launch sequence on a GPU,
one exchange per direction between ranks, one request per server. Reading never writes: an id without a row is answered
with zeros or with its initial row, and the first update creates it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

CPU = torch.device("cpu")
SUM, MEAN, FIRSTN, SQRTN, MAX = range(5)  # as in csrc/table/rows/pooled.h
SUMS = frozenset({SUM, MEAN, SQRTN})
"""Combiners that add rows, times a factor."""
EVERY = SUMS | {FIRSTN, MAX}
Missing = Literal["zeros", "initial"]


@dataclass(frozen=True)
class Traits:
    """What a caller has to know about the tables of a group."""

    device: torch.device = CPU
    """Where ids are taken, and where rows and pooled rows come out."""
    collective: bool = False
    """Every rank must make every call, in the same order; a rank without ids, too. Such a group may have
    ``refused(error)``, called in place of `Group.find` by a rank that cannot make it, which tells the other ranks."""
    remote: bool = False
    """Rows are in another process."""
    capturable: bool = False
    """Calls can be captured in a CUDA graph, after one step that was not."""
    trains: bool = True
    """False: `update` is refused."""
    local_state: bool = False
    """The rows of this process are all there are, so that a module's ``state_dict`` holds them."""
    checks_bags: bool = False
    """`pooled` refuses offsets that do not rise from 0 to the number of ids, so that callers need not look at them."""
    counts_bags: bool = False
    """In place of counts that only the device knows `find` takes the offsets of the bags, as they are."""
    takes_bags: bool = False
    """`find` takes the offsets of bags in place of counts wherever they will be pooled without weights, and is faster
    for it: bags are then pooled where the rows are."""
    prefetches: bool = False
    """There is ``prefetch(ids, counts, features)``, with the arguments of a `find`: it has rows brought nearer, in the
    background, for a read of the same tensors that will come."""
    pools: frozenset[int] = SUMS
    """Combiners that `pooled` knows; the others are made of `rows`."""
    shares: Hashable = None
    """Groups where this is equal and not None can share the exchanges of their calls. They have ``find_steps``,
    ``rows_steps``, ``pooled_steps`` and ``update_steps``, the calls below as generators, and ``together(generators)``,
    which runs them in step and returns their results."""


@dataclass(frozen=True)
class Features:
    """Which table each feature of a batch reads, and where its pooled rows go. Made once, used for every batch.

    ``tables``, ``combiners`` and ``columns`` have an element per feature; the latter two may be empty where only `rows`
    are read. Feature ``f`` of bag ``b`` goes to ``out[b, columns[f] : columns[f] + dim]`` of ``out`` ``[B, width]``;
    with firstn it has ``lengths[f] * dim`` columns, those of the first row first.
    """

    tables: tuple[int, ...] = (0,)
    combiners: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    width: int = 0
    padding: int | None = None
    """An id that stands for none: it has no row and no gradient, and a mean does not count it."""
    lengths: tuple[int, ...] = ()
    """Rows that firstn puts side by side, 1 of other features; empty where no feature is firstn."""

    def length(self, feature: int) -> int:
        return self.lengths[feature] if self.lengths else 1


class Found(NamedTuple):
    """Where the rows of a batch are. Tensors only, so that autograd can keep it, and not used up by an update."""

    ids: Tensor
    """int64 ``[N]``, the ids of feature 0 first."""
    counts: Tensor
    """int64 ``[F]``: ids of each feature; on the host where the caller knows them, else on the device. Or the offsets
    ``[F * B + 1]`` of the bags, for a group that ``counts_bags``."""
    where: Tensor
    """Known to the group alone: row numbers, routes. Validated when it is used, since rows may have moved since."""
    came: Tensor
    """Known to the group alone: what other ranks asked of this one; else empty."""

    def sizes(self, features: Features) -> list[int]:
        """Ids of each feature. Waits for the device where only it knows."""
        counts, n = self.counts, len(features.tables)
        if counts.shape[0] == 1:  # one feature, or offsets without bags
            return counts.tolist() if n == 1 else [0] * n
        return (counts if counts.shape[0] == n else counts[:: (counts.shape[0] - 1) // n].diff()).tolist()

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.ids, self.counts, self.where, self.came


class Part(NamedTuple):
    """A gradient of what was found: of rows, ``[N, dim]``, or with ``offsets`` of pooled rows, ``[B, width]``."""

    found: Found
    features: Features
    grad: Tensor
    offsets: Tensor | None = None
    """int64 ``[F * B + 1]``: bag ``b`` of feature ``f`` is ``ids[offsets[f * B + b] : offsets[f * B + b + 1]]``."""
    weights: Tensor | None = None
    """float32 ``[N]``: factors of the rows in their bags."""
    marks: Tensor | None = None
    """Those that `Group.pooled` wrote; needed where a feature is max."""


class Step(NamedTuple):
    """When an update happens. Tensors of one element, on the group's device, are read when a captured graph runs."""

    number: int | Tensor = 0
    """Of the optimizer step, from which learning rate schedules follow."""
    time_s: int | Tensor | None = None
    """Seconds that rows are stamped with; None: now, where the table goes by the clock."""
    lr_scale: Sequence[float] | Tensor | None = None
    """A factor of the learning rates of each table; None: 1."""


@runtime_checkable
class Group(Protocol):
    """Tables of one ``dim`` that are found, read and updated in one call. Safe to use from several threads."""

    tables: tuple[Any, ...]
    dim: int
    traits: Traits

    def find(self, ids: Tensor, counts: Tensor, features: Features, *, missing: Missing) -> Found:
        """Locates contiguous int64 ``ids`` ``[N]`` on ``traits.device``; changes nothing."""
        ...

    def rows(self, found: Found, features: Features, *, missing: Missing) -> Tensor:
        """float32 ``[N, dim]`` as the rows are now; an id without one gives zeros or, with "initial", its first row
        (zeros while an admission filter is active). Padding gives zeros."""
        ...

    def pooled(
        self,
        found: Found,
        features: Features,
        offsets: Tensor,
        weights: Tensor | None,
        out: Tensor,
        *,
        missing: Missing,
        marks: Tensor | None = None,
    ) -> None:
        """Writes the pooled rows of bags to the features' columns of float32 ``out`` ``[B, width]``.

        An empty bag is zeros. A weight multiplies its row; mean and sqrtn divide by the number of ids, or its root.
        ``marks``, uint8 of `marks_shape`, gets what `update` has to know of features that are max: bit ``c % 8`` of
        byte ``c // 8`` of an id is set where its row has the largest number of its bag in column ``c``.
        """
        ...

    def update(self, parts: Sequence[Part], *, step: Step, each: Literal["sum", "occurrence"] = "sum") -> None:
        """One optimizer step on every distinct id of all parts, with the sum of its gradients; creates what is new.

        ``each="occurrence"``: a step for every occurrence, in order. Filters, frequencies and times count here alone.
        """
        ...


def marks_shape(n: int, dim: int) -> tuple[int, int]:
    """Of the marks of ``n`` ids."""
    return n, (dim + 7) // 8


READS: list[Callable[[Group, Tensor, list[int], Features, int], None]] = []
"""Called by modules before each read, with the group, the ids, how many each feature has, the features and the bags of
each (0: rows are not pooled). `shoal.sharded.loads_of` counts by it."""

_made: weakref.WeakValueDictionary[tuple[int, ...], Any] = weakref.WeakValueDictionary()


def groups_of(tables: Sequence[Any]) -> list[tuple[Group, list[int]]]:
    """The groups that serve ``tables``, each with the positions of its tables; the same group for the same tables.

    Tables whose ``group_key()`` is equal form a group, which ``make_group(tables)`` of their class builds. A table
    without that method, such as a user's own, is a group by itself, through `shoal.table.adapter.AdapterGroup`.
    """
    places: dict[Hashable, list[int]] = {}
    for place, table in enumerate(tables):
        key = table.group_key() if hasattr(table, "group_key") else ("adapter", id(table))
        places.setdefault(key, []).append(place)
    return [(group_of([tables[place] for place in own]), own) for own in places.values()]


def group_of(tables: Sequence[Any]) -> Group:
    """The group of tables with equal keys."""
    key = tuple(map(id, tables))
    group = _made.get(key)  # a group keeps its tables, so that none of these numbers is another table's by now
    if group is None:
        if hasattr(tables[0], "make_group"):
            group = type(tables[0]).make_group(tuple(tables))
        else:
            from shoal.table.adapter import AdapterGroup

            group = AdapterGroup(tuple(tables))
        _made[key] = group
    return group
