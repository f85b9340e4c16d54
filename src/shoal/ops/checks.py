"""Conversion of the ops' arguments, tensors or nested lists, to the documented dtypes, with errors that name them."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ragged import Ragged

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)
_FLOATS = (torch.float32, torch.float64)


def int64(value: Any, op: str, name: str) -> Tensor:
    """An int64 tensor; narrower integers and lists are converted."""
    if not isinstance(value, Tensor):
        value = torch.as_tensor(value, device="cpu")
        if value.numel() == 0:
            return value.long()
    if value.dtype is torch.int64:
        return value
    if value.dtype not in _INTEGERS:
        raise ConfigError(f"{op}: {name} must be a tensor of int64, got {value.dtype}")
    return value.long()


def integers(value: Any, op: str, name: str) -> Tensor:
    """An int32 or int64 tensor as it is; a list becomes int64."""
    if isinstance(value, Tensor) and value.dtype is torch.int32:
        return value
    return int64(value, op, name)


def vector(value: Any, op: str, name: str) -> Tensor:
    """An int64 tensor of one dimension."""
    value = int64(value, op, name)
    if value.dim() != 1:
        raise ConfigError(f"{op}: {name} must be 1-D, got shape {list(value.shape)}")
    return value


def floats(value: Any, op: str, name: str) -> Tensor:
    """A float32 or float64 tensor; a list becomes float32."""
    if not isinstance(value, Tensor):
        return torch.as_tensor(value, dtype=torch.float32, device="cpu")
    if value.dtype not in _FLOATS:
        raise ConfigError(f"{op}: {name} must be float32 or float64, got {value.dtype}; convert with .float()")
    return value


def fit_empty(value: Tensor, *row: int) -> Tensor:
    """Give an empty list, which has no row shape, rows of the given shape."""
    return value.reshape(0, *row) if value.dim() == 1 and value.shape[0] == 0 else value


def constant(value: Tensor) -> Tensor:
    """Detach an input that gets no gradient."""
    return value.detach() if value.requires_grad else value


def scaled(grads: list[Tensor], scale: Any, op: str, name: str) -> tuple[list[Tensor], float]:
    """Return the gradients and the kernel's factor; a traced ``scale`` has no value yet, so it is applied here."""
    if isinstance(scale, int | float):
        return grads, float(scale)
    scale = scale if isinstance(scale, Tensor) else torch.as_tensor(scale, device="cpu")
    if scale.numel() != 1:
        raise ConfigError(f"{op}: {name} must be one number, got shape {list(scale.shape)}")
    if torch.compiler.is_compiling():
        return [g * scale.reshape(()).to(g) for g in grads], 1.0
    return grads, float(scale.item())


def number(value: Any, op: str, name: str) -> int:
    """A Python int from an int, or from a tensor or list with one element; symbolic while tracing."""
    if isinstance(value, int | torch.SymInt):
        return value  # type: ignore[return-value]
    value = int64(value, op, name)
    if value.numel() != 1:
        raise ConfigError(f"{op}: {name} must be one number, got shape {list(value.shape)}")
    return value.reshape(()).item()  # type: ignore[return-value]


def int_list(values: Any, op: str, name: str, *, least: int = 0) -> list[int]:
    """A list of Python ints from a sequence or a 1-D tensor."""
    if isinstance(values, Tensor):
        values = values.tolist()
    try:
        out: list[int] = [v if isinstance(v, int) else _index(v) for v in values]
    except TypeError:
        raise ConfigError(f"{op}: {name} must be a list of ints, got {values!r}") from None
    if out and min(out) < least:
        raise ConfigError(f"{op}: {name}[{out.index(min(out))}] must be at least {least}, got {min(out)}")
    return out


def _index(value: Any) -> Any:
    return value if isinstance(value, torch.SymInt) else operator.index(value)


def tensors(values: Any, op: str, name: str) -> Sequence[Any]:
    """Check that ``values`` is a list or tuple; the caller converts its elements."""
    if not isinstance(values, list | tuple):
        raise ConfigError(f"{op}: {name} must be a list of tensors, got {type(values).__name__}")
    return values


def float_list(values: Any, op: str, name: str) -> list[Tensor]:
    """A list of `floats`."""
    return [
        v if isinstance(v, Tensor) and v.dtype in _FLOATS else floats(v, op, f"{name}[{i}]")
        for i, v in enumerate(tensors(values, op, name))
    ]


def int64_list(values: Any, op: str, name: str) -> list[Tensor]:
    """A list of `int64`."""
    return [
        v if isinstance(v, Tensor) and v.dtype is torch.int64 else int64(v, op, f"{name}[{i}]")
        for i, v in enumerate(tensors(values, op, name))
    ]


def vector_list(values: Any, op: str, name: str) -> list[Tensor]:
    """A list of `vector`."""
    return [
        v if isinstance(v, Tensor) and v.dtype is torch.int64 and v.dim() == 1 else vector(v, op, f"{name}[{i}]")
        for i, v in enumerate(tensors(values, op, name))
    ]


def integer_list(values: Any, op: str, name: str) -> list[Tensor]:
    """A list of `integers`."""
    return [
        v if isinstance(v, Tensor) and v.dtype is torch.int32 else integers(v, op, f"{name}[{i}]")
        for i, v in enumerate(tensors(values, op, name))
    ]


def ragged(value: Any, op: str, name: str) -> Ragged:
    """A `Ragged` of int64; nested lists are converted."""
    if not isinstance(value, Ragged):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{op}: {name} must be a shoal.Ragged, got {type(value).__name__}")
        value = Ragged.from_lists(value)
    if isinstance(value.values, Ragged):
        raise ConfigError(f"{op}: {name} must have one ragged dimension, got two")
    values = int64(value.values, op, name)
    return value if values is value.values else Ragged(values, value.row_splits)


def check_same(op: str, what: str, got: int, rule: str, wanted: int) -> None:
    """Raise ``op: what is got, but rule is wanted`` unless the sizes agree."""
    if got != wanted:
        raise ConfigError(f"{op}: {what} is {got}, but {rule} is {wanted}")
