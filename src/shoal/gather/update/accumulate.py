"""Sum peers' chunks into the dense update: in canonical order, float32, one addition per position and peer."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.gather.payload.codec import VALUE_KINDS, unpack12_reference
from shoal.gather.payload.payload_ref import CODES
from shoal.gather.payload.spec import CODECS, ParamSpec
from shoal.gather.payload.validate import raw_bytes
from shoal.gather.protocol.waves import Slice
from shoal.gather.update.regions import Region

REDUCTIONS = ("count_mean", "peer_mean", "sum")


class TileSum:
    """The sums of one tile over its waves. With ``dense`` (CPU, float32) finished chunks are written there; otherwise
    ``values`` holds them, [chunks, totalk]."""

    def __init__(
        self,
        param: ParamSpec,
        ids: Tensor,
        region: Region,
        *,
        dense: Tensor | None,
        one_call: bool,
        device: torch.device,
        reduction: str,
        peers: int,
    ) -> None:
        self.param, self.ids, self.region, self.dense, self.peers = param, ids, region, dense, peers
        self.reduction = REDUCTIONS.index(reduction)
        self.native = device.type == "cpu"
        self.values = self.counts = None
        if not (self.native and one_call and dense is not None):
            # Zeroed by the first wave, or by the torch path itself.
            self.values = torch.empty(len(ids), param.totalk, device=device)
            self.counts = torch.empty(len(ids), param.totalk, dtype=torch.int32, device=device)

    def add(self, slices: Sequence[Slice], factors: Tensor, *, first: bool, last: bool) -> None:
        if self.native:
            self._add_native(slices, factors, first, last)
        else:
            self._add_reference(slices, factors, first, last)

    def _add_native(self, slices: Sequence[Slice], factors: Tensor, first: bool, last: bool) -> None:
        param, region = self.param, self.region
        rows = torch.tensor(
            [[s.idxs.data_ptr(), s.vals.data_ptr(), s.table.data_ptr(), VALUE_KINDS[CODES[s.code][0]]] for s in slices],
            dtype=torch.int64,
            device="cpu",
        ).reshape(-1, 4)
        factors = factors.to(torch.float32).contiguous()
        _, across, height, width = param.blocks
        address = lambda t: 0 if t is None else t.data_ptr()  # noqa: E731
        _core.gather_reduce(
            rows.data_ptr(), factors.data_ptr(), len(slices), self.ids.data_ptr(), len(self.ids), param.k, param.totalk,
            CODECS.index(param.codec), address(self.values), address(self.counts), first, last, self.reduction,
            self.peers, across, height, width, region.row0, region.row1, region.column0, region.column1,
            address(self.dense), 0 if self.dense is None else self.dense.stride(0),
        )  # fmt: skip

    def _add_reference(self, slices: Sequence[Slice], factors: Tensor, first: bool, last: bool) -> None:
        """Add in plain torch, on any device; deterministic, because a peer has no position twice."""
        assert self.values is not None
        assert self.counts is not None
        if first:
            self.values.zero_()
            self.counts.zero_()
        if self.values.is_cuda and find_spec("triton"):
            self._add_cuda(slices, factors)
            slices, factors = (), factors[:0]
        for slice_, factor in zip(slices, factors.tolist(), strict=True):
            index, value = decode(slice_, self.param, self.values.device)
            scaled = value * torch.tensor(factor, dtype=torch.float32, device=value.device)
            self.values.scatter_(1, index, self.values.gather(1, index) + scaled)
            self.counts.scatter_(1, index, self.counts.gather(1, index) + 1)
        if last and self.reduction == 0:
            mean = self.values / self.counts.clamp(min=1)
            self.values.copy_(torch.where(self.counts > 0, mean, torch.zeros_like(mean)))
        elif last and self.reduction == 1:
            self.values /= self.peers

    def _add_cuda(self, slices: Sequence[Slice], factors: Tensor) -> None:
        from shoal.ops.cuda import codec

        assert self.values is not None
        assert self.counts is not None
        device = self.values.device
        factors = factors.to(device, torch.float32)
        packed = self.param.codec == "packed12"
        for i, slice_ in enumerate(slices):
            idxs, vals = slice_.idxs.to(device), slice_.vals.to(device)
            dtype = CODES[slice_.code][0]
            table = slice_.table.to(device) if dtype == torch.uint8 else None
            if not packed:
                idxs = idxs.clone().view(torch.int32)
            if table is None:
                vals = vals.clone().view(dtype)
            codec.add_peer(self.values, self.counts, idxs, vals, table, factors[i : i + 1], self.param.k, packed)


def decode(slice_: Slice, param: ParamSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return int64 indices and float32 values of a slice, [chunks, k], on a device."""
    idxs, vals = slice_.idxs.to(device), slice_.vals.to(device)
    if param.codec == "packed12":
        index = unpack12_reference(idxs).reshape(-1, param.k)
    else:
        index = idxs.clone().view(torch.int32).long().reshape(-1, param.k)
    dtype = CODES[slice_.code][0]
    if dtype == torch.uint8:
        value = slice_.table.to(device)[vals.long()]
    else:
        value = vals.clone().view(dtype).to(torch.float32)
    return index, value.reshape(-1, param.k)


class BandWriter:
    """Writes finished chunk values to the local gradient, one row of chunks at a time, cast once, and adds each float32
    row, in order, to the hash and the sums. Holds one band: chunk height times columns."""

    def __init__(self, region: Region, target: Tensor, digest: Any) -> None:
        self.region, self.target, self.digest = region, target, digest
        _, self.across, self.height, self.width = region.param.blocks
        self.band: Tensor | None = None
        self.squares = self.total = 0.0
        self.finite = True  # after the cast, which can overflow float16

    def write(self, ids: Tensor, values: Tensor) -> None:
        region, h, w = self.region, self.height, self.width
        x0 = region.column0 // w
        x1 = -(-region.column1 // w)
        start = 0
        while start < len(ids):
            y, x = divmod(int(ids[start]), self.across)
            n = min(len(ids) - start, x1 - x)
            if self.band is None:
                self.band = torch.empty(h, (x1 - x0) * w, device=values.device)
            block = values[start : start + n].view(n, h, w).permute(1, 0, 2).reshape(h, n * w)
            self.band[:, (x - x0) * w : (x - x0 + n) * w] = block
            start += n
            if x + n == x1:
                self._flush(y, x0 * w)

    def _flush(self, y: int, left: int) -> None:
        region, h = self.region, self.height
        assert self.band is not None
        top = y * h
        row0, row1 = max(top, region.row0), min(top + h, region.row1)
        band = self.band[row0 - top : row1 - top, region.column0 - left : region.column1 - left]
        band = region.cut(band).contiguous()
        host = band.cpu()
        self.digest.update(raw_bytes(host))
        sums = _core.gather_block_sums(host.data_ptr(), host.numel())
        self.squares += sums.squares
        self.total += sums.values
        rows = self.target[row0 - region.row0 : row1 - region.row0]
        rows.copy_(band)
        self.finite = self.finite and bool(torch.isfinite(rows).all())
