"""`aligned_flat_concat` and `aligned_flat_split`: many tensors as one flat buffer, for one all-reduce."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ops import checks
from shoal.switches import other_program_switch

ALIGN = 16
"""Each tensor is padded to a multiple of this many floats (64 bytes)."""


def aligned_flat_concat(inputs: Any, scale: Any = 1.0) -> Tensor:
    """Flatten, scale and concatenate tensors, each padded with zeros to a multiple of ``ALIGN``.

    Gradients flow to the inputs. ``scale`` is a number or a tensor with one element.

    >>> aligned_flat_concat([[1, 2], [3]], 2).nonzero().flatten().tolist()
    [0, 1, 16]
    """
    op = "aligned_flat_concat"
    parts = checks.float_list(inputs, op, "inputs")
    if not parts:
        return torch.zeros(0, dtype=torch.float32, device=None)
    if any(part.dtype != parts[0].dtype for part in parts):
        raise ConfigError(f"{op}: all inputs must have one dtype, got {sorted({str(p.dtype) for p in parts})}")
    if _fits_kernel(parts) and isinstance(scale, int | float):
        from shoal.ops.cuda.concat import flat_concat

        with torch.cuda.device(parts[0].device) if parts[0].is_cuda else contextlib.nullcontext():
            return flat_concat(parts, float(scale), ALIGN)
    zeros = parts[0].new_zeros(ALIGN)
    pads: dict[int, Tensor] = {}
    pieces = []
    for part in parts:
        pieces.append(part.reshape(-1))
        gap = -part.numel() % ALIGN
        if torch.compiler.is_compiling():  # one program for all sizes
            pieces.append(part.new_zeros(gap))
        elif gap:
            if gap not in pads:
                pads[gap] = zeros[:gap]
            pieces.append(pads[gap])
    flat = torch.cat(pieces)
    if isinstance(scale, int | float):
        return flat if scale == 1 else flat * scale
    return flat * torch.as_tensor(scale, device=flat.device).reshape(()).to(flat)


def _fits_kernel(parts: list[Tensor]) -> bool:
    """Whether one kernel can join them: plain tensors on one device, neither differentiated nor traced."""
    if torch.compiler.is_compiling() or parts[0].dtype not in (torch.float32, torch.float64):
        return False
    if torch._C._len_torch_dispatch_stack() or not (parts[0].is_cuda or other_program_switch("TRITON_INTERPRET")):
        return False
    device, grad = parts[0].device, torch.is_grad_enabled()
    return all(
        type(part) in (Tensor, torch.nn.Parameter) and part.device == device and not (grad and part.requires_grad)
        for part in parts
    )


def aligned_flat_split(inputs: Any, flat: Any) -> list[Tensor]:
    """Return views of ``flat`` with the shapes of ``inputs``, the inverse of `aligned_flat_concat`."""
    op = "aligned_flat_split"
    flat = checks.floats(flat, op, "flat")
    if flat.dim() != 1:
        raise ConfigError(f"{op}: flat must be 1-D, got shape {list(flat.shape)}")
    outs, at = [], 0
    for x in checks.tensors(inputs, op, "inputs"):
        shape = x.shape if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu").shape
        count = shape.numel()
        end = at + -(-count // ALIGN) * ALIGN
        if end > flat.shape[0]:
            raise ConfigError(f"{op}: the inputs need {end} floats or more, but flat has {flat.shape[0]}")
        outs.append(flat[at : at + count].view(shape))
        at = end
    return outs
