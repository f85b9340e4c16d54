"""The canonical artifact of a window: one file with every accepted payload, the same bytes for every world size."""

import hashlib
import json
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.gather.codec import VALUE_DTYPES
from shoal.gather.container import map_file
from shoal.gather.control import Control
from shoal.gather.errors import GatherError
from shoal.gather.holding import Holding, hold
from shoal.gather.merge import APPLY, SKIP, Manifest, Source
from shoal.gather.partial import PartialGatherResult
from shoal.gather.payload_ref import CODES, ParamData, PayloadRef, quant_bytes, value_itemsize
from shoal.gather.spec import GradientSpec, ParamSpec, QuantSpec, canonical_json
from shoal.gather.validate import raw_bytes

log = logging.getLogger("shoal.gather")

MAGIC = b"PGA1"
FORMAT = 1
ALIGN = 64
TRAILER_BYTES = 32
_STATUS_BYTES = 16


def write_artifact(
    source: Source,
    path: str | os.PathLike[str],
    *,
    spec: GradientSpec,
    group: Any = None,
    budget_bytes: int = 1 << 30,
    artifact_rank: int = 0,
    control_timeout_s: float = 240.0,
) -> str | None:
    """Writes the window's artifact on ``artifact_rank``; every rank of the group must call it.

    Returns the file's SHA-256 on the rank that writes, None on the others and when the decision is SKIP. The file
    appears whole or not at all; one that is there already with equal bytes is left alone, with other bytes it is an
    error. Memory: pieces inside ``budget_bytes``, however many peers there are.
    """
    if budget_bytes < 4096:
        raise ConfigError(f"write_artifact: budget_bytes must be at least 4096, got {budget_bytes}")
    control = Control(group, timeout_s=control_timeout_s)
    if not 0 <= artifact_rank < control.world:
        raise ConfigError(f"write_artifact: artifact_rank must be in 0..{control.world - 1}, got {artifact_rank}")
    holding = hold(source, spec, control)
    if holding.decision == SKIP:
        return None
    holding.require_complete("write_artifact")
    writer = _Writer(holding, control, artifact_rank, budget_bytes)
    return writer.run(Path(path))


def _block_table(holding: Holding) -> list[list[Any]]:
    """[offset from the data's start, idxs bytes, vals bytes, quant bytes, layout code], parameter -> UID."""
    table, at = [], 0
    bins = holding.spec.quant.bins if holding.spec.quant is not None else 0
    for index, param in enumerate(holding.spec.params):
        for uid in holding.manifest.uids:
            code = holding.codes[uid][index]
            idxs, vals = param.chunks * param.index_bytes, param.chunks * param.k * value_itemsize(code)
            quant = quant_bytes(code, bins)
            table.append([at, idxs, vals, quant, code])
            at += -(-(idxs + vals + quant) // ALIGN) * ALIGN
    return table


def _header(holding: Holding, table: list[list[Any]]) -> bytes:
    m = holding.manifest
    by_uid = lambda values: {str(uid): values[uid] for uid in values}  # noqa: E731
    fields = {
        "format": FORMAT,
        "window": m.window,
        "version": m.version,
        "spec_hash": m.spec_hash or holding.spec.hash,
        "params": [p.to_dict() for p in holding.spec.params],
        "quant": json.loads(holding.spec.to_json())["quant"],
        "uids": m.uids,
        "tiers": by_uid(m.tiers),
        "global_steps": m.global_steps,
        "skipped_uids": m.skipped_uids,
        "skip_reasons": by_uid(m.skip_reasons),
        "intended_uids": m.intended_uids,
        "success_rate": m.success_rate,
        "timestamps": by_uid(m.timestamps),
        "digests": by_uid(m.digests),
        "norms": m.norms.contiguous().numpy().astype("<f4").tobytes().hex(),
        "blocks": table,
    }
    text = canonical_json(fields).encode()
    head = MAGIC + struct.pack("<Q", len(text)) + text
    return head + b"\0" * (-len(head) % ALIGN)


class _Writer:
    """The blocks in file order; owners send, the artifact rank writes, one piece ahead."""

    def __init__(self, holding: Holding, control: Control, rank: int, budget: int) -> None:
        self.holding, self.control, self.rank = holding, control, rank
        self.table = _block_table(holding)
        self.piece = max(1024, budget // 4)

    def run(self, path: Path) -> str | None:
        control, sha, error = self.control, None, None
        try:
            if control.rank == self.rank:
                sha = self._write(path)
            else:
                self._send()
        except GatherError:
            raise
        except Exception as caught:  # all ranks finish the sequence before anybody raises
            error = caught
        if not control.minimum(int(error is None)):
            raise GatherError(f"window {self.holding.manifest.window}: the artifact could not be written") from error
        return sha

    def _blocks(self) -> Iterator[tuple[int, int, list[Any]]]:
        entries = iter(self.table)
        for index in range(len(self.holding.spec.params)):
            for uid in self.holding.manifest.uids:
                yield index, uid, next(entries)

    def _pieces(self, entry: list[Any]) -> Iterator[tuple[int, int]]:
        size = entry[1] + entry[2] + entry[3]
        for start in range(0, size, self.piece):
            yield start, min(start + self.piece, size)

    def _from_here(self, uid: int) -> bool:
        return self.holding.owners[uid] == self.rank or self.holding.everywhere

    def _read(self, index: int, uid: int, start: int, stop: int) -> Tensor:
        """Bytes ``start..stop`` of a block: idxs, vals, quant block in one piece."""
        ref = self.holding.refs[uid]
        ref.check_readable()
        idxs, vals = ref.slice(index, 0, ref.spec.params[index].chunks)
        quant = ref.quant_block(index)
        parts = [idxs, vals, torch.frombuffer(bytearray(quant), dtype=torch.uint8) if quant else idxs[:0]]
        out, at = [], 0
        for part in parts:
            begin, end = max(start - at, 0), min(stop - at, len(part))
            if begin < end:
                out.append(part[begin:end])
            at += len(part)
        return torch.cat(out)

    def _send(self) -> None:
        """One piece at a time; a piece that cannot be read travels with a bad status, so that nobody waits."""
        for index, uid, entry in self._blocks():
            if self.holding.owners[uid] != self.control.rank or self._from_here(uid):
                continue
            for start, stop in self._pieces(entry):
                buffer = torch.zeros(_STATUS_BYTES + stop - start, dtype=torch.uint8)
                try:
                    buffer[_STATUS_BYTES:] = self._read(index, uid, start, stop)
                    buffer[0] = 1
                except Exception:
                    log.exception("peer %d's payload cannot be read for the artifact", uid)
                self.control.wait([self.control.start_send(buffer, self.rank)], "artifact")

    def _incoming(self) -> Iterator[tuple[list[Any], int, Tensor]]:
        """All pieces in file order; the next one is already on its way while one is written."""
        wanted = [
            (index, uid, entry, start, stop)
            for index, uid, entry in self._blocks()
            for start, stop in self._pieces(entry)
        ]
        ahead: list[tuple[Any, Tensor]] = []
        remote = iter([w for w in wanted if not self._from_here(w[1])])

        def ask() -> None:
            if (item := next(remote, None)) is not None:
                buffer = torch.empty(_STATUS_BYTES + item[4] - item[3], dtype=torch.uint8)
                ahead.append((self.control.start_recv(buffer, self.holding.owners[item[1]]), buffer))

        ask()
        for index, uid, entry, start, stop in wanted:
            if self._from_here(uid):
                yield entry, start, self._read(index, uid, start, stop)
                continue
            work, buffer = ahead.pop(0)
            self.control.wait([work], "artifact")
            ask()
            if buffer[0] != 1:
                raise OSError(f"rank {self.holding.owners[uid]} could not read peer {uid}'s payload")
            yield entry, start, buffer[_STATUS_BYTES:]

    def _write(self, path: Path) -> str:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        sha, blake = hashlib.sha256(), hashlib.blake2b(digest_size=32)
        incoming = self._incoming()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:

                def put(data: Any) -> None:
                    sha.update(data)
                    blake.update(data)
                    file.write(data)

                put(_header(self.holding, self.table))
                at = 0
                for entry, start, data in incoming:
                    if start == 0 and at < entry[0]:
                        put(b"\0" * (entry[0] - at))
                        at = entry[0]
                    put(raw_bytes(data))
                    at += len(data)
                put(b"\0" * (-at % ALIGN))
                trailer = blake.digest()
                sha.update(trailer)
                file.write(trailer)
            if path.exists():
                if _sha256(path) != sha.hexdigest():
                    raise ConfigError(f"{path.name} exists with other bytes; an artifact is written once")
            else:
                temporary.replace(path)
        except BaseException:
            for _ in _drain(incoming):
                pass
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return sha.hexdigest()


def _drain(incoming: Iterator[Any]) -> Iterator[None]:
    """Takes what the owners still send, so that they can finish."""
    while True:
        try:
            next(incoming)
            yield
        except StopIteration:
            return
        except OSError:
            return


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ArtifactReader:
    """An artifact as a source for every consumer. A damaged file is a GatherError.

    The header's fields are attributes; maps are by UID, ``norms`` is float32 [P, n_params]. ``data`` may be bytes.
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
        except (OSError, ValueError, KeyError, TypeError, IndexError, RuntimeError, struct.error) as error:
            raise GatherError(f"{self._name()} is not a readable artifact ({type(error).__name__}: {error})") from error

    def _name(self) -> str:
        return self.path.name if self.path is not None else "the artifact"

    def _open(self) -> None:
        raw = self._raw
        size = len(raw)
        if size < 12 + TRAILER_BYTES or raw[:4].numpy().tobytes() != MAGIC:
            raise GatherError(f"{self._name()} is not an artifact: it does not begin with PGA1")
        body = raw_bytes(raw[: size - TRAILER_BYTES])
        if hashlib.blake2b(body, digest_size=32).digest() != raw[size - TRAILER_BYTES :].numpy().tobytes():
            raise GatherError(f"{self._name()} is damaged: its trailer does not match")
        (length,) = struct.unpack_from("<Q", body, 4)
        if length > len(body) - 12:
            raise GatherError(f"{self._name()} is damaged: its header does not fit")
        fields = json.loads(bytes(body[12 : 12 + length]))
        if fields["format"] != FORMAT:
            raise GatherError(f"{self._name()} has format {fields['format']!r}; this version reads {FORMAT}")
        self._data = 12 + length + -(12 + length) % ALIGN
        by_uid = lambda name: {int(uid): value for uid, value in fields[name].items()}  # noqa: E731
        self.format: int = fields["format"]
        self.window: int = fields["window"]
        self.version: str = fields["version"]
        self.spec_hash: str = fields["spec_hash"]
        self.params = tuple(ParamSpec.from_dict(p) for p in fields["params"])
        quant = fields["quant"]
        self.spec = GradientSpec(
            self.params, None if quant is None else QuantSpec(quant["bins"], quant["range_sigmas"])
        )
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
        self._table = fields["blocks"]
        self.decision = APPLY if self.uids else SKIP
        limit = size - TRAILER_BYTES
        if any(self._data + at + idxs + vals + quant > limit for at, idxs, vals, quant, _ in self._table):
            raise GatherError(f"{self._name()} is damaged: a block lies outside the file")

    def _param_data(self, index: int, row: int) -> ParamData:
        at, n_idxs, n_vals, n_quant, code = self._table[index * len(self.uids) + row]
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
        """One partial with everything in it."""
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
            uid: sum(sum(self._table[i * len(self.uids) + row][1:3]) for i in range(len(self.params)))
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
        from shoal.gather.merge import merge

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
