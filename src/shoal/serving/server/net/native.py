"""`NativeNet`: an exported program run without torch, if all of its operations have native versions.

It runs without the interpreter, so requests can be answered on all cores.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal import _core
from shoal.serving.server.net.exported import DirectNet, direct_call
from shoal.serving.server.net.lowering import Lowering
from shoal.serving.server.net.row_plan import NotNative, PlanBuilder, Value

Finish = Callable[[PlanBuilder, list[Value]], list[Value]]
"""Adds steps after a net's outputs and returns the final outputs."""
_SIZES = {operator.add, operator.mul, operator.sub, operator.floordiv}
_IGNORED = {torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten._assert_scalar.default}


class _Rows:
    """A number that depends on the number of rows."""


class NativeNet:
    """A net as native steps; called with keyword arguments.

    Args:
        exported: the program; its inputs are ``[rows, ...]`` of float32.
        finish: adds steps after its outputs; the results are named ``outputs``.

    Raises:
        NotNative: part of it has no native version; the message says which.
    """

    def __init__(
        self, exported: torch.export.ExportedProgram, finish: Finish | None = None, outputs: Sequence[str] = ()
    ) -> None:
        direct = direct_call(exported)
        if not isinstance(direct, DirectNet):
            raise NotNative("the program restricts its inputs or changes its buffers")
        self.inputs = direct.inputs
        """The keywords of the inputs, in the order of the plan."""
        self.sizes: dict[str, tuple[int, ...]] = {}
        """The sizes of one row of each input."""
        self.weights: Mapping[str, torch.Tensor] = direct.weights
        self._outputs = list(outputs)
        self._direct = direct
        self._placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
        self._fixed_nodes: list[torch.fx.Node] = []
        self._made: list[tuple[Any, Any]] = []  # the last weights given to with_weights, and the net with them
        self._lower(exported.graph, finish)
        self._bind()

    # --- construction -----------------------------------------------------------------------------------------------

    def _lower(self, graph: torch.fx.Graph, finish: Finish | None) -> None:
        given = dict(zip(self._placeholders, self._direct.steps, strict=True))
        shapes = {node: node.meta["val"] for node, (name, _) in given.items() if name is not None}
        rows = {str(value.shape[0]) if value.ndim else "0" for value in shapes.values()}
        if not rows or any(each.isdecimal() for each in rows):
            raise NotNative("the number of rows of its inputs is fixed")
        for node, value in shapes.items():
            name = str(given[node][0])
            if value.dtype != torch.float32 or not all(isinstance(size, int) for size in value.shape[1:]):
                raise NotNative(f"input {name!r} is not float32 with fixed sizes")
            self.sizes[name] = tuple(int(size) for size in value.shape[1:])
        plan = PlanBuilder([self.sizes[name] for name in self.inputs])
        self._fixed: dict[Any, Any] = {node: value for node, (name, value) in given.items() if name is None}
        low = Lowering(plan, self._fixed, rows)
        values: dict[torch.fx.Node, Any] = {
            node: plan.inputs[self.inputs.index(str(given[node][0]))] for node in shapes
        }
        found: Any = None
        for node in graph.nodes:
            if node.op == "output":
                found = [values.get(each, self._fixed.get(each)) for each in node.args[0]]
            elif node.op == "get_attr":
                raise NotNative(f"the graph has a sub-graph, {node.target}")
            elif node.op == "call_function" and node.target not in _IGNORED:
                self._lower_node(node, values, low)
        if not all(isinstance(each, Value) for each in found):
            raise NotNative("an output does not depend on the inputs")
        results = list(found) if finish is None else finish(plan, list(found))
        self.shapes = [value.sizes for value in results]
        """The sizes of one row of each output."""
        self._plan, self._constants, self._indices = plan.build(results), plan.constants, low.indices

    def _lower_node(self, node: torch.fx.Node, values: dict[torch.fx.Node, Any], low: Lowering) -> None:
        needed = node.all_input_nodes
        counts = any(isinstance(values.get(each), _Rows) for each in needed) and node.target in _SIZES
        if counts or node.target is torch.ops.aten.sym_size.int:
            values[node] = _Rows()
        elif all(each in self._fixed for each in needed):
            self._fixed_nodes.append(node)
            self._fixed[node] = self._evaluated(node)
        else:
            arguments, options = torch.fx.map_arg(
                (node.args, node.kwargs),
                lambda each: values.get(each, each),  # pyrefly: ignore
            )
            values[node] = low.lower(node, arguments, dict(options))

    def _evaluated(self, node: torch.fx.Node) -> Any:
        arguments, options = torch.fx.map_arg((node.args, node.kwargs), lambda each: self._fixed[each])
        with torch.no_grad():
            return node.target(*arguments, **options)  # pyrefly: ignore

    def _bind(self) -> None:
        """Compute the values that depend only on the weights."""
        constants = [make() for make in self._constants]
        self.core = _core.RowNet(self._plan, [(one.data_ptr(), one.numel()) for one in constants])

    @property
    def multiplications(self) -> int:
        """The number of multiplications per row."""
        return self._plan.multiplications

    # --- as a net ---------------------------------------------------------------------------------------------------

    def __call__(self, **inputs: torch.Tensor) -> Any:
        given = [inputs[name].contiguous() for name in self.inputs]
        rows = given[0].shape[0]
        for name, value in zip(self.inputs, given, strict=True):
            if value.dtype != torch.float32 or tuple(value.shape) != (rows, *self.sizes[name]):
                raise ValueError(
                    f"input {name!r} must be float32 [{rows}, {', '.join(map(str, self.sizes[name]))}], got "
                    f"{value.dtype} {list(value.shape)}"
                )
        made = [torch.empty(rows, *sizes, device="cpu") for sizes in self.shapes]
        self.core.run([value.data_ptr() for value in given], rows, [value.data_ptr() for value in made])
        return dict(zip(self._outputs, made, strict=True)) if self._outputs else self._direct.named(made)

    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> NativeNet | DirectNet:
        """A copy of the net with all of its weights replaced. One caller at a time.

        Torch runs the copy if indices among the weights have changed.
        """
        if self._made and self._made[0][0] is weights:
            return self._made[0][1]
        made = self._with_weights(weights)
        self._made[:] = [(weights, made)]
        return made

    def _with_weights(self, weights: Mapping[str, torch.Tensor]) -> NativeNet | DirectNet:
        other = copy.copy(self)
        other.weights = dict(weights)
        other._direct = self._direct.with_weights(weights)
        for node, (name, value) in zip(self._placeholders, other._direct.steps, strict=True):
            if name is None:
                self._fixed[node] = value
        for node in self._fixed_nodes:
            self._fixed[node] = self._evaluated(node)
        if any(self._fixed[node].tolist() != numbers for node, numbers in self._indices):
            return other._direct  # indices are part of the plan
        other._bind()
        return other
