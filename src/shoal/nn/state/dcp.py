"""Models with tables from checkpoints of ``torch.distributed.checkpoint``, of which each rank reads what it needs."""

from __future__ import annotations

import os
import warnings
from typing import Any

from torch import nn

from shoal.errors import ConfigError
from shoal.nn.state.table_state import OPTIONAL
from shoal.nn.state.tensor import TableTensor
from shoal.table.checkpoint.tensors import KEPT

_LATER = ("rows", "state", "times", KEPT)


def load_dcp(model: nn.Module, checkpoint_id: str | os.PathLike[str], *, prefix: str = "") -> nn.Module:
    """Loads what ``dcp.save(model.state_dict(), checkpoint_id=...)`` wrote; all ranks call it together.

    ``dcp.load`` does the same, but every rank then reads all rows of a table and keeps its own. Here ids are read
    first, and then only the blocks that have rows of this rank: of a checkpoint of any number of ranks most often a
    rank's share.

    Args:
        prefix: what the keys begin with, ``"model."`` for ``dcp.save({"model": model.state_dict()})``.

    Raises:
        ConfigError: the checkpoint does not hold all tensors of the model; nothing was changed.
    """
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(os.fspath(checkpoint_id))
    saved = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        if prefix + key in saved:
            state[prefix + key] = value
        elif not (isinstance(value, TableTensor) and value.name in OPTIONAL):
            begin = ", ".join(repr(key) for key in sorted(saved)[:3]) or "nothing"
            raise ConfigError(f"{os.fspath(checkpoint_id)} has no {prefix + key!r}; its keys begin with {begin}")
        if isinstance(value, TableTensor) and value.name == "ids" and KEPT in value.table_state.local:
            kept = prefix + key.removesuffix("ids") + KEPT  # of a table without rows it is not there yet
            state |= {kept: TableTensor(value.table_state, KEPT)} if kept in saved else {}
    later = {key: value for key, value in state.items() if isinstance(value, TableTensor) and value.name in _LATER}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process, which is what is meant
        for part in ({key: value for key, value in state.items() if key not in later}, later):
            if part:
                dcp.load(part, storage_reader=reader)
                state |= part
    model.load_state_dict({key.removeprefix(prefix): value for key, value in state.items()})
    return model
