"""A reference to an accepted payload: slices of its parameters, from a mapped spill file or from memory."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.gather.errors import GatherError, PayloadRejected
from shoal.gather.payload.codec import QuantParams, value_table
from shoal.gather.payload.container import load_payload
from shoal.gather.payload.spec import GradientSpec
from shoal.gather.payload.validate import checked_param, nbytes, payload_digest, quant_block

# One letter per layout of a value block: uint8 codes for a dtype, or the plain dtype.
CODES: dict[str, tuple[torch.dtype, str | None]] = {
    "A": (torch.uint8, "float32"), "B": (torch.uint8, "float16"), "C": (torch.uint8, "bfloat16"),
    "d": (torch.float32, None), "e": (torch.float16, None), "f": (torch.bfloat16, None),
}  # fmt: skip
_CODE_OF = {layout: code for code, layout in CODES.items()}


class ParamData(NamedTuple):
    """One parameter of one payload: contiguous idxs and vals, and the value table of quantized ones."""

    idxs: Tensor
    vals: Tensor
    quant: QuantParams | None
    code: str


class PayloadRef:
    """One accepted payload. Data is read only when a slice is used; a file that shrank raises OSError, not SIGBUS.

    Any thread can read. The bytes are the validated ones as long as ``verify`` passes.
    """

    def __init__(
        self,
        spec: GradientSpec,
        params: list[ParamData | None],
        *,
        digest: str = "",
        path: Path | None = None,
        keep: Any = None,
    ) -> None:
        self.spec = spec
        self.params = params
        self.digest = digest
        self.path = path
        stat = path.stat() if path is not None else None
        self._size = stat.st_size if stat is not None else 0
        self._mtime_ns = stat.st_mtime_ns if stat is not None else 0
        self._keep = keep  # must live as long as the data: a temporary folder, a buffer
        self._table: tuple[int, Tensor] | None = None

    @classmethod
    def from_payload(
        cls,
        payload: Mapping[str, Any],
        spec: GradientSpec,
        *,
        digest: str = "",
        path: Path | None = None,
        keep: Any = None,
    ) -> "PayloadRef":
        """Build from a validated payload. A missing parameter (hand-made payloads) is None."""
        params: list[ParamData | None] = []
        for param in spec.params:
            try:
                idxs, vals, quant = checked_param(payload["state_dict"], param, spec)
            except PayloadRejected as error:
                if error.reason != "missing_param":
                    raise
                params.append(None)
                continue
            name = None if quant is None else str(quant[4]).removeprefix("torch.")
            params.append(ParamData(idxs, vals, quant, _CODE_OF[vals.dtype, name]))
        return cls(spec, params, digest=digest, path=path, keep=keep)

    @property
    def codes(self) -> str:
        """One letter per parameter, or a single letter if all are equal; ``-`` for a missing one."""
        letters = "".join("-" if p is None else p.code for p in self.params)
        return letters[:1] if len(set(letters)) == 1 else letters

    def check_readable(self) -> None:
        """Raise OSError if the mapped file was removed or has shrunk."""
        if self.path is not None and self._size and os.stat(self.path).st_size < self._size:
            raise OSError(f"spill file {self.path.name} shrank below {self._size} bytes")

    def param(self, index: int) -> ParamData:
        data = self.params[index]
        if data is None:
            raise GatherError(f"the payload has no parameter {self.spec.params[index].name!r}")
        return data

    def slice(self, index: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Flat idxs (uint8 bytes) and vals (bytes) of the chunks ``start..stop`` of a parameter."""
        param, data = self.spec.params[index], self.param(index)
        idxs = data.idxs.reshape(-1).view(torch.uint8)
        vals = data.vals.reshape(-1).view(torch.uint8)
        item = data.vals.element_size() * param.k
        return idxs[start * param.index_bytes : stop * param.index_bytes], vals[start * item : stop * item]

    def table(self, index: int) -> Tensor:
        """float32 [256] for uint8 values; zeros for others."""
        if self._table is None or self._table[0] != index:  # only one is cached: an update goes parameter by parameter
            quant = self.param(index).quant
            self._table = index, torch.zeros(256, device="cpu") if quant is None else value_table(quant)
        return self._table[1]

    def quant_block(self, index: int) -> bytes:
        quant = self.param(index).quant
        return b"" if quant is None else quant_block(quant)

    @property
    def nbytes(self) -> int:
        return sum(nbytes(p.idxs) + nbytes(p.vals) for p in self.params if p is not None)

    def verify(self) -> None:
        """Read the payload again and compare its digest; GatherError or OSError if it is not the accepted one."""
        if not self.digest:
            return
        try:
            if self.path is None:
                found = payload_digest({"state_dict": self.state_dict()}, self.spec)
            else:
                stat = os.stat(self.path)
                if (stat.st_size, stat.st_mtime_ns) != (self._size, self._mtime_ns):
                    raise GatherError("the spill file was changed after its validation")
                found = payload_digest(load_payload(self.path, self.spec), self.spec)
        except PayloadRejected as error:
            raise GatherError(f"the spilled payload can no longer be read ({error.reason})") from error
        if found != self.digest:
            raise GatherError("the spilled payload's digest changed")

    def state_dict(self) -> dict[str, Any]:
        """Return the payload's keys and values; ``quant_params`` only where values are quantized."""
        state: dict[str, Any] = {}
        for param, data in zip(self.spec.params, self.params, strict=True):
            if data is not None:
                state |= {param.name + "idxs": data.idxs, param.name + "vals": data.vals}
                if data.quant is not None:
                    state[param.name + "quant_params"] = data.quant
        return state


def value_itemsize(code: str) -> int:
    """Bytes of one value when sent."""
    return CODES[code][0].itemsize


def quant_bytes(code: str, bins: int) -> int:
    """Length of the quant block of a value layout."""
    name = CODES[code][1]
    return 0 if name is None else 4 + 8 + 4 + 4 * bins + len(name) + 1


def expand_codes(codes: str, n_params: int) -> str:
    """Expand the short form of codes in reports to one letter per parameter."""
    return codes * n_params if len(codes) == 1 else codes
