"""Index overlap: find peers that chose the same positions too often, by exact counts that add up over any split."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError
from shoal.gather.errors import BudgetTooSmall, PayloadsUnreadable
from shoal.gather.payload.codec import unpack12
from shoal.gather.payload.spec import CODECS, GradientSpec, ParamSpec
from shoal.gather.protocol.control import Control
from shoal.gather.protocol.holding import Holding, hold
from shoal.gather.protocol.merge import Source
from shoal.gather.protocol.plan import chunk_ranges
from shoal.host import as_tensor

SEVERITY_MULTIPLIERS = {"high": 0.5, "max": 0.0, "mega": 0.0}
_RANKING = ("high", "max", "mega")


def overlap_severity(overlap: float) -> str:
    """``"mega"`` from 0.6, ``"max"`` from 0.5, else ``"high"``."""
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap_severity: overlap must be in 0..1, got {overlap}")
    return "mega" if overlap >= 0.6 else "max" if overlap >= 0.5 else "high"


@dataclass(kw_only=True, eq=False)
class OverlapReport:
    """Pairs of peers with the share of positions that both chose. ``counts`` is int64 [P, P] in canonical order."""

    pairs_checked: int = 0
    pairs_high_ovlap: int = 0
    ratio_high_ovlap: float = 0.0
    mean_overlap: float = 0.0
    min_overlap: float = 0.0
    max_overlap: float = 0.0
    min_pair: tuple[int, int] | None = None
    max_pair: tuple[int, int] | None = None
    pairs_over_thresh: list[tuple[int, int, float]] = field(default_factory=list)
    uids_over_thresh: dict[int, str] = field(default_factory=dict)
    exact: bool = True
    counts: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64, device="cpu"))
    total: int = 0
    sampled: int = 0
    """Chunks examined in ``mode="sampled"``: the error exceeds e with probability at most 2*exp(-2*sampled*e*e)."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OverlapReport):
            return NotImplemented
        mine, theirs = dict(vars(self)), dict(vars(other))
        return torch.equal(mine.pop("counts"), theirs.pop("counts")) and mine == theirs

    __hash__ = None  # type: ignore[assignment]


def index_overlap(
    source: Source,
    *,
    spec: GradientSpec,
    threshold: float = 0.4,
    group: Any = None,
    mode: str = "exact",
    budget_bytes: int = 256 << 20,
    sample_chunks: int = 4096,
    control_timeout_s: float = 240.0,
) -> OverlapReport:
    """Count the shared positions of every two peers, and name the later one of each pair at or over ``threshold``.

    The threshold is compared exactly, as the decimal that was written (0.4 is 2/5). With ``group`` the chunks are split
    over the ranks, in rounds within ``budget_bytes``, and every rank gets the same report. If a rank can no longer read
    a payload, all ranks raise GatherError.
    """
    if mode not in ("exact", "sampled"):
        raise ConfigError(f"index_overlap: mode must be 'exact' or 'sampled', got {mode!r}")
    limit = Fraction(str(threshold)) if not isinstance(threshold, Fraction) else threshold
    if not 0 <= limit <= 1:
        raise ConfigError(f"index_overlap: threshold must be in 0..1, got {threshold}")
    control = Control(group, timeout_s=control_timeout_s)
    holding = hold(source, spec, control, norms=False)
    P = len(holding.manifest.uids)
    chunks = _Chunks(spec)
    chosen = None
    if mode == "sampled" and sample_chunks < chunks.total:
        seed = blake2b(f"overlap-{holding.manifest.window}".encode(), digest_size=8).digest()
        chosen = sorted(random.Random(seed).sample(range(chunks.total), sample_chunks))
    if P < 2:
        return OverlapReport(
            counts=torch.zeros(P, P, dtype=torch.int64, device="cpu"), total=chunks.positions, exact=mode == "exact"
        )
    counts = torch.zeros(P, P, dtype=torch.int64, device="cpu")
    picked = chunks.total if chosen is None else len(chosen)
    if control.world == 1 or holding.everywhere:
        pieces = _selection(chunks, chosen, *chunk_ranges(picked, control.world)[control.rank])
        trouble = _attempt(lambda: [_add_local(holding, chunks, *piece, counts) for piece in pieces])
    else:
        trouble = _add_exchanged(holding, chunks, chosen, control, budget_bytes, counts)
    answers = control.all_gather_bytes(trouble.encode())
    if any(answers):
        raise PayloadsUnreadable({rank: answer.decode() for rank, answer in enumerate(answers) if answer})
    control.reduce_tensor(counts, "sum")
    weights = _weights(holding, chunks, chosen)
    return _report(holding, counts, weights, limit, exact=mode == "exact", sampled=picked if mode == "sampled" else 0)


def _attempt(work: Callable[[], Any]) -> str:
    """Do local work between collectives; return its error, if any, to be reported to the others later."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def overlap_signature(source: Source, spec: GradientSpec, start: int, stop: int) -> Tensor:
    """Return int64 [P, P]: shared positions in the chunks ``start..stop`` of all parameters, numbered in spec order."""
    holding = hold(source, spec, Control(), norms=False)
    chunks = _Chunks(spec)
    if not 0 <= start <= stop <= chunks.total:
        raise ConfigError(f"overlap_signature: chunks must be in 0..{chunks.total}, got {start}..{stop}")
    P = len(holding.manifest.uids)
    counts = torch.zeros(P, P, dtype=torch.int64, device="cpu")
    for index, first, last in chunks.pieces(start, stop):
        _add_local(holding, chunks, index, first, last, counts)
    return counts


class _Chunks:
    """All chunks of all parameters, numbered in spec order."""

    def __init__(self, spec: GradientSpec) -> None:
        self.spec = spec
        self.starts = [0, *itertools.accumulate(p.chunks for p in spec.params)]
        self.total = self.starts[-1]
        self.positions = sum(p.chunks * p.k for p in spec.params)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(parameter, first chunk, last chunk + 1) for a range of numbers."""
        found = []
        for index, (begin, end) in enumerate(itertools.pairwise(self.starts)):
            first, last = max(start, begin), min(stop, end)
            if first < last:
                found.append((index, first - begin, last - begin))
        return found


def _selection(chunks: _Chunks, chosen: list[int] | None, start: int, stop: int) -> list[tuple[int, int, int]]:
    if chosen is None:
        return chunks.pieces(start, stop)
    return [piece for number in chosen[start:stop] for piece in chunks.pieces(number, number + 1)]


def _weights(holding: Holding, chunks: _Chunks, chosen: list[int] | None) -> Tensor:
    """int64 [P, P]: positions that a pair could share, in the parameters that both have."""
    picked = [0] * len(holding.spec.params)
    for index, first, last in _selection(chunks, chosen, 0, chunks.total if chosen is None else len(chosen)):
        picked[index] += last - first
    size = torch.tensor(
        [n * p.k for n, p in zip(picked, holding.spec.params, strict=True)], dtype=torch.int64, device="cpu"
    )
    has = torch.tensor(
        [[c != "-" for c in holding.codes[uid]] for uid in holding.manifest.uids], dtype=torch.int64, device="cpu"
    )
    return (has * size) @ has.T


def _count(param: ParamSpec, pointers: list[int], n: int, counts: Tensor) -> None:
    addresses = torch.tensor(pointers, dtype=torch.int64, device="cpu")
    _core.gather_overlap(
        addresses.data_ptr(), len(pointers), CODECS.index(param.codec), n, param.k, param.totalk, counts.data_ptr()
    )


def _add_local(holding: Holding, chunks: _Chunks, index: int, first: int, last: int, counts: Tensor) -> None:
    param = chunks.spec.params[index]
    pointers = []
    for uid in holding.manifest.uids:
        ref = holding.refs[uid]
        if ref.params[index] is None:
            pointers.append(0)
            continue
        ref.check_readable()
        pointers.append(ref.slice(index, first, last)[0].data_ptr())
    _count(param, pointers, last - first, counts)


def _add_exchanged(
    holding: Holding, chunks: _Chunks, chosen: list[int] | None, control: Control, budget: int, counts: Tensor
) -> str:
    """Owners send the packed indices of each rank's chunks, some chunks per round, all ranks in step.

    Returns the error of this rank, if any; the rank still makes all collective calls.
    """
    uids, W = holding.manifest.uids, control.world
    owned = [[uid for uid in uids if holding.owners[uid] == rank] for rank in range(W)]
    widest = max(p.index_bytes for p in chunks.spec.params)
    needed = widest * (len(uids) + W * max(len(o) for o in owned))
    if budget < needed:
        raise BudgetTooSmall(needed, f"{budget} bytes do not hold one chunk's indices of {len(uids)} peers")
    step, trouble = budget // needed, ""
    ranges = chunk_ranges(chunks.total if chosen is None else len(chosen), W)
    for r in range(max(-(-(stop - start) // step) for start, stop in ranges)):
        parts = [
            _selection(chunks, chosen, min(start + r * step, stop), min(start + (r + 1) * step, stop))
            for start, stop in ranges
        ]
        blobs = [
            torch.zeros(sum(_bytes(holding, uid, part) for uid in owned[control.rank]), dtype=torch.uint8, device="cpu")
            for part in parts
        ]
        for blob, part in zip(blobs, parts, strict=True):
            trouble = trouble or _attempt(lambda blob=blob, part=part: _pack(holding, owned[control.rank], part, blob))
        in_splits = [len(blob) for blob in blobs]
        mine = parts[control.rank]
        sizes = [sum(_bytes(holding, uid, mine) for uid in o) for o in owned]
        received = control.all_to_all(torch.cat(blobs), in_splits, sizes)
        at, pointers = 0, {}
        for uid in (uid for o in owned for uid in o):
            for index, first, last in mine:
                if holding.codes[uid][index] != "-":
                    pointers[uid, index, first] = received.data_ptr() + at
                    at += (last - first) * chunks.spec.params[index].index_bytes
        for index, first, last in mine:
            peers = [pointers.get((uid, index, first), 0) for uid in uids]
            param, n = chunks.spec.params[index], last - first
            trouble = trouble or _attempt(lambda param=param, peers=peers, n=n: _count(param, peers, n, counts))
    return trouble


def _bytes(holding: Holding, uid: int, pieces: Sequence[tuple[int, int, int]]) -> int:
    return sum(
        (last - first) * holding.spec.params[index].index_bytes
        for index, first, last in pieces
        if holding.codes[uid][index] != "-"
    )


def _pack(holding: Holding, uids: Sequence[int], pieces: Sequence[tuple[int, int, int]], out: Tensor) -> None:
    """Copy the indices of some chunks of some of this rank's peers to ``out``, one peer after the other."""
    at = 0
    for uid in uids:
        holding.refs[uid].check_readable()
        for index, first, last in pieces:
            if holding.codes[uid][index] != "-":
                part = holding.refs[uid].slice(index, first, last)[0]
                out[at : at + len(part)] = part
                at += len(part)


def _report(
    holding: Holding, counts: Tensor, weights: Tensor, limit: Fraction, *, exact: bool, sampled: int
) -> OverlapReport:
    uids, stamps = holding.manifest.uids, holding.manifest.timestamps
    total = sum(p.chunks * p.k for p in holding.spec.params)
    pairs = list(itertools.combinations(range(len(uids)), 2))
    shared, possible = counts.tolist(), weights.tolist()
    share = lambda pair: shared[pair[0]][pair[1]] / max(possible[pair[0]][pair[1]], 1)  # noqa: E731
    low, high = min(pairs, key=share), max(pairs, key=share)  # the first of equals
    report = OverlapReport(
        pairs_checked=len(pairs),
        mean_overlap=sum(shared[i][j] for i, j in pairs) / max(sum(possible[i][j] for i, j in pairs), 1),
        min_overlap=share(low),
        max_overlap=share(high),
        min_pair=(uids[low[0]], uids[low[1]]),
        max_pair=(uids[high[0]], uids[high[1]]),
        exact=exact,
        counts=counts,
        total=total,
        sampled=sampled,
    )
    for i, j in pairs:
        if possible[i][j] == 0 or shared[i][j] * limit.denominator < limit.numerator * possible[i][j]:
            continue
        first, second = uids[i], uids[j]
        overlap = share((i, j))
        report.pairs_over_thresh.append((first, second, overlap))
        offender = second if stamps[second] > stamps[first] else first
        severity = overlap_severity(overlap)
        worst = report.uids_over_thresh.get(offender, severity)
        report.uids_over_thresh[offender] = max(severity, worst, key=_RANKING.index)
    report.pairs_high_ovlap = len(report.pairs_over_thresh)
    report.ratio_high_ovlap = report.pairs_high_ovlap / len(pairs)
    return report


def overlap_reference(indices: list[np.ndarray | Tensor], totalk: int) -> Tensor:
    """Count one parameter's shared positions in plain torch, from [chunks, k] indices per peer."""
    stacked = torch.stack([as_tensor(i).long() for i in indices], 1)  # chunks, P, k
    rows = torch.zeros(*stacked.shape[:2], totalk, device="cpu").scatter_(2, stacked, 1.0)
    return (rows @ rows.transpose(1, 2)).sum(0).long()


def unpacked(param: ParamSpec, idxs: Tensor) -> Tensor:
    """int64 [chunks, k] of a parameter's indices."""
    if param.codec == "packed12":
        return unpack12(idxs, (param.chunks, param.k))
    return idxs.reshape(param.chunks, param.k).long()
