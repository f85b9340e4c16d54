"""An exported graph as a native plan: what each operation of torch is in steps over rows.

What depends on weights alone is computed by torch once per set of weights. An operation that is not in the table, or
that mixes rows, makes the whole net torch's.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch

from shoal.serving.server.net.operations import OPERATIONS
from shoal.serving.server.net.row_plan import NotNative, PlanBuilder, Value


class Lowering:
    """Steps for a graph.

    Args:
        plan: takes the steps.
        fixed: node -> its value, of all nodes that do not depend on the inputs; read again when weights change.
        rows: what torch calls the number of rows; of inputs that do not meet it has several names.
    """

    def __init__(self, plan: PlanBuilder, fixed: dict[Any, Any], rows: Collection[str]) -> None:
        self.plan, self.fixed, self._rows = plan, fixed, rows
        self._constants: dict[Any, Value] = {}
        self.indices: list[tuple[Any, list[int]]] = []
        """(node, its numbers): what a plan has built in."""

    # --- what operations take ---------------------------------------------------------------------------------------

    def value(self, given: Any) -> Value:
        """A row's values: computed, constant, or a plain number."""
        if isinstance(given, Value):
            return given
        if isinstance(given, int | float) and not isinstance(given, bool):
            return self.plan.number(given)
        if isinstance(given, torch.fx.Node) and isinstance(self.fixed.get(given), torch.Tensor):
            if given not in self._constants:
                self._constants[given] = self.plan.constant(lambda: self.fixed[given])
            return self._constants[given]
        raise NotNative(f"an argument is {given!r}")

    def both(self, a: Any, b: Any) -> tuple[Value, Value]:
        """Two that are broadcast against each other, of which at least one is computed."""
        ranks = [len(one.sizes) for one in (a, b) if isinstance(one, Value)]
        if len(set(ranks)) > 1:
            raise NotNative("values of different ranks are broadcast")
        return self._beside(a, ranks[0]), self._beside(b, ranks[0])

    def _beside(self, given: Any, rank: int) -> Value:
        """A constant as it is broadcast against rows of so many dimensions: one that varies by row mixes them."""
        if isinstance(given, Value):
            return given
        value = self.value(given)
        if len(value.sizes) == rank + 1:
            if value.sizes[0] != 1:
                raise NotNative("a constant has a value per row")
            return Value(value.buffer, value.at, value.sizes[1:], value.strides[1:])
        if len(value.sizes) > rank:
            raise NotNative("a constant has more dimensions than the rows")
        return value

    def dims_of(self, a: Value, dims: int | Sequence[int] | None) -> list[int]:
        """Dimensions as torch counts them, the rows first, as those of one row."""
        if dims is None or (isinstance(dims, Sequence) and not dims):
            raise NotNative("an operation goes over all dimensions, rows included")
        rank = len(a.sizes) + 1
        found = [each % rank - 1 for each in ([dims] if isinstance(dims, int) else dims)]
        if -1 in found:
            raise NotNative("an operation goes over the rows")
        return found

    def sizes_of(self, node: torch.fx.Node) -> tuple[int, ...]:
        """Sizes of one row of a result; it must have the rows first."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or not value.ndim:
            raise NotNative(f"{node.target} does not give rows of float32")
        if str(value.shape[0]) not in self._rows:
            raise NotNative(f"{node.target} gives {value.shape[0]} rows")
        if not all(isinstance(size, int) for size in value.shape[1:]):
            raise NotNative(f"{node.target} gives rows whose sizes vary")
        return tuple(int(size) for size in value.shape[1:])

    def numbers(self, node: Any) -> list[int]:
        """The whole numbers of a constant, which become part of the plan."""
        value = self.fixed.get(node)
        if not isinstance(value, torch.Tensor) or value.dtype != torch.int64 or value.ndim != 1:
            raise NotNative("rows are chosen by something that is not constant")
        self.indices.append((node, value.tolist()))
        return self.indices[-1][1]

    # --- operations -------------------------------------------------------------------------------------------------

    def lower(self, node: torch.fx.Node, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        """The result of a node, whose arguments are values, constants (as nodes) and plain numbers."""
        make = OPERATIONS.get(node.target)
        if make is None:
            raise NotNative(f"{node.target} is not among the native operations")
        if node.target is not operator.getitem and isinstance(node.meta.get("val"), torch.Tensor):
            self.sizes_of(node)
        try:
            return make(self, node, *arguments, **options)
        except (TypeError, IndexError, AttributeError) as error:
            raise NotNative(f"{node.target} is used in a form that is not native ({error})") from None
