"""Translates an exported graph to a native plan: each torch operation becomes steps over rows.

Values that depend only on weights are computed by torch, once per set of weights. If an operation is not in the table
or mixes rows, torch runs the entire net.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch

from shoal.serving.server.net.operations import OPERATIONS
from shoal.serving.server.net.row_plan import NotNative, PlanBuilder, Value


class Lowering:
    """Makes the steps of a graph.

    Args:
        plan: receives the steps.
        fixed: node -> value, for all nodes that do not depend on the inputs; read again when weights change.
        rows: torch's names for the number of rows; several if some inputs are never combined.
    """

    def __init__(self, plan: PlanBuilder, fixed: dict[Any, Any], rows: Collection[str]) -> None:
        self.plan, self.fixed, self._rows = plan, fixed, rows
        self._constants: dict[Any, Value] = {}
        self.indices: list[tuple[Any, list[int]]] = []
        """(node, its integers): constants that are part of the plan."""

    # --- arguments of operations ------------------------------------------------------------------------------------

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
        raise NotNative(f"an argument, {given!r}, is not a float32 tensor or number")

    def both(self, a: Any, b: Any) -> tuple[Value, Value]:
        """Two values that are broadcast against each other; at least one is computed."""
        ranks = [len(one.sizes) for one in (a, b) if isinstance(one, Value)]
        if len(set(ranks)) > 1:
            raise NotNative("an operation broadcasts values of different ranks")
        return self.broadcastable(a, ranks[0]), self.broadcastable(b, ranks[0])

    def broadcastable(self, given: Any, rank: int) -> Value:
        """A value to broadcast against rows with ``rank`` dimensions; a constant that varies by row is NotNative."""
        if isinstance(given, Value):
            return given
        value = self.value(given)
        if len(value.sizes) == rank + 1:
            if value.sizes[0] != 1:
                raise NotNative("a constant has one value per row")
            return Value(value.buffer, value.at, value.sizes[1:], value.strides[1:])
        if len(value.sizes) > rank:
            raise NotNative("a constant has more dimensions than the rows")
        return value

    def dims_of(self, a: Value, dims: int | Sequence[int] | None) -> list[int]:
        """Convert torch's dimensions, which include the row dimension, to those of one row."""
        if dims is None or (isinstance(dims, Sequence) and not dims):
            raise NotNative("an operation reduces all dimensions, including the rows")
        rank = len(a.sizes) + 1
        found = [each % rank - 1 for each in ([dims] if isinstance(dims, int) else dims)]
        if -1 in found:
            raise NotNative("an operation reduces the rows")
        return found

    def sizes_of(self, node: torch.fx.Node) -> tuple[int, ...]:
        """The sizes of one row of a result, whose first dimension must be the rows."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or not value.ndim:
            raise NotNative(f"{node.target} does not return rows of float32")
        if str(value.shape[0]) not in self._rows:
            raise NotNative(f"{node.target} returns {value.shape[0]} rows")
        if not all(isinstance(size, int) for size in value.shape[1:]):
            raise NotNative(f"{node.target} returns rows whose sizes vary")
        return tuple(int(size) for size in value.shape[1:])

    def numbers(self, node: Any) -> list[int]:
        """The integers of a constant index, which become part of the plan."""
        value = self.fixed.get(node)
        if not isinstance(value, torch.Tensor) or value.dtype != torch.int64 or value.ndim != 1:
            raise NotNative("an index is not a constant list of int64")
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
