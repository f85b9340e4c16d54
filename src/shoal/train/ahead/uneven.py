"""Ranks that have different numbers of batches: what they tell each other before each one, and empty batches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor

from shoal.comm.ranks.ranks import Ranks
from shoal.errors import ConfigError, PeerError
from shoal.ragged import Ragged
from shoal.train.ahead.batches import is_data, rebuilt

OnUneven = Literal["join", "stop", "error"]
ENDED, HAS, FAILED, CLOSED, CANNOT_JOIN = range(5)
"""What a rank says: no more batches; one more; reading it failed; it stopped; it never had one, so cannot join."""


class Verdict(NamedTuple):
    """What comes next, on all ranks."""

    goes_on: bool
    mine: bool
    """Whether this rank uses its batch now; else it takes part without samples."""
    section: int = 0
    """Of the batches that are used."""


class Agreement:
    """Has ranks that work in step use their batches together, in the order of sections (such as epochs).

    Args:
        ranks: who; None: this process alone.
        on_uneven: what happens when some ranks have run out: ``join``, they take part without samples; ``stop``, all
            ranks stop; ``error``, all raise.
    """

    def __init__(self, ranks: Ranks | None, on_uneven: OnUneven) -> None:
        self._ranks = None if ranks is None or ranks.world_size == 1 else ranks
        self._on_uneven = on_uneven
        self._number = 0

    def next(self, says: int, section: int = 0) -> Verdict:
        """What comes next, once every rank has said what it has.

        Raises:
            PeerError: another rank stopped, or failed to read.
            ConfigError: ranks differ, and must not or cannot.
        """
        number, self._number = self._number, self._number + 1
        if self._ranks is None:
            return Verdict(says == HAS, says == HAS, section)
        rank, told = self._ranks.rank, self._ranks.current.gather_ints([says, section])
        for what, kind in ((FAILED, "could not read its batch"), (CLOSED, "stopped before batch")):
            who = [r for r, (said, _) in enumerate(told) if said == what and r != rank]
            if who and says not in (FAILED, CLOSED):
                raise PeerError(f"rank {rank}: rank(s) {who} {kind} {number}; see their logs", ranks=who)
        have = [r for r, (said, _) in enumerate(told) if said == HAS]
        ended = [r for r in range(len(told)) if r not in have]
        if not have or says in (FAILED, CLOSED) or (ended and self._on_uneven == "stop"):
            return Verdict(False, False)
        if ended and self._on_uneven == "error":
            raise ConfigError(
                f"rank(s) {ended} ran out after {number} batches, rank(s) {have} did not; with on_uneven='join' they "
                "take part without samples, with 'stop' all ranks stop"
            )
        never = [r for r, (said, _) in enumerate(told) if said == CANNOT_JOIN]
        if never:
            raise ConfigError(
                f"rank(s) {never} have no batch at all, so they cannot tell what one without samples looks like; give "
                "every rank at least one batch, or empty_batch=, or use on_uneven='stop'"
            )
        first = min(told[r][1] for r in have)
        return Verdict(True, says == HAS and section == first, first)

    def leave(self) -> None:
        """Tells the others that this rank stops here; those that go on raise."""
        if self._ranks is not None:
            self._ranks.current.gather_ints([CLOSED, 0])


def without_samples(batch: Any, offsets: frozenset[int]) -> Any:
    """A batch like ``batch`` with no samples: what a rank computes on while only others have more.

    What has a method ``without_samples()`` is asked. Else the first dimension of every tensor is taken to be samples.

    Args:
        offsets: the ``id()`` of tensors that are offsets of bags, of which the first element stays.
    """
    made: dict[int, Any] = {}

    def empty(one: Any) -> Any:  # one object for one object
        if id(one) not in made:
            made[id(one)] = _empty(one, id(one) in offsets)
        return made[id(one)]

    return batch.without_samples() if hasattr(batch, "without_samples") else rebuilt(batch, empty)


def _empty(one: Any, offsets: bool) -> Any:
    if isinstance(one, Tensor):
        return one if one.dim() == 0 else one[:1] * 0 if offsets else one[:0]
    if isinstance(one, Ragged) and isinstance(one.values, Tensor):
        return Ragged.trusted(one.values[:0], one.row_splits[:1])
    if is_data(one) and isinstance(one, list):
        return []
    if one is None or isinstance(one, str | bytes | int | float | bool):
        return one
    if hasattr(one, "without_samples"):
        return one.without_samples()
    if hasattr(type(one), "from_lengths_sync"):  # a KeyedJaggedTensor
        return type(one).from_lengths_sync(keys=one.keys(), values=one.values()[:0], lengths=one.lengths()[:0])
    raise ConfigError(
        f"Pipeline: a rank that has run out of batches cannot make one without samples of {type(one).__name__}; give "
        "empty_batch=, a function that makes it of the last batch, or on_uneven='stop'"
    )


def offsets_in(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[int]:
    """The ``id()`` of the tensors that are offsets, with their end, among the arguments of a module's forward."""
    if not getattr(module, "include_last_offset", True):
        return frozenset()
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    found = {id(given["offsets"])} if isinstance(given.get("offsets"), Tensor) else set()
    waiting = list(given.values())
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting += one.values()
        elif type(one) is tuple and len(one) in (2, 3) and all(isinstance(part, Tensor) for part in one):
            found.add(id(one[1]))
    return frozenset(found)
