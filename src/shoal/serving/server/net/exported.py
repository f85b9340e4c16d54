"""An exported program as a net: called with keyword arguments; its weights can be replaced, all at once."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shoal.errors import DataError
from shoal.serving.server.servable import Tensors


@dataclass(frozen=True, slots=True)
class InputSize:
    """The sizes that ``torch.export`` allows for one dimension of an input."""

    text: str
    """A number, the name of a size that varies, or an expression."""
    low: int
    high: int | None

    @property
    def fixed(self) -> int | None:
        return int(self.text) if self.text.isdecimal() else None

    @property
    def free(self) -> bool:
        """Whether any size is accepted; torch writes a lower bound of 2 if it did not try 0 and 1."""
        return self.text.isidentifier() and self.low <= 2 and self.high is None

    @property
    def limits(self) -> str:
        if self.text.isdecimal():
            return self.text
        return self.text if not self.text.isidentifier() else f"{self.low} to {self.high or 'any'}"


def _keywords(exported: torch.export.ExportedProgram) -> dict[str, str]:
    """Name of each input in the graph -> the keyword that it was traced with."""
    arguments = exported.call_spec.in_spec
    names = arguments.children()[1].context if hasattr(arguments, "children") else arguments.children_specs[1].context  # pyrefly: ignore
    return dict(zip(map(str, exported.graph_signature.user_inputs), names, strict=True))


def input_sizes(exported: torch.export.ExportedProgram) -> dict[str, list[InputSize]]:
    """Keyword of each input of a program -> its sizes."""
    ranges = {str(symbol): (str(each.lower), str(each.upper)) for symbol, each in exported.range_constraints.items()}
    keywords = _keywords(exported)
    found = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in keywords:
            texts = [str(size) for size in node.meta["val"].shape]
            limits = [ranges.get(text, ("0", "")) for text in texts]  # an upper bound that is no number means unbounded
            found[keywords[node.name]] = [
                InputSize(text, int(low) if low.isdecimal() else 0, int(high) if high.isdecimal() else None)
                for text, (low, high) in zip(texts, limits, strict=True)
            ]
    return found


class ModuleNet:
    """A program run as a torch module, which checks its inputs. ``weights``: its ``state_dict``."""

    def __init__(self, exported: torch.export.ExportedProgram) -> None:
        self._exported = exported
        self._module = exported.module()
        self.weights: Mapping[str, torch.Tensor] = exported.state_dict

    def __call__(self, **inputs: torch.Tensor) -> Any:
        return self._module(**inputs)

    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> "ModuleNet":
        """A copy with all of its weights replaced."""
        other = ModuleNet(self._exported)
        unknown = other._module.load_state_dict(weights, strict=False, assign=True).unexpected_keys
        if unknown:
            raise DataError(f"the program's module has no weights {unknown}")
        other.weights = dict(weights)
        return other


class DirectNet:
    """A program whose graph is called directly with its weights, at a tenth of `ModuleNet`'s overhead."""

    def __init__(self, exported: torch.export.ExportedProgram, places: list[tuple[str, bool]]) -> None:
        self._exported, self._places = exported, places
        self.weights: Mapping[str, torch.Tensor] = exported.state_dict
        self._bind()

    def _bind(self) -> None:
        bound = {**self._exported.constants, **self.weights}
        alias_of = _keywords(self._exported)
        self._run, self._out = self._exported.graph_module.forward, self._exported.call_spec.out_spec
        self._keys = list(self._out.context) if self._out is not None and self._out.type is dict else None
        self.inputs = [alias_of[name] for name, given in self._places if given]
        """The keywords of the inputs, in the order of the graph."""
        self.steps = [(alias_of[name], None) if given else (None, bound[name]) for name, given in self._places]

    def __call__(self, **inputs: torch.Tensor) -> Any:
        return self.named(self.results(inputs))

    def results(self, inputs: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
        """The graph's results as a flat list."""
        return self._run(*[value if name is None else inputs[name] for name, value in self.steps])

    def named(self, results: Sequence[torch.Tensor]) -> Any:
        """The graph's results in the structure that the net returned."""
        keys = self._keys
        if keys is not None and len(keys) == len(results):
            return dict(zip(keys, results, strict=True))
        return pytree.tree_unflatten(list(results), self._out)  # pyrefly: ignore

    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> "DirectNet":
        """A copy with all of its weights replaced."""
        other = copy.copy(self)
        other.weights = dict(weights)
        other._bind()
        return other


def direct_call(exported: torch.export.ExportedProgram) -> DirectNet | ModuleNet:
    """The program as a function with keyword arguments.

    Programs that change buffers, take anything other than tensors, or limit their inputs' sizes run as a torch module,
    which checks them.
    """
    kinds = torch.export.graph_signature.InputKind
    signature = exported.graph_signature
    bound = {**exported.state_dict, **exported.constants}
    places: list[tuple[str, bool]] = []
    for spec in signature.input_specs:
        if spec.kind == kinds.USER_INPUT:
            name = getattr(spec.arg, "name", None)
            if name is None:
                return ModuleNet(exported)
            places.append((name, True))
        elif spec.kind in (kinds.PARAMETER, kinds.BUFFER, kinds.CONSTANT_TENSOR) and spec.target in bound:
            places.append((str(spec.target), False))
        else:
            return ModuleNet(exported)
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        return ModuleNet(exported)
    every = input_sizes(exported).values()
    lengths = [size.text for sizes in every for size in sizes[1:] if size.fixed is None]
    limited = any(size.fixed is None and not size.free for sizes in every for size in sizes)
    if limited or len(set(lengths)) < len(lengths):
        return ModuleNet(exported)
    return DirectNet(exported, places)


def named_outputs(result: Any, names: list[str] | None = None) -> Tensors:
    """A net's result as ``{alias: tensor}``; a single tensor is named ``output``, those of a tuple ``names``."""
    if isinstance(result, dict):
        return result
    if isinstance(result, tuple | list):
        return dict(zip(names or [f"output_{i}" for i in range(len(result))], result, strict=True))
    return {names[0] if names else "output": result}
