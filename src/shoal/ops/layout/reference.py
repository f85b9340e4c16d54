"""The layout op in plain torch: gather the vectors of a slice, pool them, place them."""

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ops.layout.blocks import Request
from shoal.ops.layout.plan import Plan, Task
from shoal.proto.feature_configs import PoolingType


def embedding_to_layout(
    plan: Plan, requests: list[Request], embeddings: list[Tensor], fids: Tensor, rows: Tensor, nfl: Tensor
) -> list[Tensor]:
    """Differentiable with respect to ``embeddings``."""
    total = sum(request.batch for request in requests)
    none = torch.zeros(0, dtype=torch.float32, device=fids.device)
    flat = torch.cat([e.reshape(-1) for e in embeddings]) if embeddings else none
    starts = [0]
    for e in embeddings:
        starts.append(starts[-1] + e.numel())
    outs = [flat.new_zeros(output_shape(shape, total)).view(-1) for shape in plan.shapes]
    for request in requests:
        part = _Part(plan, request, starts, fids, rows, nfl)
        for task in plan.tasks:
            placed = part.place(task, flat)
            if placed is not None:
                where, values = placed
                outs[task.output] = outs[task.output].index_add(0, where.reshape(-1), values.reshape(-1))
    return [out.view(output_shape(shape, total)) for out, shape in zip(outs, plan.shapes, strict=True)]


def output_shape(shape: tuple[int, ...], batch: int) -> list[int]:
    """A configured shape with the size of the batch filled in."""
    if shape[0] == -1:
        return [batch, *shape[1:]]
    if shape[0] < batch:
        raise ConfigError(
            f"fused_embedding_to_layout: a shape must have at least {batch} rows, the batch size, got {list(shape)}"
        )
    return list(shape)


class _Part:
    """One request's offsets."""

    def __init__(
        self, plan: Plan, request: Request, starts: list[int], fids: Tensor, rows: Tensor, nfl: Tensor
    ) -> None:
        self.request, self.features = request, len(plan.feature_names)
        self.nfl = nfl.narrow(0, *request.nfl)
        self.rows = rows.narrow(0, *request.rows)
        self.fids = fids.narrow(0, *request.fids)
        like = self.fids
        self.block_start = like.new_tensor([starts[b.source] + b.start for b in request.blocks])
        self.block_size = like.new_tensor([b.size for b in request.blocks])
        self.block_stride = like.new_tensor([b.stride for b in request.blocks])
        if self.nfl.shape[0] < self.features:
            raise ConfigError(
                f"fused_embedding_to_layout: nfl_offset must have an entry per feature, {self.features}, "
                f"got {self.nfl.shape[0]}"
            )
        if self.nfl.shape[0] and int((self.nfl & 0x7FFFFFFF).max()) > self.rows.shape[0]:
            raise ConfigError(
                f"fused_embedding_to_layout: nfl_offset reaches past the {self.rows.shape[0]} entries of feature_offset"
            )

    def place(self, task: Task, flat: Tensor) -> tuple[Tensor, Tensor] | None:
        """Flat output positions and the values to add there, or None if the feature is absent."""
        batch = self.request.batch
        masked = self.nfl & 0x7FFFFFFF
        first = int(masked[task.feature])
        shared = bool((self.nfl[task.feature] >> 31) & 1)
        last = task.feature + 1 < self.nfl.shape[0]
        count = int(masked[task.feature + 1]) - first if last else self.rows.shape[0] - first
        if count == 0 or batch == 0:
            return None
        if count < (1 if shared else batch):
            raise ConfigError(
                f"fused_embedding_to_layout: feature {task.feature} has {count} rows for a batch of {batch}"
            )
        ends = torch.cat([self.rows, self.rows.new_tensor([self.fids.shape[0]])])
        row = torch.full((batch,), first, device=flat.device) + (
            0 if shared else torch.arange(batch, device=flat.device)
        )
        begin, lengths = ends[row], ends[row + 1] - ends[row]
        # One entry per (sample, fid): its sample, its position in the row, its fid.
        sample = torch.arange(batch, device=flat.device).repeat_interleave(lengths)
        position = torch.arange(sample.shape[0], device=flat.device) - (lengths.cumsum(0) - lengths)[sample]
        fid = self.fids[begin[sample] + position]
        block, index2 = (fid >> 32) & 0xFFFFFFFF, fid & 0xFFFFFFFF
        if block.numel() and int(block.max()) >= len(self.request.blocks):
            raise ConfigError(
                f"fused_embedding_to_layout: fid_offset names block {int(block.max())} of {len(self.request.blocks)}"
            )
        address = index2 * self.block_stride[block] + task.start
        if bool((address + task.width > self.block_size[block]).any()):
            raise ConfigError("fused_embedding_to_layout: a fid reaches past its block")
        columns = torch.arange(task.width, device=flat.device)
        values = flat[(self.block_start[block] + address)[:, None] + columns]
        where = (self.request.first_row + sample) * task.sample_stride + task.place
        if task.pooling == PoolingType.FIRSTN:
            kept = position < task.max_length
            values, where = values[kept], (where + position * task.sequence_stride)[kept]
        elif task.pooling == PoolingType.MEAN:
            values = values / lengths[sample][:, None]
        return where[:, None] + columns, values
