"""Which parts of a batch a module is given: seen in one forward, taken out of the batches that follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

_MOST = 20_000  # objects of a batch that are looked at
_PLAIN = (str, bytes, int, float, bool, complex, type(None))


class Way(NamedTuple):
    """From a batch to one of its parts."""

    steps: tuple[tuple[bool, Any], ...]
    """Each a key or an index (True), or the name of an attribute (False)."""

    def of(self, batch: Any) -> Any:
        for item, name in self.steps:
            batch = batch[name] if item else getattr(batch, name)
        return batch


class Parts:
    """How the arguments of a call are made of a batch: parts of it, or new containers around them, and constants."""

    def __init__(self, make: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]], ways: tuple[Way, ...]) -> None:
        self._make = make
        self.ways = ways

    def of(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for another batch.

        Raises:
            LookupError, AttributeError, TypeError: the batch does not have such parts.
        """
        return self._make(batch)


def learn(batch: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Parts | None:
    """How ``batch`` became the arguments of a call; None if they are not made of its parts alone."""
    known = {id(part): Way(steps) for part, steps in _walk(batch)}
    ways: list[Way] = []
    made = _maker([list(args), dict(kwargs)], known, ways)
    if made is None or not ways:
        return None

    def make(other: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given, named = made(other)
        return tuple(given), named

    return Parts(make, tuple(ways))


def same(made: Any, given: Any) -> bool:
    """Whether arguments are the same objects, in containers of the same form."""
    if made is given:
        return True
    if isinstance(made, Mapping) and isinstance(given, Mapping):
        return list(made) == list(given) and all(same(made[key], given[key]) for key in made)
    if isinstance(made, list | tuple) and type(made) is type(given):
        return len(made) == len(given) and all(map(same, made, given))
    return isinstance(made, _PLAIN) and type(made) is type(given) and made == given


def _maker(given: Any, known: Mapping[int, Way], ways: list[Way]) -> Callable[[Any], Any] | None:
    way = known.get(id(given))
    if way is not None and not isinstance(given, _PLAIN):
        ways.append(way)
        return way.of
    if isinstance(given, _PLAIN):
        return lambda batch: given
    if type(given) is dict:
        makers = {key: _maker(value, known, ways) for key, value in given.items()}
        if None in makers.values():
            return None
        return lambda batch: {key: make(batch) for key, make in makers.items()}  # pyrefly: ignore[not-callable]
    if type(given) in (list, tuple):
        each = [_maker(value, known, ways) for value in given]
        if None in each:
            return None
        return lambda batch: type(given)(make(batch) for make in each)  # pyrefly: ignore[not-callable]
    return None


def _walk(batch: Any) -> Iterator[tuple[Any, tuple[tuple[bool, Any], ...]]]:
    """All objects of a batch, each with the fewest steps that lead to it."""
    seen: dict[int, tuple[Any, tuple[tuple[bool, Any], ...]]] = {}
    waiting: list[tuple[Any, tuple[tuple[bool, Any], ...]]] = [(batch, ())]
    while waiting and len(seen) < _MOST:
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
