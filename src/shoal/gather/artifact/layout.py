"""The bytes of an artifact: magic, header, 64-aligned blocks in the order parameter -> UID, trailer."""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.gather.payload.payload_ref import CODES, quant_bytes, value_itemsize
from shoal.gather.payload.spec import GradientSpec, canonical_json
from shoal.gather.protocol.merge import Manifest

MAGIC = b"PGA1"
FORMAT = 1
ALIGN = 64
TRAILER_BYTES = 32  # BLAKE2b-256 of everything before
PREFIX_BYTES = 12  # magic and the header's length
Block = Sequence[Any]
"""(offset from the data's start, idxs bytes, vals bytes, quant bytes, layout code)."""


def block_table(spec: GradientSpec, codes: Sequence[str]) -> list[list[Any]]:
    """The position of every block, from the layout codes of every UID (one letter per parameter)."""
    table, at = [], 0
    bins = spec.quant.bins if spec.quant is not None else 0
    for index, param in enumerate(spec.params):
        for letters in codes:
            code = letters[index]
            idxs, vals = param.chunks * param.index_bytes, param.chunks * param.k * value_itemsize(code)
            quant = quant_bytes(code, bins)
            table.append([at, idxs, vals, quant, code])
            at += padded(idxs + vals + quant)
    return table


def padded(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def header_bytes(manifest: Manifest, spec: GradientSpec, table: list[list[Any]]) -> bytes:
    """Return magic, length, canonical JSON and padding, without times, ranks or hosts: equal for every world size."""
    by_uid = lambda values: {str(uid): values[uid] for uid in values}  # noqa: E731
    fields = {
        "format": FORMAT,
        "window": manifest.window,
        "version": manifest.version,
        "spec_hash": manifest.spec_hash or spec.hash,
        "params": [p.to_dict() for p in spec.params],
        "quant": json.loads(spec.to_json())["quant"],
        "uids": manifest.uids,
        "tiers": by_uid(manifest.tiers),
        "global_steps": manifest.global_steps,
        "skipped_uids": manifest.skipped_uids,
        "skip_reasons": by_uid(manifest.skip_reasons),
        "intended_uids": manifest.intended_uids,
        "success_rate": manifest.success_rate,
        "timestamps": by_uid(manifest.timestamps),
        "digests": by_uid(manifest.digests),
        "norms": manifest.norms.contiguous().numpy().astype("<f4").tobytes().hex(),
        "blocks": table,
    }
    text = canonical_json(fields).encode()
    head = MAGIC + struct.pack("<Q", len(text)) + text
    return head.ljust(padded(len(head)), b"\0")


def check_header(fields: Mapping[str, Any], spec: GradientSpec, data_bytes: int) -> None:
    """Raise ValueError unless a header's lists match each other, its spec and the ``data_bytes`` after it."""
    uids, table = fields["uids"], fields["blocks"]
    if spec.hash != fields["spec_hash"]:
        raise ValueError("its parameters do not match its spec hash")
    if len(set(uids)) != len(uids) or len(fields["global_steps"]) != len(uids):
        raise ValueError("its lists of peers do not match each other")
    if len(fields["norms"]) != 8 * len(uids) * len(spec.params) or len(table) != len(uids) * len(spec.params):
        raise ValueError("it must have one norm and one block per peer and parameter")
    codes = ["".join(block[4] for block in table[row :: len(uids)]) for row in range(len(uids))]
    allowed = {code for code, (_, name) in CODES.items() if name is None or spec.quant is not None}
    if any(len(letters) != len(spec.params) or not allowed.issuperset(letters) for letters in codes):
        raise ValueError("a block has an unknown layout")
    expected = block_table(spec, codes)
    if [list(block) for block in table] != expected:
        raise ValueError("its blocks are at wrong offsets")
    if data_bytes != sum(padded(sum(block[1:4])) for block in expected):
        raise ValueError("its blocks do not fill the file")
