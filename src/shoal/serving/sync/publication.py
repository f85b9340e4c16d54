"""What a publisher sends, and where it gets it from: the seam between those who learn and the replicas."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shoal.stamps import Stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What changed at a source since it was asked last."""

    stamp: Stamp
    """Of now: what is read before the next update is as new as this."""
    ids: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """table -> distinct int64 ids on the CPU that were learnt, evicted, expired or erased; tables may be left out."""
    since: float = 0.0
    """Unix time of the oldest of these changes, or a little before; 0 where there are none."""
    weights: Mapping[str, torch.Tensor] | None = None
    """The dense weights if they changed: every parameter and buffer that the export's net has in its ``state_dict``,
    under the names there, as copies on the CPU that nobody changes later. None: as they were."""
    lost: bool = False
    """Whether more was touched than could be kept: the publisher sends every row again."""


class Source(Protocol):
    """One who learns rows and weights: a trainer ("trainer", "trainer_1"), or a parameter server ("ps_0").

    `Publisher` calls ``take`` and ``read`` in its ``round()``, on the caller's thread: a trainer calls that between two
    steps. ``scan`` and ``owns`` are called by the publisher's own thread while the source goes on learning.
    """

    @property
    def name(self) -> str:
        """Distinct among the sources of a model, and the same in the next run."""
        ...

    @property
    def base(self) -> Stamp | None:
        """Stamp of the checkpoint that this run continues from; None if the run began from nothing."""
        ...

    @property
    def tables(self) -> Mapping[str, int]:
        """Name of each table, or of each sub-table of the multi-table, as the export has it -> dim."""
        ...

    def take(self) -> Changes:
        """The changes since the last call, which the source then forgets."""
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
        """bool ``[n]``: which ids are this source's to learn; a parameter server has those of its shard."""
        ...
