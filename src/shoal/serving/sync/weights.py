"""Dense weights as bytes: a header that names them, then their contents. The SHA-256 of all is a push's digest."""

import hashlib
import json
from collections.abc import Mapping

import torch

from shoal.errors import DataError

ALIGN = 64


def write_weights(weights: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, str]:
    """(uint8 ``[n]``, digest). Equal names, dtypes, shapes and values give equal bytes."""
    head, at = [], 0
    for name, value in sorted(weights.items()):
        head.append([name, str(value.dtype).removeprefix("torch."), list(value.shape), at])
        at += -(-value.nbytes // ALIGN) * ALIGN
    text = json.dumps(head).encode()
    begin = -(-(8 + len(text)) // ALIGN) * ALIGN
    blob = torch.zeros(begin + at, dtype=torch.uint8, device="cpu")
    blob[:8] = torch.tensor(list(len(text).to_bytes(8, "little")), dtype=torch.uint8, device="cpu")
    blob[8 : 8 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for name, _, _, offset in head:
        value = weights[name].detach().contiguous().reshape(-1)
        if len(value):
            blob[begin + offset : begin + offset + value.nbytes] = value.view(torch.uint8)
    return blob, hashlib.sha256(blob.numpy().data).hexdigest()


def read_weights(blob: torch.Tensor) -> dict[str, torch.Tensor]:
    """Read what `write_weights` wrote, without copying it.

    Raises:
        DataError: the bytes were not written by `write_weights`.
    """
    try:
        length = int.from_bytes(bytes(blob[:8].numpy()), "little")
        begin = -(-(8 + length) // ALIGN) * ALIGN
        found = {}
        for name, dtype, shape, offset in json.loads(bytes(blob[8 : 8 + length].numpy())):
            kind = getattr(torch, dtype)
            if not isinstance(kind, torch.dtype) or min([0, *shape]) < 0 or offset % ALIGN:
                raise ValueError(f"{name}: {dtype} {shape} at {offset}")
            size = kind.itemsize
            for each in shape:
                size *= each
            if begin + offset + size > len(blob):
                raise ValueError(f"{name} ends after the last byte")
            found[name] = blob[begin + offset : begin + offset + size].view(kind).reshape(shape)
        return found
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise DataError(f"these bytes are not dense weights: {error}") from None
