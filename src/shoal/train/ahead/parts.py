"""`Recipe`: how a module's arguments were made from one batch, learned from a forward and applied to later batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

_MAX_OBJECTS = 20_000  # searched per batch
_PLAIN = (str, bytes, int, float, bool, complex, type(None))


class PartPath(NamedTuple):
    """The path from a batch to one of its parts."""

    steps: tuple[tuple[bool, Any], ...]
    """Pairs: ``(True, key or index)`` or ``(False, attribute name)``."""

    def of(self, batch: Any) -> Any:
        for is_item, name in self.steps:
            batch = batch[name] if is_item else getattr(batch, name)
        return batch


class Recipe(NamedTuple):
    """Makes the arguments of a call from parts of a batch, constants, and new containers around them."""

    arguments: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
    """Returns the positional and keyword arguments for a batch; raises LookupError, AttributeError or TypeError if the
    batch does not have such parts."""
    paths: tuple[PartPath, ...]


def learn_recipe(batch: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recipe | None:
    """Find out how the arguments of a call were made from ``batch``.

    Returns None if no argument is a part of the batch, or if some argument is neither a part nor a constant.
    """
    known = {id(part): PartPath(steps) for part, steps in _walk(batch)}
    paths: list[PartPath] = []
    made = _maker([list(args), dict(kwargs)], known, paths)
    if made is None or not paths:
        return None

    def make(other: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given, named = made(other)
        return tuple(given), named

    return Recipe(make, tuple(paths))


def same_arguments(made: Any, given: Any) -> bool:
    """Whether arguments are the same objects (or equal constants), in containers of the same form."""
    if made is given:
        return True
    if isinstance(made, Mapping) and isinstance(given, Mapping):
        return list(made) == list(given) and all(same_arguments(made[key], given[key]) for key in made)
    if isinstance(made, list | tuple) and type(made) is type(given):
        return len(made) == len(given) and all(map(same_arguments, made, given))
    return isinstance(made, _PLAIN) and type(made) is type(given) and made == given


def _maker(given: Any, known: Mapping[int, PartPath], paths: list[PartPath]) -> Callable[[Any], Any] | None:
    path = known.get(id(given))
    if path is not None and not isinstance(given, _PLAIN):
        paths.append(path)
        return path.of
    if isinstance(given, _PLAIN):
        return lambda batch: given
    if type(given) is dict:
        makers = {key: _maker(value, known, paths) for key, value in given.items()}
        if None in makers.values():
            return None
        return lambda batch: {key: make(batch) for key, make in makers.items()}  # pyrefly: ignore[not-callable]
    if type(given) in (list, tuple):
        each = [_maker(value, known, paths) for value in given]
        if None in each:
            return None
        return lambda batch: type(given)(make(batch) for make in each)  # pyrefly: ignore[not-callable]
    return None


def _walk(batch: Any) -> Iterator[tuple[Any, tuple[tuple[bool, Any], ...]]]:
    """The objects in a batch, each with the steps of its shortest path."""
    seen: dict[int, tuple[Any, tuple[tuple[bool, Any], ...]]] = {}
    waiting: list[tuple[Any, tuple[tuple[bool, Any], ...]]] = [(batch, ())]
    while waiting and len(seen) < _MAX_OBJECTS:
        found, steps = waiting.pop(0)
        if isinstance(found, _PLAIN) or id(found) in seen:
            continue
        seen[id(found)] = (found, steps)
        waiting += [(part, (*steps, step)) for step, part in _inside(found)]
    return iter(seen.values())


def _inside(found: Any) -> list[tuple[tuple[bool, Any], Any]]:
    if isinstance(found, Tensor):
        return []
    if isinstance(found, Mapping):
        return [((True, key), found[key]) for key in found]
    if isinstance(found, list | tuple):
        if found and isinstance(found[0], _PLAIN):  # a list of numbers
            return []
        return [((True, number), part) for number, part in enumerate(found)]
    if dataclasses.is_dataclass(found):
        return [((False, field.name), getattr(found, field.name)) for field in dataclasses.fields(found)]
    return [((False, name), part) for name, part in getattr(found, "__dict__", {}).items()]
