"""The interface of tables for modules, trainer and servers: find the rows of a batch once, read them, update them.

`Group.find` locates a batch of ids once per step; `rows` and `pooled` read the rows found, and `update` writes them. A
group is one table, or several that are served in one call: by one pass on a CPU, one launch sequence on a GPU, one
exchange per direction between ranks, one request per server. Reading never writes: an id without a row reads as zeros
or as its initial row, and the first update creates the row.
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
"""Combiners that add rows, each times a factor."""
EVERY = SUMS | {FIRSTN, MAX}
Missing = Literal["zeros", "initial"]


@dataclass(frozen=True)
class Traits:
    """Properties of a group's tables that callers depend on."""

    device: torch.device = CPU
    """The device of ids, rows and pooled rows."""
    collective: bool = False
    """Every rank must make every call, in the same order, even a rank without ids. Such a group can have
    ``refused(error)``, which a rank that cannot call `Group.find` calls instead, to notify the other ranks."""
    remote: bool = False
    """Whether rows are in another process."""
    capturable: bool = False
    """Whether calls can be captured in a CUDA graph, after one step that was not captured."""
    trains: bool = True
    """False: `update` raises."""
    local_state: bool = False
    """Whether all rows are in this process, so that a module's ``state_dict`` contains them."""
    checks_bags: bool = False
    """Whether `pooled` rejects offsets that do not rise from 0 to the number of ids, so that callers need not check."""
    counts_bags: bool = False
    """Whether `find` accepts the offsets of the bags instead of counts that only the device knows."""
    takes_bags: bool = False
    """Whether `find` accepts the offsets of bags instead of counts if bags will be pooled without weights. That is
    faster: bags are then pooled where the rows are."""
    prefetches: bool = False
    """Whether the group has ``prefetch(ids, counts, features)``, with the arguments of `find`: it moves rows closer in
    the background, for a later read of the same tensors."""
    pools: frozenset[int] = SUMS
    """The combiners that `pooled` supports; callers compute the others from `rows`."""
    shares: Hashable = None
    """Groups for which this is equal and not None can share the exchanges of their calls. They have ``find_steps``,
    ``rows_steps``, ``pooled_steps`` and ``update_steps``, the calls of `Group` as generators, and
    ``together(generators)``, which runs them in lockstep and returns their results."""


@dataclass(frozen=True)
class Features:
    """The table of each feature of a batch, and the columns of its pooled rows. Made once, used for every batch.

    ``tables``, ``combiners`` and ``columns`` have one element per feature; the latter two can be empty if only `rows`
    are read. Feature ``f`` of bag ``b`` goes to ``out[b, columns[f] : columns[f] + dim]`` of ``out`` ``[B, width]``;
    with firstn it has ``lengths[f] * dim`` columns, starting with those of the first row.
    """

    tables: tuple[int, ...] = (0,)
    combiners: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    width: int = 0
    padding: int | None = None
    """The padding id: it has no row and no gradient, and a mean does not count it."""
    lengths: tuple[int, ...] = ()
    """The number of rows that firstn concatenates, 1 for other features; empty if no feature is firstn."""

    def length(self, feature: int) -> int:
        return self.lengths[feature] if self.lengths else 1


class Found(NamedTuple):
    """The locations of a batch's rows. All fields are tensors, so that autograd can keep it. Updates do not invalidate
    it."""

    ids: Tensor
    """int64 ``[N]``, feature after feature."""
    counts: Tensor
    """int64 ``[F]``: the number of ids of each feature, on the host if the caller knows it, else on the device. For a
    group with ``counts_bags`` also the offsets ``[F * B + 1]`` of the bags."""
    where: Tensor
    """Private to the group: row numbers, routes. Validated when used, because rows can have moved in the meantime."""
    came: Tensor
    """Private to the group: the requests from other ranks to this one; otherwise empty."""

    def sizes(self, features: Features) -> list[int]:
        """The number of ids of each feature. Waits for the device if the counts are there."""
        counts, n = self.counts, len(features.tables)
        if counts.shape[0] == 1:  # one feature, or offsets without bags
            return counts.tolist() if n == 1 else [0] * n
        return (counts if counts.shape[0] == n else counts[:: (counts.shape[0] - 1) // n].diff()).tolist()

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.ids, self.counts, self.where, self.came


class Part(NamedTuple):
    """A gradient for the rows found: of rows, ``[N, dim]``, or with ``offsets`` of pooled rows, ``[B, width]``."""

    found: Found
    features: Features
    grad: Tensor
    offsets: Tensor | None = None
    """int64 ``[F * B + 1]``: bag ``b`` of feature ``f`` is ``ids[offsets[f * B + b] : offsets[f * B + b + 1]]``."""
    weights: Tensor | None = None
    """float32 ``[N]``: the factor of each row in its bag."""
    marks: Tensor | None = None
    """The marks that `Group.pooled` wrote; needed if a feature is max."""


class Step(NamedTuple):
    """The step and time of an update. A captured graph reads tensors with one element on the group's device each time
    it runs."""

    number: int | Tensor = 0
    """The global step, which learning rate schedules depend on."""
    time_s: int | Tensor | None = None
    """The time in seconds that rows are stamped with; None: the current time, for a table that uses the clock."""
    lr_scale: Sequence[float] | Tensor | None = None
    """A factor for the learning rates of each table; None: 1."""


@runtime_checkable
class Group(Protocol):
    """Tables with the same ``dim`` that are searched, read and updated in one call. Thread-safe."""

    tables: tuple[Any, ...]
    dim: int
    traits: Traits

    def find(self, ids: Tensor, counts: Tensor, features: Features, *, missing: Missing) -> Found:
        """Locates contiguous int64 ``ids`` ``[N]`` on ``traits.device``; changes nothing."""
        ...

    def rows(self, found: Found, features: Features, *, missing: Missing) -> Tensor:
        """The current rows, float32 ``[N, dim]``.

        An id without a row gives zeros or, with ``missing="initial"``, its initial row (zeros while an admission filter
        is active). Padding gives zeros.
        """
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

        An empty bag gives zeros. A weight multiplies its row; mean divides by the number of ids, sqrtn by its square
        root. ``marks``, uint8 of `marks_shape`, receives the data that `update` needs for features with max: bit
        ``c % 8`` of byte ``c // 8`` of an id is set if its row has the maximum of its bag in column ``c``.
        """
        ...

    def update(self, parts: Sequence[Part], *, step: Step, each: Literal["sum", "occurrence"] = "sum") -> None:
        """Makes one optimizer step on every distinct id of all parts, with the sum of its gradients; creates new rows.

        ``each="occurrence"`` makes a step for every occurrence instead, in order. Filters, frequencies and times are
        only updated here.
        """
        ...


def marks_shape(n: int, dim: int) -> tuple[int, int]:
    """The shape of the marks for ``n`` ids."""
    return n, (dim + 7) // 8


READS: list[Callable[[Group, Tensor, list[int], Features, int], None]] = []
"""Functions that modules call before each read, with the group, the ids, their number per feature, the features and the
number of bags of each (0: rows are not pooled). `shoal.sharded.loads_of` counts ids with one."""

_made: weakref.WeakValueDictionary[tuple[int, ...], Any] = weakref.WeakValueDictionary()


def groups_of(tables: Sequence[Any]) -> list[tuple[Group, list[int]]]:
    """The groups that serve ``tables``, each with the positions of its tables; the same group for the same tables.

    Tables whose ``group_key()`` is equal form a group, which ``make_group(tables)`` of their class builds. A table
    without that method, such as a user's own table, is a group by itself, through `shoal.table.adapter.AdapterGroup`.
    """
    places: dict[Hashable, list[int]] = {}
    for place, table in enumerate(tables):
        key = table.group_key() if hasattr(table, "group_key") else ("adapter", id(table))
        places.setdefault(key, []).append(place)
    return [(group_of([tables[place] for place in own]), own) for own in places.values()]


def group_of(tables: Sequence[Any]) -> Group:
    """The group of tables with equal keys."""
    key = tuple(map(id, tables))
    group = _made.get(key)  # a group keeps its tables alive, so these ids cannot belong to other tables
    if group is None:
        if hasattr(tables[0], "make_group"):
            group = type(tables[0]).make_group(tuple(tables))
        else:
            from shoal.table.adapter import AdapterGroup

            group = AdapterGroup(tuple(tables))
        _made[key] = group
    return group
