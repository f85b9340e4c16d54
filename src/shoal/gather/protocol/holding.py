"""A consumer's view of its source: the merged manifest, the payloads on this rank, and who has the others."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.gather.errors import GatherDivergence, PlanMismatch
from shoal.gather.payload.payload_ref import PayloadRef, expand_codes, quant_bytes, value_itemsize
from shoal.gather.payload.spec import GradientSpec, ParamSpec, canonical_json
from shoal.gather.payload.validate import validate_payload
from shoal.gather.protocol.control import Control
from shoal.gather.protocol.merge import APPLY, SKIP, GatherResult, Manifest, Source, merge
from shoal.gather.protocol.partial import PartialGatherResult


@dataclass
class Holding:
    """One source on one rank. ``owners`` has a rank for every UID; ``everywhere``: each rank holds all of them."""

    spec: GradientSpec
    manifest: Manifest
    decision: str
    refs: dict[int, PayloadRef]
    codes: dict[int, str]
    owners: dict[int, int]
    everywhere: bool

    def require_complete(self, what: str) -> None:
        """Hand-made payloads may lack a parameter; the same error on every rank when one does."""
        for uid, letters in self.codes.items():
            if (index := letters.find("-")) >= 0:
                raise ConfigError(f"{what}: peer {uid}'s payload has no parameter {self.spec.params[index].name!r}")

    def slice_bytes(self, uid: int, index: int, chunks: int) -> int:
        """Bytes of some chunks of one parameter as they travel, without header."""
        param, code = self.spec.params[index], self.codes[uid][index]
        quant = quant_bytes(code, self.spec.quant.bins) if self.spec.quant is not None else 0
        return quant + chunks * (param.index_bytes + value_itemsize(code) * param.k)

    def raw_per_chunk(self, index: int) -> int:
        """The largest raw bytes of a chunk over the accepted payloads."""
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
    """Hand-made partials may come without norms; they are computed where the payloads are."""
    n = len(spec.params)
    if manifest.norms.shape == (len(manifest.uids), n):
        return
    if not all(uid in refs for uid in manifest.uids):
        raise ConfigError("the source has no norms for its payloads")
    manifest.norms = torch.zeros(len(manifest.uids), n, device="cpu")
    for i, uid in enumerate(manifest.uids):
        manifest.norms[i] = validate_payload(
            {"state_dict": refs[uid].state_dict()}, spec, max_abs_value=float("inf")
        ).norms


def hold(source: Source, spec: GradientSpec, control: Control, *, norms: bool = True) -> Holding:
    """Resolves a source on every rank alike; ``norms=False`` is for who does not look at them. Raises the same error on
    all ranks when they do not fit together."""
    error: Exception | None = None
    result, refs = None, {}
    try:
        result = _resolve(source, control.world == 1)
        manifest = result.manifest
        if manifest.spec_hash and manifest.spec_hash != spec.hash:
            raise PlanMismatch(f"the source is of gradient spec {manifest.spec_hash}, this spec is {spec.hash}")
        refs = _refs({uid: result.payloads.get(uid) for uid in manifest.uids}, spec)
        if norms and control.world == 1:
            _with_norms(manifest, refs, spec)
    except Exception as caught:  # raised after the others know of it
        error = caught
    said = {
        "error": "" if error is None else f"{type(error).__name__}: {error}",
        "hash": result.manifest.hash if result is not None else "",
        "decision": result.decision if result is not None else SKIP,
        "held": {str(uid): ref.codes for uid, ref in refs.items()},
    }
    answers = [json.loads(blob) for blob in control.all_gather_bytes(canonical_json(said).encode())]
    if error is not None:
        raise error
    assert result is not None
    for rank, answer in enumerate(answers):
        if answer["error"]:
            raise PlanMismatch(f"rank {rank} cannot use its source: {answer['error']}")
    if len({answer["hash"] for answer in answers}) > 1:
        raise GatherDivergence("ranks hold different merged results; pass each rank's own result of one gather")
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


def run_of(param: ParamSpec, ids: torch.Tensor) -> tuple[int, int] | None:
    """(first, last + 1) when the chunk numbers are consecutive, else None."""
    if len(ids) == 0:
        return 0, 0
    first, last = int(ids[0]), int(ids[-1])
    return (first, last + 1) if last - first + 1 == len(ids) else None


def chunk_bytes_of(ref: PayloadRef, index: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """idxs and vals bytes of the given chunks, contiguous; a view when the chunks are."""
    param = ref.spec.params[index]
    if (run := run_of(param, ids)) is not None:
        return ref.slice(index, *run)
    idxs, vals = ref.slice(index, 0, param.chunks)
    return (
        idxs.view(param.chunks, -1).index_select(0, ids).reshape(-1),
        vals.view(param.chunks, -1).index_select(0, ids).reshape(-1),
    )
