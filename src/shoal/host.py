"""Tensors from what users give, whatever torch's default device is."""

from typing import Any

import torch
from torch import Tensor


def as_tensor(given: Any) -> Tensor:
    """A tensor as it is, anything else on the CPU; ``torch.as_tensor`` moves even tensors to the default device."""
    return given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
