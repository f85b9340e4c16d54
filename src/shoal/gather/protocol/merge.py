"""Merge partials into one result, in the same way on every rank, and convert the sources that consumers accept."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.gather.errors import FAULT_ORDER, REASONS, PlanMismatch, fault
from shoal.gather.payload.container import SUFFIXES
from shoal.gather.payload.payload_ref import PayloadRef
from shoal.gather.payload.spec import GradientSpec, canonical_json
from shoal.gather.protocol.partial import PartialGatherResult, RankReport
from shoal.gather.protocol.plan import GatherPlan

APPLY, SKIP = "APPLY", "SKIP"


@dataclass(kw_only=True, eq=False)
class Manifest:
    """The result that all ranks agree on: accepted and skipped peers, reasons, and owners; all in canonical order."""

    uids: list[int] = field(default_factory=list)
    global_steps: list[int] = field(default_factory=list)
    skipped_uids: list[int] = field(default_factory=list)
    skip_reasons: dict[int, str] = field(default_factory=dict)
    intended_uids: list[int] = field(default_factory=list)
    missing_uids: list[int] = field(default_factory=list)
    reserve_used_uids: list[int] = field(default_factory=list)
    success_rate: float = 0.0
    timestamps: dict[int, int] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    download_bytes: int = 0
    upload_bytes: int = 0
    window: int = 0
    version: str = "0"
    spec_hash: str = ""
    tiers: dict[int, int] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    norms: Tensor = field(default_factory=lambda: torch.zeros(0, 0, device="cpu"))
    sizes: dict[int, int] = field(default_factory=dict)
    duplicates_dropped: int = 0
    conflicts: int = 0
    skip_ranks: dict[int, int] = field(default_factory=dict, repr=False)
    """The rank that gave each reason; keeps the merge associative."""

    @cached_property
    def hash(self) -> str:
        """Hex BLAKE2b-256 of everything that is the same for every world size."""
        plain = {
            name: getattr(self, name)
            for name in (
                "uids", "global_steps", "skipped_uids", "intended_uids", "success_rate", "download_bytes", "window",
                "version", "spec_hash",
            )
        }  # fmt: skip
        by_uid = {
            name: sorted(getattr(self, name).items())
            for name in ("skip_reasons", "timestamps", "digests", "tiers", "sizes")
        }
        digest = blake2b(canonical_json(plain | by_uid).encode(), digest_size=32)
        digest.update(self.norms.contiguous().numpy().astype("<f4").tobytes())
        return digest.hexdigest()

    @cached_property
    def agreement(self) -> int:
        """63 bits over the hash and the owners, which must be equal on all ranks before an update."""
        text = canonical_json([self.hash, sorted(self.owners.items())])
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def __eq__(self, other: object) -> bool:
        """Compare everything except the two counters and the owners."""
        return self.hash == other.hash if isinstance(other, Manifest) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


def merge_reports(plan: GatherPlan | None, reports: Iterable[RankReport]) -> Manifest:
    """Merge reports: success wins, one copy per UID, canonical order. Associative, commutative and idempotent.

    Without a plan, every UID of tier 0 is intended. Raises PlanMismatch for reports of another window, version or spec.
    """
    reports = list(reports)
    window, version, spec_hash = _agreed(plan, reports)
    tiers: dict[int, int] = {}
    best: dict[int, tuple[int, str, int, RankReport, int]] = {}
    seen: dict[int, set[str]] = {}
    reasons: dict[int, tuple[int, int, str]] = {}
    duplicates = conflicts = 0
    for report in reports:
        for uid in report.attempted:
            tier = report.tiers.get(uid, 0)
            tiers[uid] = min(tiers.get(uid, tier), tier)
        for row, uid in enumerate(report.uids):
            digest = report.digests.get(uid, "")
            copy = (report.timestamps.get(uid, 0), digest, report.rank, report, row)
            if uid in best:
                if digest in seen[uid]:
                    duplicates += 1
                else:
                    conflicts += 1
            seen.setdefault(uid, set()).add(digest)
            if uid not in best or copy[:3] < best[uid][:3]:
                best[uid] = copy
        for uid in report.skipped_uids:
            reason = report.skip_reasons.get(uid, "local_error")
            blame = FAULT_ORDER.index(fault(reason)) if reason in REASONS else len(FAULT_ORDER)
            candidate = (blame, report.rank, reason)
            reasons[uid] = min(reasons.get(uid, candidate), candidate)
    order = lambda uid: (tiers[uid], uid)  # noqa: E731
    uids = sorted(best, key=order)
    skipped = sorted((uid for uid in reasons if uid not in best), key=order)
    intended = list(plan.intended) if plan is not None else sorted(uid for uid, tier in tiers.items() if tier == 0)
    kept = [(uid, *best[uid][2:]) for uid in uids]
    n_params = max((report.norms.shape[1] for report in reports if report.norms.ndim == 2), default=0)
    norms = torch.zeros(len(uids), n_params, device="cpu")
    for i, (_, _, report, row) in enumerate(kept):
        if report.norms.shape[1]:
            norms[i] = report.norms[row]
    sizes = {uid: report.sizes.get(uid, 0) for uid, _, report, _ in kept}
    return Manifest(
        uids=uids,
        global_steps=[_at(report.global_steps, row) for _, _, report, row in kept],
        skipped_uids=skipped,
        skip_reasons={uid: reasons[uid][2] for uid in skipped},
        skip_ranks={uid: reasons[uid][1] for uid in skipped},
        intended_uids=intended,
        missing_uids=[uid for uid in intended if uid not in best],
        reserve_used_uids=[uid for uid in uids if tiers[uid] == 1],
        success_rate=len(uids) / len(intended) if intended else 0.0,
        timestamps={uid: best[uid][0] for uid in uids},
        digests={uid: best[uid][1] for uid in uids},
        download_bytes=sum(sizes.values()),
        window=window,
        version=version,
        spec_hash=spec_hash,
        tiers={uid: tiers[uid] for uid in sorted(tiers, key=order)},
        owners={uid: rank for uid, rank, _, _ in kept},
        norms=norms,
        sizes=sizes,
        duplicates_dropped=duplicates,
        conflicts=conflicts,
    )


def _at(values: Sequence[int], row: int) -> int:
    return values[row] if row < len(values) else 0


def _agreed(plan: GatherPlan | None, reports: Sequence[RankReport]) -> tuple[int, str, str]:
    found = {(r.window, r.version, r.spec_hash) for r in reports}
    if plan is not None:
        spec_hash = reports[0].spec_hash if reports else ""
        found.add((plan.window, plan.version, spec_hash))
    if len(found) > 1:
        raise PlanMismatch(f"reports must have the same (window, version, spec hash), got {sorted(found)}")
    return next(iter(found), (0, "0", ""))


class StateView(Mapping[str, list[Any]]):
    """``N + "idxs" | "vals" | "quant_params"`` -> a list aligned with ``uids``; None for payloads on other ranks."""

    def __init__(self, uids: Sequence[int], payloads: Mapping[int, Any], spec: GradientSpec | None) -> None:
        self._payloads = [payloads.get(uid) for uid in uids]
        spec = spec or next((p.spec for p in self._payloads if isinstance(p, PayloadRef)), None)
        if spec is not None:
            self._keys = {p.name + suffix: i for i, p in enumerate(spec.params) for suffix in SUFFIXES}
        else:  # hand-made payloads
            made = [p for p in self._payloads if isinstance(p, Mapping)]
            self._keys = {key: -1 for p in made for key in p["state_dict"] if key.endswith(SUFFIXES)}

    def __getitem__(self, key: str) -> list[Any]:
        index = self._keys[key]
        return [self._read(payload, key, index) for payload in self._payloads]

    @staticmethod
    def _read(payload: Any, key: str, index: int) -> Any:
        if isinstance(payload, Mapping):
            return payload["state_dict"].get(key)
        if not isinstance(payload, PayloadRef) or payload.params[index] is None:
            return None
        data = payload.param(index)
        return data.idxs if key.endswith("idxs") else data.vals if key.endswith("vals") else data.quant

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@dataclass(kw_only=True, eq=False)
class GatherResult:
    """The merged result of one window. The fields of its manifest are also attributes of it.

    ``time`` is the slowest rank's wall seconds; ``partial`` is this rank's own (None after ``merge``); ``payloads``
    holds the payloads on this rank.
    """

    manifest: Manifest
    time: float = 0.0
    decision: str = SKIP
    partial: PartialGatherResult | None = None
    payloads: Mapping[int, Any] = field(default_factory=dict, repr=False)
    plan: GatherPlan | None = field(default=None, repr=False)
    """Rank 0's plan; None after ``merge``."""
    spec: GradientSpec | None = field(default=None, repr=False)
    record: dict[str, Any] = field(default_factory=dict, repr=False)
    """This rank's structured record of the window, for the log."""

    def __getattr__(self, name: str) -> Any:
        if name in _MANIFEST_FIELDS:
            return getattr(self.manifest, name)
        raise AttributeError(f"a GatherResult has no attribute {name!r}")

    def __eq__(self, other: object) -> bool:
        """Compare everything except the wall time, the two counters and the owners."""
        if not isinstance(other, GatherResult):
            return NotImplemented
        return (self.manifest, self.decision) == (other.manifest, other.decision)

    __hash__ = None  # type: ignore[assignment]

    @property
    def state_dict(self) -> StateView:
        return StateView(self.manifest.uids, self.payloads, self.spec)

    def or_none(self) -> "GatherResult | None":
        """Return this result, or None if nothing was accepted."""
        return self if self.manifest.uids else None


_MANIFEST_FIELDS = frozenset(f.name for f in dataclasses.fields(Manifest)) | {"hash"}


@runtime_checkable
class PartialSource(Protocol):
    """Any other source that consumers accept, such as an artifact reader."""

    def as_partials(self) -> list[PartialGatherResult]: ...


Source = GatherResult | RankReport | PartialSource | Sequence[Any] | None


def as_partials(source: Source) -> list[PartialGatherResult]:
    """Convert any source to a list of partials; ``None`` and empty sequences give an empty list."""
    if source is None:
        return []
    if isinstance(source, PartialGatherResult):
        return [source]
    if isinstance(source, RankReport):
        values = {f.name: getattr(source, f.name) for f in dataclasses.fields(RankReport)}
        return [PartialGatherResult(**values)]
    if isinstance(source, GatherResult):
        return _split(source)
    if isinstance(source, PartialSource):
        return source.as_partials()
    if isinstance(source, Iterable) and not isinstance(source, Mapping | str | bytes):
        return [partial for item in source for partial in as_partials(item)]
    raise ConfigError(
        "a source must be a gather result, a partial, an artifact reader or a sequence of them, "
        f"got {type(source).__name__}"
    )


def _split(result: GatherResult) -> list[PartialGatherResult]:
    """Split an aggregate into one partial per rank; merging them restores it."""
    m = result.manifest
    steps, rows = dict(zip(m.uids, m.global_steps, strict=True)), {uid: i for i, uid in enumerate(m.uids)}
    partials = []
    ranks = sorted({*m.owners.values(), *m.skip_ranks.values()}) or [0]
    for rank in ranks:
        uids = [uid for uid in m.uids if m.owners.get(uid, ranks[0]) == rank]
        skipped = [uid for uid in m.skipped_uids if m.skip_ranks.get(uid, ranks[0]) == rank]
        partials.append(
            PartialGatherResult(
                rank=rank,
                world_size=result.partial.world_size if result.partial is not None else max(ranks) + 1,
                window=m.window,
                assigned_uids=sorted([*uids, *skipped]),
                uids=uids,
                tiers={uid: m.tiers.get(uid, 0) for uid in [*uids, *skipped]},
                skipped_uids=skipped,
                skip_reasons={uid: m.skip_reasons[uid] for uid in skipped},
                global_steps=[steps[uid] for uid in uids],
                timestamps={uid: m.timestamps[uid] for uid in uids},
                digests={uid: m.digests[uid] for uid in uids},
                norms=m.norms[[rows[uid] for uid in uids]],
                sizes={uid: m.sizes[uid] for uid in uids},
                download_bytes=sum(m.sizes[uid] for uid in uids),
                elapsed=result.time,
                version=m.version,
                spec_hash=m.spec_hash,
                payloads={uid: result.payloads[uid] for uid in uids if uid in result.payloads},
            )
        )
    return partials


def merge(sources: Source, plan: GatherPlan | None = None, *, min_peers: int = 1) -> GatherResult:
    """Merge partials and aggregates, in any order and nesting; duplicates are applied once."""
    if isinstance(sources, GatherResult) and plan is None:
        return dataclasses.replace(sources, partial=None)
    partials = as_partials(sources)
    manifest = merge_reports(plan, partials)
    if not isinstance(sources, RankReport) and isinstance(sources, Iterable):
        for item in sources:  # keep the counts of an aggregate that is merged again
            if isinstance(item, GatherResult):
                manifest.duplicates_dropped += item.manifest.duplicates_dropped
                manifest.conflicts += item.manifest.conflicts
    payloads: dict[int, Any] = {}
    by_rank = sorted(partials, key=lambda partial: partial.rank)
    for uid in manifest.uids:
        wanted = (manifest.timestamps[uid], manifest.digests[uid])
        for partial in by_rank:  # the owner's, or an equal one
            found = (partial.timestamps.get(uid, 0), partial.digests.get(uid, ""))
            if uid in partial.uids and uid in partial.payloads and found == wanted:
                payloads[uid] = partial.payloads[uid]
                break
    return GatherResult(
        manifest=manifest,
        time=max((p.elapsed for p in partials), default=0.0),
        decision=APPLY if len(manifest.uids) >= max(min_peers, 1) else SKIP,
        payloads=payloads,
    )
