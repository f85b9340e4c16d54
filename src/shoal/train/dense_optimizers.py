"""The optimizers of a model's dense part: torch's own, without the import of its compiler.

Methods of torch's optimizers begin with an import of ``torch._dynamo``, to tell it not to look into them. That takes a
third of a trainer's start (2 s of CPU time) and 130 MB in each, and these optimizers are not compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

_METHODS = ("step", "add_param_group", "zero_grad", "state_dict", "load_state_dict")


def _plain(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same optimizer, whose methods are called as they were written."""
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
