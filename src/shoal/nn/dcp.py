"""Models with tables from checkpoints of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.nn.module import TableModule


def load_dcp(model: nn.Module, checkpoint_id: str | os.PathLike[str], *, prefix: str = "") -> nn.Module:
    """Loads what ``dcp.save(model.state_dict(), checkpoint_id=...)`` wrote into a model whose tables may be empty.

    ``dcp.load`` fills tensors in place and refuses those of another size, and a table's tensors have as many rows as it
    holds. Here they are made in the sizes that were saved, and all rows are replaced.

    Args:
        prefix: what the keys begin with, ``"model."`` for ``dcp.save({"model": model.state_dict()})``.

    Raises:
        ConfigError: the checkpoint does not hold all tensors of the model; nothing was changed.
    """
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(os.fspath(checkpoint_id))
    saved = reader.read_metadata().state_dict_metadata
    rows = {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if isinstance(module, TableModule)
        for key in module.state_names()
    }
    state: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        if prefix + key not in saved:
            raise ConfigError(
                f"{os.fspath(checkpoint_id)} has no {prefix + key!r}; its keys begin with {_begin(saved)}"
            )
        found: Any = saved[prefix + key]
        if key in rows:
            value = torch.empty(found.size, dtype=found.properties.dtype, device="cpu")
        state[prefix + key] = value
    dcp.load(state, storage_reader=reader)
    model.load_state_dict({key.removeprefix(prefix): value for key, value in state.items()})
    return model


def _begin(saved: dict[str, Any]) -> str:
    return ", ".join(repr(key) for key in sorted(saved)[:3]) or "nothing"
