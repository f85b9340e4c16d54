"""`Tables`: the tables of a module, their keepers, and the plans for reading them."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any, NoReturn

import torch

from shoal.errors import ConfigError, UnsupportedError
from shoal.lazy import constant_result
from shoal.nn.keeper import TableKeeper, keeper_of
from shoal.nn.read.plan import Feature, Plan, make_plan
from shoal.nn.update.steps import refresh
from shoal.table.protocol import Group, groups_of

PLANS = 1024
"""Number of plans that a module keeps: one for each order of each set of features in a batch."""


class Tables:
    """One table for everything, or tables by name. A deep copy copies the tables; pickling is refused."""

    def __init__(self, given: Any, who: str) -> None:
        self.one = not isinstance(given, Mapping)
        self.named: dict[str, Any] = {"": given} if self.one else {str(name): table for name, table in given.items()}
        if not self.named:
            raise ConfigError(f"{who}: a mapping of tables must have at least one table, got none")
        self.keepers: dict[str, TableKeeper] = {name: keeper_of(table) for name, table in self.named.items()}
        self.distinct = list(dict.fromkeys(self.keepers.values()))
        self.padding: int | None = None
        self._plans: dict[tuple[Hashable, bool], Plan] = {}

    @property
    def features(self) -> dict[str, Feature]:
        """Features by name, in the order of the result; with one table for everything, one feature ``""``."""
        return self._features

    @features.setter
    def features(self, features: dict[str, Feature]) -> None:
        self._features = features
        self.names = list(features)
        self._places = {name: place for place, name in enumerate(features)}

    def number(self, name: str) -> int:
        """Return the number of a table among the distinct ones, for `Feature`."""
        return self.distinct.index(self.keepers[name])

    def planned(self, names: list[str]) -> bool:
        """Whether there is a plan for a batch of these features, whose names were checked when it was made."""
        return (tuple(names), False) in self._plans

    def place(self, name: str) -> int:
        """The position of a feature in the result."""
        return self._places[name]

    @constant_result
    def plan(self, batch: tuple[str, ...] | int, by_rows: bool = False) -> Plan:
        """Return the plan for a batch, by the features' names or, with one table for everything, their number."""
        plan = self._plans.get((batch, by_rows))
        if plan is None:
            if isinstance(batch, int):
                features, order = [self.features[""]] * batch, range(batch)
            else:
                features = [self.features[name] for name in batch]
                order = sorted(range(len(batch)), key=lambda number: self.place(batch[number]))
            every = [keeper.table for keeper in self.distinct]
            plan = make_plan(every, features, order=order, padding=self.padding, by_rows=by_rows)
            if len(self._plans) >= PLANS:
                self._forget_one()
            self._plans[batch, by_rows] = plan
        return plan

    def _forget_one(self) -> None:
        """Drop the oldest plan that no compiled graph uses."""
        oldest = next((key for key, plan in list(self._plans.items()) if not plan.opaque), None)
        if oldest is not None:
            self._plans.pop(oldest, None)

    def groups(self) -> list[Group]:
        """The groups of a batch with all features, in the order in which they are called."""
        found = groups_of([keeper.table for keeper in self.distinct])
        by_table = {place: group for group, places in found for place in places}
        return list({id(group): group for group in (by_table[f.table] for f in self.features.values())}.values())

    def refresh_clock(self) -> None:
        refresh({call.group: call.keepers[0] for plan in self._plans.values() for call in plan.calls}.items())

    def device(self) -> torch.device:
        """The device of results: that of the first table's rows."""
        return self.plan(1 if self.one else tuple(self.names)).device

    def __deepcopy__(self, memo: dict[int, Any]) -> Tables:
        twin = self._twin({name: copy.deepcopy(table, memo) for name, table in self.named.items()})
        twin.features = copy.deepcopy(self.features, memo)
        memo[id(self)] = twin
        return twin

    def swapped(self, new: Mapping[int, Any]) -> Tables:
        """Return a copy with other tables; ``new`` maps the ``id()`` of a replaced table to the new one."""
        return self._twin({name: new.get(id(table), table) for name, table in self.named.items()})

    def _twin(self, named: dict[str, Any]) -> Tables:
        twin = Tables(named[""] if self.one else named, "Tables")
        for keeper, other in zip(self.keepers.values(), twin.keepers.values(), strict=True):
            if keeper is not other:
                other.fused, other.clock, other.global_step = keeper.fused, keeper.clock, keeper.global_step
                other.waits = keeper.fused is False
        twin.features, twin.padding = self.features, self.padding
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            f"table {self.distinct[0].name!r} cannot be pickled; save model.state_dict(), or the table with "
            "table.save(path)"
        )

    def __repr__(self) -> str:
        if self.one:
            return repr(self.named[""])
        return ", ".join(f"{name}: {table!r}" for name, table in self.named.items())
