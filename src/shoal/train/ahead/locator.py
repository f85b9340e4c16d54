"""`Locator`: has the modules of a model take what was located ahead, where it is what they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.nn.module import TableModule
from shoal.nn.read.asked import Located, located
from shoal.table.protocol import Group, Missing
from shoal.train.ahead.parts import Parts, learn, same
from shoal.train.ahead.uneven import offsets_in


class Entry(NamedTuple):
    """What a module of a model located of a batch, and the arguments that it is for."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    located: Located


class Locator:
    """Learns from one forward which parts of a batch go to which modules over tables, and locates those of others.

    A module takes what was located if its arguments are the very objects that it was located for, and else locates
    them itself, so that nothing depends on what was learned.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(_outermost(model))
        self.tables = [one for one in model.modules() if isinstance(one, TableModule)]
        self.known: list[tuple[nn.Module, Parts]] = []
        self.learned = False
        self.enabled = True
        """False: nothing is located ahead."""
        self.located = self.missed = 0
        """Forwards of modules that took what was located, and those that did not, since the first batch."""
        self._batch: Any = None
        self._entries: list[Entry] = []
        self._hooks: list[Any] = []
        self._missing: dict[int, Missing] = {}

    def groups(self) -> list[Group]:
        """Of all tables of the model."""
        return list({id(group): group for one in self.tables for group in one.groups()}.values())

    def attach(self) -> None:
        """Begins a pass, with the modules in the mode in which they are now: an evaluation in between changes it for a
        while, and not for the batches that are located then."""
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
        """Locates what modules will be asked for, in the order in which they were asked for the first batch."""
        entries = []
        for module, parts in self.known:
            try:
                args, kwargs = parts.of(batch)
            except (LookupError, AttributeError, TypeError):  # this batch is of another form
                continue
            found = located(module, partial(module.ask, *args, **kwargs), self._missing[id(module)])  # pyrefly: ignore
            entries.append(Entry(module, args, kwargs, found))
        return entries

    def offsets(self, batch: Any) -> frozenset[int]:
        """The ``id()`` of those tensors of a batch that are offsets of bags."""
        found: frozenset[int] = frozenset()
        for module, parts in self.known:
            found |= offsets_in(module, *parts.of(batch))
        return found

    def begin(self, batch: Any, entries: list[Entry]) -> None:
        """The step of a batch begins."""
        self._batch, self._entries = batch, entries

    def end(self) -> None:
        """It has ended; after the first one, it is known what modules are asked for."""
        if self._batch is not None:
            self.learned = True
        self._batch, self._entries = None, []

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._batch is None or torch.compiler.is_compiling() or (args and isinstance(args[0], Located)):
            return None
        if not self.learned:
            parts = learn(self._batch, args, kwargs) if self.enabled else None
            if parts is not None and not any(module is one and parts.ways == other.ways for one, other in self.known):
                self.known.append((module, parts))
            return None
        for entry in self._entries:
            if entry.module is module and same(entry.args, args) and same(entry.kwargs, kwargs):
                if not entry.located.fits(module):
                    break
                self.located += 1
                return (entry.located,), {}
        self.missed += 1
        return None


def tensors_of_entries(entries: list[Entry]) -> Iterator[Tensor]:
    for entry in entries:
        yield from entry.located.tensors()


def _outermost(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that can locate, and are in no other that can."""
    if callable(getattr(model, "locate", None)) and callable(getattr(model, "ask", None)):
        yield name, model
        return
    for child, module in model.named_children():
        yield from _outermost(module, f"{name}.{child}" if name else child)
