"""Top-k gradient compression: send the k values of largest magnitude, keep the rest for later steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shoal.errors import CompressionError, ConfigError, ShapeError


@dataclass(frozen=True, eq=False)
class CompressedGradient:
    """Some values of a flattened tensor of ``original_len`` elements, and their indices in it."""

    indices: Tensor
    values: Tensor
    original_len: int

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and the name of the values' dtype, for JSON."""
        return {
            "indices": self.indices.tolist(),
            "values": self.values.tolist(),
            "original_len": self.original_len,
            "dtype": str(self.values.dtype).removeprefix("torch."),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CompressedGradient":
        dtype = getattr(torch, str(data.get("dtype", "float32")).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise CompressionError(f"CompressedGradient: {data.get('dtype')!r} is not the name of a dtype")
        return cls(
            torch.tensor(data["indices"], dtype=torch.int64, device="cpu"),
            torch.tensor(data["values"], dtype=dtype, device="cpu"),
            int(data["original_len"]),
        )


def clamped(ratio: float) -> float:
    """``ratio`` limited to [0, 1]."""
    ratio = float(ratio)
    if math.isnan(ratio):
        raise CompressionError("topk_count: ratio must be a number in [0, 1], got NaN")
    return min(1.0, max(0.0, ratio))


def topk_count(n: int, ratio: float) -> int:
    """The number of values that ``ratio`` keeps of ``n``, computed exactly on its decimal form; at least 1 if n > 0.

    Example:
        >>> topk_count(100, 0.07), topk_count(10, 0), topk_count(0, 0.5)
        (7, 1, 0)
    """
    ratio = clamped(ratio)
    return min(n, max(1, math.ceil(n * Fraction(repr(ratio))))) if n > 0 else 0


def topk_indices(flat: Tensor, k: int, *, nonfinite: str = "raise", order: str = "magnitude") -> Tensor:
    """Indices of the ``k`` largest magnitudes in a flat tensor; ties go to the lower index, NaN ranks highest."""
    flat = flat.detach()
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=flat.device)
    if (
        flat.device.type == "cpu"
        and flat.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and len(flat) >> 32 == 0
    ):
        from shoal import _core

        values = flat.float().contiguous()
        indices = torch.empty(k, dtype=torch.int64, device="cpu")
        bad = _core.topk_magnitude(
            values.data_ptr(), len(values), k, order == "index", nonfinite == "raise", indices.data_ptr()
        )
        if bad and nonfinite == "raise":
            raise _nonfinite_error(flat)
        return indices
    if flat.is_cuda and flat.dtype in (torch.float32, torch.float16, torch.bfloat16) and find_spec("triton"):
        return _topk_indices_cuda(flat, k, nonfinite, order)
    return topk_indices_reference(flat, k, nonfinite=nonfinite, order=order)


def _topk_indices_cuda(flat: Tensor, k: int, nonfinite: str, order: str) -> Tensor:
    from shoal.ops.cuda.topk import largest

    flat = flat.contiguous()
    chosen, bad = largest(flat, k)
    if order != "index":
        chosen = chosen[torch.argsort(flat[chosen].float().abs(), descending=True, stable=True)]
    if bool(bad):  # the only host sync
        return topk_indices_reference(flat, k, nonfinite=nonfinite, order=order)
    return chosen


def topk_indices_reference(flat: Tensor, k: int, *, nonfinite: str = "raise", order: str = "magnitude") -> Tensor:
    """``topk_indices`` in plain torch; also used for float64, and on CUDA for tensors with NaN.

    It finds the k-th magnitude without sorting, then takes everything above it and the lowest indices equal to it.
    """
    if flat.is_floating_point():
        size = (flat if flat.dtype == torch.float64 else flat.float()).abs()
    else:
        wide = flat.long()
        size = ~torch.minimum(wide, -wide)  # |x| - 1, because -(2**63) has no absolute value
    if not flat.is_floating_point() or bool(torch.isfinite(size).all()):
        least = torch.topk(size, k, sorted=False).values.min()
        above = (size > least).nonzero().flatten()
        ties = (size == least).nonzero().flatten()[: k - len(above)]
        chosen = torch.cat([above, ties]).sort().values
        if order == "index":
            return chosen
        return chosen[torch.argsort(size[chosen], descending=True, stable=True)]
    if nonfinite == "raise":
        raise _nonfinite_error(flat)
    nan = torch.isnan(size)
    by_size = torch.argsort(torch.where(nan, torch.inf, size), descending=True, stable=True)
    chosen = by_size[torch.argsort(nan[by_size].to(torch.int8), descending=True, stable=True)][:k]
    return chosen.sort().values if order == "index" else chosen


def _nonfinite_error(flat: Tensor) -> CompressionError:
    bad = int((~torch.isfinite(flat)).sum())
    return CompressionError(
        f"compress_gradients: {bad} of {len(flat)} values are NaN or infinite; skip the step, or pass nonfinite='keep'"
    )


def compress_gradients(
    gradients: Sequence[Tensor], ratio: float, *, nonfinite: str = "raise", order: str = "magnitude"
) -> list[CompressedGradient]:
    """Keep the ``topk_count(n, ratio)`` values of largest magnitude of each tensor, flattened row-major.

    Ties go to the lower index. ``order="magnitude"``: largest first; ``"index"``: ascending index, better for packing.
    NaN and infinity raise ``CompressionError``; with ``nonfinite="keep"`` they are kept first, NaN above infinity.

    Example:
        >>> (c,) = compress_gradients([torch.tensor([0.4, -0.4, 0.1, 0.9])], 0.5)
        >>> c.indices.tolist()
        [3, 0]
    """
    if nonfinite not in ("raise", "keep"):
        raise ConfigError(f"compress_gradients: nonfinite must be 'raise' or 'keep', got {nonfinite!r}")
    if order not in ("magnitude", "index"):
        raise ConfigError(f"compress_gradients: order must be 'magnitude' or 'index', got {order!r}")
    result = []
    for gradient in gradients:
        flat = gradient.detach().reshape(-1)
        indices = topk_indices(flat, topk_count(flat.numel(), ratio), nonfinite=nonfinite, order=order)
        result.append(CompressedGradient(indices, flat[indices], flat.numel()))
    return result


def decompress_gradients(
    compressed: Sequence[CompressedGradient], shapes: Sequence[Sequence[int]], *, duplicates: str = "raise"
) -> list[Tensor]:
    """Dense tensors of the given shapes, zero where nothing was sent.

    Raises:
        ShapeError: a shape does not have ``original_len`` elements.
        CompressionError: the lists differ in length, a gradient's numbers of indices and values differ, or an index is
            out of range or repeated (``duplicates="last"`` and ``"sum"`` allow repeated ones).
    """
    if duplicates not in ("raise", "last", "sum"):
        raise ConfigError(f"decompress_gradients: duplicates must be 'raise', 'last' or 'sum', got {duplicates!r}")
    if len(compressed) != len(shapes):
        raise CompressionError(
            f"decompress_gradients: there must be one shape per gradient, got {len(shapes)} for {len(compressed)}"
        )
    return [_decompress(i, c, tuple(s), duplicates) for i, (c, s) in enumerate(zip(compressed, shapes, strict=True))]


def _decompress(i: int, c: CompressedGradient, shape: tuple[int, ...], duplicates: str) -> Tensor:
    if math.prod(shape) != c.original_len or min(shape, default=0) < 0:
        raise ShapeError(
            f"decompress_gradients: the shape of gradient {i} must have {c.original_len} elements, got {shape}"
        )
    indices, values = c.indices.reshape(-1), c.values.reshape(-1)
    if len(indices) != len(values):
        raise CompressionError(
            f"decompress_gradients: gradient {i} must have one value per index, got {len(values)} for {len(indices)}"
        )
    if len(indices):
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= c.original_len:
            bad = low if low < 0 else high
            raise CompressionError(
                f"decompress_gradients: indices of gradient {i} must be in [0, {c.original_len}), got {bad}"
            )
    dense = torch.zeros(c.original_len, dtype=values.dtype, device=values.device)
    indices = indices.to(device=values.device, dtype=torch.int64)
    if duplicates == "sum":
        dense.index_add_(0, indices, values)
        return dense.reshape(shape)
    ordered = indices.sort(stable=True)
    repeated = ordered.values[1:] == ordered.values[:-1]
    if bool(repeated.any()):
        if duplicates == "raise":
            twice = int(ordered.values[1:][repeated][0])
            raise CompressionError(f"decompress_gradients: gradient {i} has index {twice} more than once")
        last = torch.cat([~repeated, torch.ones(1, dtype=torch.bool, device=repeated.device)])
        indices, values = ordered.values[last], values[ordered.indices[last]]
    dense[indices] = values
    return dense.reshape(shape)


class TopKCompressor:
    """Applies ``compress_gradients``, and with ``error_feedback`` remembers the values that were not sent.

    Each step compresses ``gradient + decay * memory`` and keeps the unsent rest in float32 on the gradient's device, so
    that values are delayed, not lost. Call ``reset()`` after skipped rounds. ``ratio`` is limited to [0, 1].
    """

    def __init__(self, ratio: float, *, error_feedback: bool = False, decay: float = 1.0) -> None:
        if math.isnan(float(decay)):
            raise ConfigError("TopKCompressor: decay must be a number, got NaN; use 1.0 to keep all unsent values")
        self.ratio = clamped(ratio)
        self.error_feedback = error_feedback
        self.decay = decay
        self.memory: list[Tensor] = []

    def compress(self, grads: Sequence[Tensor]) -> list[CompressedGradient]:
        """Return the part to send and update the memory, which stays unchanged on an error."""
        grads = [g.detach() for g in grads]
        if not self.error_feedback:
            return compress_gradients(grads, self.ratio)
        if self.memory and [e.shape for e in self.memory] != [g.shape for g in grads]:
            raise ShapeError(
                "TopKCompressor: gradients must have the shapes of the last call, "
                f"{[tuple(e.shape) for e in self.memory]}, got {[tuple(g.shape) for g in grads]}; call reset() when "
                "the model changes"
            )
        result, memory = [], []
        for i, gradient in enumerate(grads):
            kept = self.memory[i].to(gradient.device) if self.memory else None
            sent, rest = compress_with_feedback(gradient, kept, self.ratio, self.decay)
            result.append(sent)
            memory.append(rest)
        self.memory = memory
        return result

    def decompress(self, compressed: Sequence[CompressedGradient], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        return decompress_gradients(compressed, shapes)

    def state_dict(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio,
            "error_feedback": self.error_feedback,
            "decay": self.decay,
            "memory": [e.clone() for e in self.memory],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ratio = clamped(state["ratio"])
        self.error_feedback = state["error_feedback"]
        self.decay = state["decay"]
        self.memory = [e.detach().clone().float() for e in state["memory"]]

    def reset(self) -> None:
        """Forget the values that were not sent."""
        self.memory = []


def compress_with_feedback(
    gradient: Tensor, memory: Tensor | None, ratio: float, decay: float
) -> tuple[CompressedGradient, Tensor]:
    """The part of ``gradient`` to send, in its dtype, and the unsent rest, in its shape and float32."""
    wide = gradient if gradient.dtype == torch.float64 else gradient.float()
    flat = (wide.clone() if memory is None else wide + decay * memory).reshape(-1)
    indices = topk_indices(flat, topk_count(flat.numel(), ratio))
    values = flat[indices].to(gradient.dtype)
    flat[indices] -= values.to(flat.dtype)
    return CompressedGradient(indices, values, flat.numel()), flat.float().reshape(gradient.shape)
