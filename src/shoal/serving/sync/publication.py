"""The interface between a publisher and its source: the changes to send, and where they come from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shoal.stamps import Stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes at a source since the last call."""

    stamp: Stamp
    """The current stamp; rows read before the next update have it."""
    ids: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Table -> distinct int64 ids on the CPU that were learnt, evicted, expired or erased; tables may be omitted."""
    since: float = 0.0
    """Unix time of the oldest of these changes, or slightly earlier; 0 if there are none."""
    weights: Mapping[str, torch.Tensor] | None = None
    """The dense weights if they changed: every parameter and buffer that the export's net has in its ``state_dict``,
    under the names there, as copies on the CPU that are not modified later. None: unchanged."""
    lost: bool = False
    """Whether more ids changed than could be kept; the publisher then sends every row again."""


class Source(Protocol):
    """A source of trained rows and weights: a trainer ("trainer", "trainer_1") or a parameter server ("ps_0").

    `Publisher` calls ``take`` and ``read`` in its ``round()``, on the caller's thread: a trainer calls that between two
    steps. ``scan`` and ``owns`` are called by the publisher's own thread while training continues.
    """

    @property
    def name(self) -> str:
        """The source's name: unique among a model's sources, and the same in every run."""
        ...

    @property
    def base(self) -> Stamp | None:
        """Stamp of the checkpoint that this run resumes from; None if it started from scratch."""
        ...

    @property
    def tables(self) -> Mapping[str, int]:
        """Name of each table, or of each sub-table of the multi-table, as the export has it -> dim."""
        ...

    def take(self) -> Changes:
        """Return the changes since the last call and forget them."""
        ...

    def read(self, table: str, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(float32 values ``[n, dim]`` on the CPU, bool ``[n]``: whether there is such a row).

        Ids without a row are sent as deletions; their values are not used.
        """
        ...

    def scan(self, table: str) -> Iterator[torch.Tensor]:
        """All ids that have rows here now, in parts of any size."""
        ...

    def owns(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """bool ``[n]``: the ids that this source trains; a parameter server has those of its shard."""
        ...
