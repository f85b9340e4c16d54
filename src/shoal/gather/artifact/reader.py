"""Reads a window's artifact: one file with every accepted payload, the same for every world size."""

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.gather.artifact.layout import FORMAT, MAGIC, PREFIX_BYTES, TRAILER_BYTES, check_header, padded
from shoal.gather.errors import GatherError
from shoal.gather.payload.codec import VALUE_DTYPES
from shoal.gather.payload.container import map_file
from shoal.gather.payload.payload_ref import CODES, ParamData, PayloadRef
from shoal.gather.payload.spec import GradientSpec, ParamSpec, QuantSpec
from shoal.gather.payload.validate import raw_bytes
from shoal.gather.protocol.merge import APPLY, SKIP, Manifest, merge
from shoal.gather.protocol.partial import PartialGatherResult


class ArtifactReader:
    """An artifact as a source for every consumer. A damaged file raises GatherError.

    The header's fields are attributes; maps are by UID, ``norms`` is float32 [P, n_params], ``blocks`` has (offset,
    idxs bytes, vals bytes, quant bytes, layout) for every parameter and UID. ``path`` can also be the file's bytes.
    """

    def __init__(self, path: str | os.PathLike[str] | bytes, *, keep: Any = None) -> None:
        self._keep = keep
        self.path = None if isinstance(path, bytes | bytearray) else Path(path)
        try:
            if isinstance(path, bytes | bytearray):
                self._raw = torch.frombuffer(bytearray(path), dtype=torch.uint8)
            else:
                self._raw = map_file(path)
            self._open()
        except GatherError:
            raise
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, struct.error) as error:
            raise GatherError(f"{self._name()} is not a readable artifact ({type(error).__name__}: {error})") from error

    def _name(self) -> str:
        return self.path.name if self.path is not None else "the artifact"

    def _open(self) -> None:
        raw = self._raw
        size = len(raw)
        if size < PREFIX_BYTES + TRAILER_BYTES or raw[:4].numpy().tobytes() != MAGIC:
            raise GatherError(f"{self._name()} is not an artifact: it does not begin with PGA1")
        body = raw_bytes(raw[: size - TRAILER_BYTES])
        if hashlib.blake2b(body, digest_size=32).digest() != raw[size - TRAILER_BYTES :].numpy().tobytes():
            raise GatherError(f"{self._name()} is damaged: its trailer does not match")
        (length,) = struct.unpack_from("<Q", body, 4)
        if length > len(body) - PREFIX_BYTES:
            raise GatherError(f"{self._name()} is damaged: its header is longer than the file")
        fields = json.loads(bytes(body[PREFIX_BYTES : PREFIX_BYTES + length]))
        if fields["format"] != FORMAT:
            raise GatherError(f"{self._name()} has format {fields['format']!r}; this version reads {FORMAT}")
        self._data = padded(PREFIX_BYTES + length)
        by_uid = lambda name: dict(sorted((int(uid), value) for uid, value in fields[name].items()))  # noqa: E731
        self.format: int = fields["format"]
        self.window: int = fields["window"]
        self.version: str = fields["version"]
        self.spec_hash: str = fields["spec_hash"]
        self.params = tuple(ParamSpec.from_dict(p) for p in fields["params"])
        quant = fields["quant"]
        self.quant = None if quant is None else QuantSpec(quant["bins"], quant["range_sigmas"])
        self.spec = GradientSpec(self.params, self.quant)
        check_header(fields, self.spec, len(body) - self._data)
        self.uids: list[int] = fields["uids"]
        self.tiers: dict[int, int] = by_uid("tiers")
        self.global_steps: list[int] = fields["global_steps"]
        self.skipped_uids: list[int] = fields["skipped_uids"]
        self.skip_reasons: dict[int, str] = by_uid("skip_reasons")
        self.intended_uids: list[int] = fields["intended_uids"]
        self.success_rate: float = fields["success_rate"]
        self.timestamps: dict[int, int] = by_uid("timestamps")
        self.digests: dict[int, str] = by_uid("digests")
        norms = np.frombuffer(bytes.fromhex(fields["norms"]), dtype="<f4").astype(np.float32)
        self.norms = torch.from_numpy(norms.reshape(len(self.uids), len(self.params)))
        self.blocks: list[list[Any]] = fields["blocks"]
        self.decision = APPLY if self.uids else SKIP

    def _param_data(self, index: int, row: int) -> ParamData:
        at, n_idxs, n_vals, n_quant, code = self.blocks[index * len(self.uids) + row]
        param = self.params[index]
        at += self._data
        idxs, vals = self._raw[at : at + n_idxs], self._raw[at + n_idxs : at + n_idxs + n_vals]
        dtype, name = CODES[code]
        if (at + n_idxs) % dtype.itemsize:
            vals = vals.clone()
        quant = None
        if name is not None:
            block = self._raw[at + n_idxs + n_vals : at + n_idxs + n_vals + n_quant].numpy().tobytes()
            bins = (n_quant - 17 - len(name)) // 4
            (shift,), (scale, offset) = struct.unpack_from("<f", block), struct.unpack_from("<di", block, 4)
            lookup = torch.from_numpy(np.frombuffer(block, dtype="<f4", count=bins, offset=16).astype(np.float32))
            quant = (shift, scale, offset, lookup, VALUE_DTYPES[name])
        if param.codec == "i32":
            idxs = idxs.view(torch.int32).view(*param.grid, param.k)
        return ParamData(idxs, vals.view(dtype).view(*param.grid, param.k), quant, code)

    def as_partials(self) -> list[PartialGatherResult]:
        """Return everything as a single partial."""
        spec = self.spec
        refs = {
            uid: PayloadRef(
                spec,
                [self._param_data(i, row) for i in range(len(self.params))],
                digest=self.digests.get(uid, ""),
                keep=self,
            )
            for row, uid in enumerate(self.uids)
        }
        sizes = {
            uid: sum(sum(self.blocks[i * len(self.uids) + row][1:3]) for i in range(len(self.params)))
            for row, uid in enumerate(self.uids)
        }
        return [
            PartialGatherResult(
                window=self.window,
                version=self.version,
                spec_hash=self.spec_hash,
                assigned_uids=sorted(self.tiers),
                uids=list(self.uids),
                tiers=dict(self.tiers),
                skipped_uids=list(self.skipped_uids),
                skip_reasons=dict(self.skip_reasons),
                global_steps=list(self.global_steps),
                timestamps=dict(self.timestamps),
                digests=dict(self.digests),
                norms=self.norms,
                sizes=sizes,
                download_bytes=sum(sizes.values()),
                payloads=refs,
            )
        ]

    @property
    def manifest(self) -> Manifest:
        return merge(self).manifest

    def to_legacy_dict(self) -> dict[str, Any]:
        """``{"state_dict": {N + suffix: list}, "uids", "skipped_uids", "success_rate"}``, lists aligned with uids."""
        state: dict[str, list[Any]] = {}
        for index, param in enumerate(self.params):
            rows = [self._param_data(index, row) for row in range(len(self.uids))]
            state[param.name + "idxs"] = [row.idxs for row in rows]
            state[param.name + "vals"] = [row.vals for row in rows]
            if any(row.quant is not None for row in rows):
                state[param.name + "quant_params"] = [row.quant for row in rows]
        return {
            "state_dict": state,
            "uids": list(self.uids),
            "skipped_uids": list(self.skipped_uids),
            "success_rate": self.success_rate,
        }
