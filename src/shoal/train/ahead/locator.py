"""`Locator`: locates the ids of a model's modules before their forward, and passes them the results."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.nn.module import TableModule
from shoal.nn.read.asked import Located, located
from shoal.table.protocol import Group, Missing
from shoal.train.ahead.parts import Recipe, learn_recipe, same_arguments
from shoal.train.ahead.uneven import offsets_in


class Entry(NamedTuple):
    """The ids that a module located in a batch, and the arguments of the forward that they are for."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    located: Located


class Locator:
    """Learns from one forward which parts of a batch each module over tables gets, and locates them in later batches.

    A module uses a located result only if its arguments are the same objects. Otherwise it locates them itself, so
    outputs do not depend on what was learned.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(_outermost(model))
        self.tables = [one for one in model.modules() if isinstance(one, TableModule)]
        self.known: list[tuple[nn.Module, Recipe]] = []
        self.learned = False
        self.enabled = True
        """If False, nothing is located ahead."""
        self.located = self.missed = 0
        """Forwards after the first batch that used a located result, and those that did not."""
        self._batch: Any = None
        self._entries: list[Entry] = []
        self._hooks: list[Any] = []
        self._missing: dict[int, Missing] = {}

    def groups(self) -> list[Group]:
        """The groups of all tables of the model."""
        return list({id(group): group for one in self.tables for group in one.groups()}.values())

    def attach(self) -> None:
        """Begin a pass. Batches are located for the modules' mode at this moment, even during an evaluation."""
        self._missing = {id(one): one.missing() for one in self.modules.values()}  # pyrefly: ignore
        self._hooks = [
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True) for module in self.modules.values()
        ]

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.end()

    def locate(self, batch: Any) -> list[Entry]:
        """Locate the ids of a batch, in the order of the modules' forwards for the first batch."""
        entries = []
        for module, recipe in self.known:
            try:
                args, kwargs = recipe.arguments(batch)
            except (LookupError, AttributeError, TypeError):  # this batch has another structure
                continue
            found = located(module, partial(module.ask, *args, **kwargs), self._missing[id(module)])  # pyrefly: ignore
            entries.append(Entry(module, args, kwargs, found))
        return entries

    def offsets(self, batch: Any) -> frozenset[int]:
        """The ``id()`` of each tensor of a batch that holds offsets of bags."""
        found: frozenset[int] = frozenset()
        for module, recipe in self.known:
            found |= offsets_in(module, *recipe.arguments(batch))
        return found

    def begin(self, batch: Any, entries: list[Entry]) -> None:
        """Begin the step of a batch."""
        self._batch, self._entries = batch, entries

    def end(self) -> None:
        """End the step of a batch. The first one has shown which ids the modules look up."""
        if self._batch is not None:
            self.learned = True
        self._batch, self._entries = None, []

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._batch is None or torch.compiler.is_compiling() or (args and isinstance(args[0], Located)):
            return None
        if not self.learned:
            recipe = learn_recipe(self._batch, args, kwargs) if self.enabled else None
            known = [other.paths for one, other in self.known if one is module]
            if recipe is not None and recipe.paths not in known:
                self.known.append((module, recipe))
            return None
        for entry in self._entries:
            if entry.module is module and same_arguments(entry.args, args) and same_arguments(entry.kwargs, kwargs):
                if not entry.located.fits(module):
                    break
                self.located += 1
                return (entry.located,), {}
        self.missed += 1
        return None


def tensors_of_entries(entries: list[Entry]) -> Iterator[Tensor]:
    """The tensors of all located results."""
    for entry in entries:
        yield from entry.located.tensors()


def _outermost(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that can locate ids and are not inside another module that can."""
    if callable(getattr(model, "locate", None)) and callable(getattr(model, "ask", None)):
        yield name, model
        return
    for child, module in model.named_children():
        yield from _outermost(module, f"{name}.{child}" if name else child)
