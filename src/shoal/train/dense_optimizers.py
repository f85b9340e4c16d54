"""Optimizers for a model's dense part: torch's own, without importing its compiler.

Methods of torch's optimizers first import ``torch._dynamo``, to exclude themselves from compilation. That import takes
2 s of CPU time, a third of a trainer's start, and 130 MB per process; these optimizers are never compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

_METHODS = ("step", "add_param_group", "zero_grad", "state_dict", "load_state_dict")


def _plain(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same optimizer, with its methods unwrapped."""
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in _METHODS}
    methods["step"] = torch.no_grad()(methods["step"])
    return type(kind.__name__, (kind,), methods)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": _plain(torch.optim.Adam),
    "adamw": _plain(torch.optim.AdamW),
    "adagrad": _plain(torch.optim.Adagrad),
    "sgd": _plain(torch.optim.SGD),
}
"""By the name in ``[train] optimizer``."""
