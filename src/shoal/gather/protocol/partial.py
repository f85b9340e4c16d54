"""One rank's part of a gather, and the small report that it sends to the other ranks."""

import copy
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal.gather.errors import GatherError
from shoal.gather.payload.spec import canonical_json

if TYPE_CHECKING:
    from shoal.gather.protocol.merge import Manifest


@dataclass(kw_only=True, eq=False)
class RankReport:
    """A rank's attempts and results: its partial without the payloads.

    Lists are aligned with ``uids``; maps are by UID. ``tiers`` covers all attempted UIDs (absent = 0); ``norms`` is
    float32 [len(uids), n_params]; ``success_rate_part`` is a rank's health, never averaged into a global rate.
    """

    rank: int = 0
    world_size: int = 1
    window: int = 0
    assigned_uids: list[int] = field(default_factory=list)
    uids: list[int] = field(default_factory=list)
    tiers: dict[int, int] = field(default_factory=dict)
    skipped_uids: list[int] = field(default_factory=list)
    skip_reasons: dict[int, str] = field(default_factory=dict)
    global_steps: list[int] = field(default_factory=list)
    timestamps: dict[int, int] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    success_rate_part: float = None  # type: ignore[assignment]  # pyrefly: ignore
    norms: Tensor = None  # type: ignore[assignment]  # pyrefly: ignore
    sizes: dict[int, int] = field(default_factory=dict)
    download_bytes: int = 0
    elapsed: float = 0.0
    version: str = "0"
    spec_hash: str = ""

    def __post_init__(self) -> None:
        if self.success_rate_part is None:
            self.success_rate_part = len(self.uids) / len(self.assigned_uids) if self.assigned_uids else 0.0
        if self.norms is None:
            self.norms = torch.zeros(len(self.uids), 0, device="cpu")

    @property
    def attempted(self) -> list[int]:
        return [*self.uids, *self.skipped_uids]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RankReport):
            return NotImplemented
        return all(
            torch.equal(self.norms, other.norms)
            if f.name == "norms"
            else getattr(self, f.name) == getattr(other, f.name)
            for f in fields(RankReport)
        )

    __hash__ = None  # type: ignore[assignment]

    def to_bytes(self) -> bytes:
        """Encode as length-prefixed canonical JSON, one row per attempted UID, then the norms as raw float32."""
        steps = dict(zip(self.uids, self.global_steps, strict=False))
        maps = (self.tiers, steps, self.timestamps, self.digests, self.sizes)
        accepted = [[uid, *(values.get(uid) for values in maps)] for uid in self.uids]
        skipped = [[uid, self.tiers.get(uid), self.skip_reasons.get(uid)] for uid in self.skipped_uids]
        head: dict[str, Any] = {
            "r": self.rank,
            "W": self.world_size,
            "w": self.window,
            "v": self.version,
            "h": self.spec_hash,
            "b": self.download_bytes,
            "e": self.elapsed,
            "n": self.norms.shape[1] if self.norms.ndim == 2 else 0,
            "o": self.success_rate_part,
            "a": accepted,
            "s": skipped,
        }
        if list(self.assigned_uids) != sorted(self.attempted):
            head["u"] = list(self.assigned_uids)
        text = canonical_json(head).encode()
        return struct.pack("<I", len(text)) + text + self.norms.numpy().astype("<f4").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "RankReport":
        try:
            (length,) = struct.unpack_from("<I", data)
            head = json.loads(bytes(data[4 : 4 + length]))
            accepted, skipped = head["a"], head["s"]
            norms = np.frombuffer(data, dtype="<f4", offset=4 + length).astype(np.float32)
            rows = [*accepted, *skipped]
            column = lambda rows, i: {row[0]: row[i] for row in rows if row[i] is not None}  # noqa: E731
            return cls(
                rank=head["r"],
                world_size=head["W"],
                window=head["w"],
                version=head["v"],
                spec_hash=head["h"],
                download_bytes=head["b"],
                elapsed=head["e"],
                success_rate_part=head["o"],
                assigned_uids=head.get("u", sorted(row[0] for row in rows)),
                uids=[row[0] for row in accepted],
                tiers=column(rows, 1),
                global_steps=list(column(accepted, 2).values()),
                timestamps=column(accepted, 3),
                digests=column(accepted, 4),
                sizes=column(accepted, 5),
                skipped_uids=[row[0] for row in skipped],
                skip_reasons=column(skipped, 2),
                norms=torch.from_numpy(norms.reshape(len(accepted), head["n"])),
            )
        except (struct.error, ValueError, KeyError, IndexError, TypeError) as error:
            raise GatherError(f"the bytes are not a rank report: {error!r}") from error


@dataclass(kw_only=True, eq=False)
class PartialGatherResult(RankReport):
    """One rank's share of a gather with its payloads; a rank without payloads also has one.

    ``payloads`` maps accepted UIDs to PayloadRefs (or to payload dicts, in hand-made ones). ``manifest`` is the merged
    metadata of all ranks once the gather has agreed on it.
    """

    payloads: Mapping[int, Any] = field(default_factory=dict)
    manifest: "Manifest | None" = field(default=None, repr=False)

    def report(self) -> RankReport:
        """A copy without payloads, independent of this object."""
        values = {f.name: getattr(self, f.name) for f in fields(RankReport)}
        copied: dict[str, Any] = {k: copy.copy(v) if isinstance(v, list | dict) else v for k, v in values.items()}
        return RankReport(**copied)
