"""Handle ranks with different numbers of batches: agree before each batch, and make batches without samples."""

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
"""A rank's status: no more batches; one more; reading failed; stopped; never had a batch, so it cannot join."""


class Verdict(NamedTuple):
    """What the ranks do next."""

    proceeds: bool
    """Whether there is another step."""
    use_mine: bool
    """Whether this rank uses its batch now; otherwise it joins the step without samples."""
    section: int = 0
    """The section of the batches in this step."""


class Agreement:
    """Lets ranks agree on each step, so that they use their batches together, in the order of sections (epochs).

    Args:
        ranks: the ranks that must agree; None for a single process.
        on_uneven: when some ranks have run out of batches: ``join``, they continue without samples; ``stop``, all
            ranks stop; ``error``, all raise.
    """

    def __init__(self, ranks: Ranks | None, on_uneven: OnUneven) -> None:
        self._ranks = None if ranks is None or ranks.world_size == 1 else ranks
        self._on_uneven = on_uneven
        self._number = 0

    def next(self, status: int, section: int = 0) -> Verdict:
        """Exchange statuses with the other ranks and return what to do next.

        Raises:
            PeerError: another rank stopped, or failed to read.
            ConfigError: some ranks have run out, and ``on_uneven`` is ``error`` or a rank cannot join.
        """
        number, self._number = self._number, self._number + 1
        if self._ranks is None:
            return Verdict(status == HAS, status == HAS, section)
        rank, answers = self._ranks.rank, self._ranks.current.gather_ints([status, section])
        for failure, text in ((FAILED, "could not read batch"), (CLOSED, "stopped before batch")):
            who = [r for r, (answer, _) in enumerate(answers) if answer == failure and r != rank]
            if who and status not in (FAILED, CLOSED):
                raise PeerError(f"rank {rank}: rank(s) {who} {text} {number}; see their logs", ranks=who)
        have = [r for r, (answer, _) in enumerate(answers) if answer == HAS]
        ended = [r for r in range(len(answers)) if r not in have]
        if not have or status in (FAILED, CLOSED) or (ended and self._on_uneven == "stop"):
            return Verdict(False, False)
        if ended and self._on_uneven == "error":
            raise ConfigError(
                f"rank(s) {ended} ran out after {number} batches, rank(s) {have} did not; use on_uneven='join' to let "
                "them continue without samples, or 'stop' to stop all ranks"
            )
        never = [r for r, (answer, _) in enumerate(answers) if answer == CANNOT_JOIN]
        if never:
            raise ConfigError(
                f"rank(s) {never} have no batch at all, so they have no example for a batch without samples; give "
                "every rank at least one batch, or pass empty_batch=, or use on_uneven='stop'"
            )
        first = min(answers[r][1] for r in have)
        return Verdict(True, status == HAS and section == first, first)

    def leave(self) -> None:
        """Notify the other ranks that this one stops; those that continue raise."""
        if self._ranks is not None:
            self._ranks.current.gather_ints([CLOSED, 0])


def without_samples(batch: Any, offsets: frozenset[int]) -> Any:
    """A batch like ``batch`` without samples, for a rank that has run out while others have more.

    Objects with a method ``without_samples()`` make it themselves. The first dimension of other tensors must be the
    samples.

    Args:
        offsets: the ``id()`` of tensors that hold offsets of bags; these keep their first element.
    """
    made: dict[int, Any] = {}

    def empty(one: Any) -> Any:  # an object that occurs twice is replaced by the same object
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
        f"Pipeline: a rank has run out of batches, and cannot make one without samples from a {type(one).__name__}; "
        "pass empty_batch=, a function that makes it from the last batch, or use on_uneven='stop'"
    )


def offsets_in(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[int]:
    """The ``id()`` of the arguments of a module's forward that hold offsets of bags, including the last offset."""
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
