"""`RankGroup`: the base class of groups of tables over ranks, however their rows are spread."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError, DeadlineError, PeerError
from shoal.sharded.all_to_all.exchange import FIND, Call
from shoal.sharded.all_to_all.rounds import Send, Steps, run
from shoal.table.protocol import Features, Found, Missing, Part, Step, Traits

MISSING = {"zeros": 1, "initial": 2}
_RECENT = 16
_REPORTED = "The other ranks were notified that this rank refused its part."


class RankGroup:
    """Tables of one ``dim`` over the same ranks.

    A subclass implements ``find_steps``, ``rows_steps``, ``pooled_steps`` and ``update_steps``, which yield their
    exchanges. Every rank must make every call, even without ids. Each exchange carries the number of its find and the
    names of the tables: if ranks are in different calls, or one of them refuses its input, all of them raise before
    anything has changed.
    """

    def __init__(self, tables: tuple[Any, ...], device: torch.device, trains: bool, **traits: Any) -> None:
        self.tables = tables
        self.dim: int = tables[0].dim_size
        self.device = device
        self.exchange = tables[0].exchange
        self.rank: int = tables[0].rank
        self.ranks: int = tables[0].world_size
        self.names = tuple(table.name for table in tables)
        self._recent: dict[int, Any] = {}
        self._remembering = threading.Lock()
        self.traits = Traits(
            device=device, collective=True, remote=True, trains=trains, local_state=False,
            shares=("ranks", self.exchange.main.key), **traits,
        )  # fmt: skip

    # --- the calls of a group, and calls in shared exchanges ----------------------------------------------------------

    def together(self, calls: Sequence[Steps[Any]]) -> list[Any]:
        """Run calls of this group, and of others with the same ``traits.shares``, in shared exchanges."""
        return run(self.exchange, calls)

    def find(self, ids: Tensor, counts: Tensor, features: Features, *, missing: Missing) -> Found:
        return self.together([self.find_steps(ids, counts, features, missing=missing)])[0]

    def rows(self, found: Found, features: Features, *, missing: Missing) -> Tensor:
        return self.together([self.rows_steps(found, features, missing=missing)])[0]

    def pooled(
        self,
        found: Found,
        features: Features,
        offsets: Tensor,
        weights: Tensor | None,
        out: Tensor,
        *,
        missing: Missing,
        marks: Tensor | None = None,
    ) -> None:
        self.together([self.pooled_steps(found, features, offsets, weights, out, missing=missing, marks=marks)])

    def update(self, parts: Sequence[Part], *, step: Step, each: Literal["sum", "occurrence"] = "sum") -> None:
        """Make one step per rank and distinct id. ``each`` must be "sum": each distinct id is sent once."""
        self.together([self.update_steps(parts, step=step, each=each)])

    def find_steps(self, ids: Tensor, counts: Tensor, features: Features, *, missing: Missing) -> Steps[Found]:
        raise NotImplementedError

    def rows_steps(self, found: Found, features: Features, *, missing: Missing) -> Steps[Tensor]:
        raise NotImplementedError

    def pooled_steps(
        self,
        found: Found,
        features: Features,
        offsets: Tensor,
        weights: Tensor | None,
        out: Tensor,
        *,
        missing: Missing,
        marks: Tensor | None = None,
    ) -> Steps[None]:
        raise NotImplementedError

    def update_steps(
        self, parts: Sequence[Part], *, step: Step, each: Literal["sum", "occurrence"] = "sum"
    ) -> Steps[None]:
        raise NotImplementedError

    # --- plans of recent finds ----------------------------------------------------------------------------------------

    def remember(self, packed: Tensor, plan: Any) -> Tensor:
        """Keep the plan of a find during the next few finds, under the address of ``packed``; returns ``packed``."""
        with self._remembering:
            self._recent[packed.data_ptr()] = plan
            while len(self._recent) > _RECENT:
                self._recent.pop(next(iter(self._recent)), None)
        return packed

    def recall(self, found: Found) -> Any:
        """The plan of a find that `remember` kept; None if it must be unpacked."""
        plan = self._recent.get(found.came.data_ptr())
        if plan is None or found.came.numel() < 2 or int(found.came[1]) != plan.number:
            return None
        return plan

    # --- refusing -----------------------------------------------------------------------------------------------------

    def refused(self, error: Exception) -> Exception:
        """Report to the other ranks, which are in a `find`, that this rank failed; returns ``error``, to be raised.

        An error from another rank or from a call of this group is not reported again: the other ranks know of it.
        """
        if isinstance(error, PeerError | DeadlineError) or _REPORTED in getattr(error, "__notes__", ()):
            return error
        call = Call(FIND, self.tables[0].next_find(), self.names, MISSING["zeros"], True)
        reported(error)

        def report() -> Steps[None]:
            yield self.counts(call, None)

        self.together([report()])
        return error

    def counts(self, call: Call, mine: Any) -> Send:
        """The first exchange of a find; ``mine`` holds this rank's counts, None if it refuses."""
        raise NotImplementedError

    # --- checks -------------------------------------------------------------------------------------------------------

    def named(self) -> str:
        return ", ".join(map(repr, self.names))

    def sizes(self, ids: Tensor, counts: Tensor, features: Features) -> list[int]:
        """The number of ids of each feature, checked."""
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise ConfigError(f"tables {self.named()}: ids must be int64 [N], got {ids.dtype} {list(ids.shape)}")
        sizes = Found(ids, counts, ids, ids).sizes(features)
        if len(sizes) != len(features.tables) or min(sizes, default=0) < 0 or sum(sizes) != ids.numel():
            raise ConfigError(
                f"tables {self.named()}: counts must be one per feature ({len(features.tables)}) and add up to the "
                f"{ids.numel()} ids, got {sizes}"
            )
        if not all(0 <= table < len(self.tables) for table in features.tables):
            raise ConfigError(f"tables {self.named()}: features must read tables 0..{len(self.tables) - 1}")
        return sizes

    def by_find(self, parts: Sequence[Part], plan_of: Callable[[Part], Any]) -> list[tuple[Any, list[Part]]]:
        """The plan and the parts of each find, in the order of finds."""
        found: dict[int, tuple[Any, list[Part]]] = {}
        for part in parts:
            plan = plan_of(part)
            found.setdefault(plan.number, (plan, []))[1].append(part)
        return [found[number] for number in sorted(found)]

    def check_update(self, each: str) -> None:
        if each != "sum":
            raise ConfigError(
                f"tables {self.named()}: each must be 'sum' in an update over ranks, which makes one step per "
                f"distinct id; got {each!r}"
            )
        if not self.traits.trains:
            raise ConfigError(f"tables {self.named()}: serving tables cannot be updated")

    def check_finite(self, values: Tensor, blocks: Iterable[tuple[int, Tensor]]) -> None:
        """Raise for NaN and infinity in tables that refuse them, before any rank has changed anything.

        ``blocks`` are the parts of ``values`` with the tables that they belong to. Values count as they are sent, in
        which large ones can become infinite.
        """
        strict = [getattr(table.table, "on_bad_gradient", "ignore") == "raise" for table in self.tables]
        if not any(strict) or self.is_finite(values):
            return
        for k, block in blocks:
            if strict[k] and not bool(self.exchange.cast(block).isfinite().all()):
                raise ConfigError(
                    f"table {self.names[k]!r}: a gradient holds NaN or infinity; nothing was applied on any rank. "
                    "Clip it, or set on_bad_gradient='skip'"
                )

    def is_finite(self, values: Tensor) -> bool:
        """Whether all values are certainly finite as they are sent; False does not mean that one is not."""
        return bool(torch.isfinite(self.exchange.cast(values).sum()))


def reported(error: Exception) -> Exception:
    """``error`` with the note that the other ranks know of it."""
    error.add_note(_REPORTED)
    return error


def checksum(numbers: Sequence[Any]) -> int:
    """One number for the other values that must be equal on all ranks; 0 if there are none."""
    return zlib.crc32(repr(list(numbers)).encode()) if numbers else 0
