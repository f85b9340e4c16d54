"""Pack many tensors into a few flat ones, and unpack them."""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn

from shoal.buffers import empty_of

BUCKET_BYTES = 25 << 20


def make_buckets(tensors: Sequence[Tensor], bucket_bytes: int, *, by_dtype: bool = True) -> list[list[int]]:
    """Group the positions of ``tensors`` into buckets of one dtype and device.

    A bucket is closed when the next tensor of its kind would exceed ``bucket_bytes``; a larger tensor gets its own
    bucket. Buckets are in the order of their first tensors.
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device) if by_dtype else None
        bucket, used = filling.get(kind, ([], 0))
        if bucket and used + tensor.nbytes > bucket_bytes:
            bucket, used = [], 0
        if not bucket:
            buckets.append(bucket)
        bucket.append(i)
        filling[kind] = (bucket, used + tensor.nbytes)
    return buckets


def gradient_of(parameter: Tensor) -> Tensor:
    """A parameter's gradient, dense; zeros if it has none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient


def flatten(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """One flat copy of ``tensors``, in ``dtype`` if given."""
    dtype = dtype or tensors[0].dtype
    count = sum(t.numel() for t in tensors)
    if tensors[0].device.type == "cpu":
        flat = empty_of(count, dtype)
    else:
        flat = torch.empty(count, dtype=dtype, device=tensors[0].device)
    if dtype == tensors[0].dtype:
        return torch.cat([t.detach().reshape(-1) for t in tensors], out=flat)
    for part, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
        part.copy_(tensor.detach().reshape(-1))
    return flat


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``flat`` in the shapes of ``like``; converted and moved first when their dtype or device differs."""
    flat = flat.to(device=like[0].device, dtype=like[0].dtype)
    parts = flat.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


class GradientBucket:
    """All gradients of a model and ``numbers`` scalars in one flat tensor, so that a step needs one all-reduce.

    The parameters' ``grad`` are views into it; call `zero` instead of ``optimizer.zero_grad``.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], numbers: int) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        total = sum(p.numel() for p in self._parameters)
        first = self._parameters[0] if self._parameters else torch.empty(0, device="cpu")
        self.flat = torch.zeros(total + numbers, dtype=torch.float32, device=first.device)
        self.numbers = self.flat[total:]
        self._views, at = [], 0
        for parameter in self._parameters:
            self._views.append(self.flat[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()

    def zero(self) -> None:
        self.flat.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view
