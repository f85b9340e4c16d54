"""A consumer's view of its source: the merged manifest, this rank's payloads, and the owners of the others."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.gather.errors import GatherDivergence, PlanMismatch
from shoal.gather.payload.payload_ref import PayloadRef, expand_codes, quant_bytes, value_itemsize
from shoal.gather.payload.spec import GradientSpec, canonical_json
from shoal.gather.payload.validate import validate_payload
from shoal.gather.protocol.control import Control
from shoal.gather.protocol.merge import APPLY, SKIP, GatherResult, Manifest, Source, merge
from shoal.gather.protocol.partial import PartialGatherResult


@dataclass
class Holding:
    """One source on one rank. ``owners`` has a rank for every UID; ``everywhere``: every rank holds all payloads."""

    spec: GradientSpec
    manifest: Manifest
    decision: str
    refs: dict[int, PayloadRef]
    codes: dict[int, str]
    owners: dict[int, int]
    everywhere: bool

    def require_complete(self, what: str) -> None:
        """Raise on every rank if a (hand-made) payload does not have all parameters."""
        for uid, letters in self.codes.items():
            if (index := letters.find("-")) >= 0:
                raise ConfigError(f"{what}: peer {uid}'s payload has no parameter {self.spec.params[index].name!r}")

    def slice_bytes(self, uid: int, index: int, chunks: int) -> int:
        """Bytes of some chunks of one parameter when sent, without header."""
        param, code = self.spec.params[index], self.codes[uid][index]
        quant = quant_bytes(code, self.spec.quant.bins) if self.spec.quant is not None else 0
        return quant + chunks * (param.index_bytes + value_itemsize(code) * param.k)

    def raw_per_chunk(self, index: int) -> int:
        """The largest number of raw bytes of a chunk in the accepted payloads."""
        param = self.spec.params[index]
        item = max((value_itemsize(self.codes[uid][index]) for uid in self.manifest.uids), default=1)
        return param.index_bytes + item * param.k


def _refs(payloads: Mapping[int, Any], spec: GradientSpec) -> dict[int, PayloadRef]:
    return {
        uid: p if isinstance(p, PayloadRef) else PayloadRef.from_payload(p, spec)
        for uid, p in payloads.items()
        if p is not None
    }


def _resolve(source: Source, alone: bool) -> GatherResult:
    if not alone and isinstance(source, Sequence) and len(source) == 1:
        source = source[0]
    if isinstance(source, GatherResult):
        return source
    if not alone and isinstance(source, PartialGatherResult) and source.manifest is not None:
        manifest = source.manifest
        return GatherResult(
            manifest=manifest, decision=APPLY if manifest.uids else SKIP, partial=source, payloads=source.payloads
        )
    return merge(source)


def _with_norms(manifest: Manifest, refs: dict[int, PayloadRef], spec: GradientSpec) -> None:
    """Compute the norms of hand-made partials without them, from the payloads on this rank."""
    n = len(spec.params)
    if manifest.norms.shape == (len(manifest.uids), n):
        return
    if not all(uid in refs for uid in manifest.uids):
        raise ConfigError("a source must have norms for payloads that are on other ranks")
    manifest.norms = torch.zeros(len(manifest.uids), n, device="cpu")
    for i, uid in enumerate(manifest.uids):
        manifest.norms[i] = validate_payload(
            {"state_dict": refs[uid].state_dict()}, spec, max_abs_value=float("inf")
        ).norms


def hold(source: Source, spec: GradientSpec, control: Control, *, norms: bool = True) -> Holding:
    """Resolve a source on every rank; ``norms=False`` is for consumers that do not use norms. Raises the same error on
    all ranks if their sources do not match."""
    error: Exception | None = None
    result, refs = None, {}
    try:
        result = _resolve(source, control.world == 1)
        manifest = result.manifest
        if manifest.spec_hash and manifest.spec_hash != spec.hash:
            raise PlanMismatch(f"the source must have gradient spec {spec.hash}, got {manifest.spec_hash}")
        refs = _refs({uid: result.payloads.get(uid) for uid in manifest.uids}, spec)
        if norms and control.world == 1:
            _with_norms(manifest, refs, spec)
    except Exception as caught:  # raised after the others have been notified
        error = caught
    status = {
        "error": "" if error is None else f"{type(error).__name__}: {error}",
        "hash": result.manifest.hash if result is not None else "",
        "decision": result.decision if result is not None else SKIP,
        "held": {str(uid): ref.codes for uid, ref in refs.items()},
    }
    answers = [json.loads(blob) for blob in control.all_gather_bytes(canonical_json(status).encode())]
    if error is not None:
        raise error
    assert result is not None
    for rank, answer in enumerate(answers):
        if answer["error"]:
            raise PlanMismatch(f"rank {rank} cannot use its source: {answer['error']}")
    if len({answer["hash"] for answer in answers}) > 1:
        raise GatherDivergence("ranks have different merged results; pass each rank's own result of one gather")
    manifest = result.manifest
    decision = APPLY if all(answer["decision"] == APPLY for answer in answers) and manifest.uids else SKIP
    owners: dict[int, int] = {}
    codes: dict[int, str] = {}
    for uid in manifest.uids:
        holders = [rank for rank, answer in enumerate(answers) if str(uid) in answer["held"]]
        if not holders:
            raise ConfigError(
                f"the payload of peer {uid} is on another rank; pass group= to the call, or the source of all ranks"
            )
        wanted = manifest.owners.get(uid, holders[0])
        owners[uid] = wanted if wanted in holders else holders[0]
        codes[uid] = expand_codes(answers[owners[uid]]["held"][str(uid)], len(spec.params))
    everywhere = all(len(answer["held"]) == len(manifest.uids) for answer in answers)
    return Holding(spec, manifest, decision, refs, codes, owners, everywhere)


def run_of(ids: torch.Tensor) -> tuple[int, int] | None:
    """Return (first, last + 1) if the chunk numbers are consecutive, else None."""
    if len(ids) == 0:
        return 0, 0
    first, last = int(ids[0]), int(ids[-1])
    return (first, last + 1) if last - first + 1 == len(ids) else None


def chunk_bytes_of(ref: PayloadRef, index: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the contiguous idxs and vals bytes of the given chunks; views if the chunks are consecutive."""
    param = ref.spec.params[index]
    if (run := run_of(ids)) is not None:
        return ref.slice(index, *run)
    idxs, vals = ref.slice(index, 0, param.chunks)
    return (
        idxs.view(param.chunks, -1).index_select(0, ids).reshape(-1),
        vals.view(param.chunks, -1).index_select(0, ids).reshape(-1),
    )
