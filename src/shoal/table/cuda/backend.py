"""Where GPU tables run: a CUDA device, or Triton's interpreter on the CPU for tests."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from shoal.errors import ConfigError, UnsupportedError
from shoal.switches import other_program_switch


@cache
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (``TRITON_INTERPRET=1`` before the first import)."""
    return other_program_switch("TRITON_INTERPRET")


def as_device(device: Any, name: str) -> torch.device:
    """The device of a table created with ``device``."""
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"table {name!r}: device must be 'cpu' or 'cuda', got {device!r}") from error
    if asked.type != "cuda":
        raise ConfigError(f"table {name!r}: device must be 'cpu' or 'cuda', got {device!r}")
    if interpreted():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnsupportedError(f"table {name!r}: device={device!r} needs a CUDA GPU, but torch finds none")
    return torch.device("cuda", torch.cuda.current_device() if asked.index is None else asked.index)


def capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
