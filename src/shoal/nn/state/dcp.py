"""Load models with tables from ``torch.distributed.checkpoint``; each rank reads only the data that it needs."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from shoal.errors import ConfigError
from shoal.nn.state.table_state import OPTIONAL
from shoal.nn.state.tensor import TableTensor
from shoal.nn.state.torch_checkpoint import Reader
from shoal.table.checkpoint.tensors import KEPT

_LATER = ("rows", "state", "times", KEPT)


def load_dcp(model: nn.Module, checkpoint_id: str | os.PathLike[str], *, prefix: str = "") -> nn.Module:
    """Load a checkpoint written by ``dcp.save(model.state_dict(), checkpoint_id=...)``; all ranks call it together.

    ``dcp.load`` does the same, but there every rank reads all rows of a table and keeps its own. This function reads
    ids first, and then only the blocks that have rows of this rank: usually 1 / W of the rows on each of W ranks.

    Args:
        prefix: the beginning of the keys, ``"model."`` for ``dcp.save({"model": model.state_dict()})``.

    Raises:
        ConfigError: a tensor of the model is not in the checkpoint; nothing was changed.
    """
    reader = Reader(checkpoint_id)
    saved = reader.names()
    state: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        if prefix + key in saved:
            state[prefix + key] = value
        elif not (isinstance(value, TableTensor) and value.name in OPTIONAL):
            begin = ", ".join(repr(key) for key in sorted(saved)[:3]) or "nothing"
            raise ConfigError(f"{os.fspath(checkpoint_id)} has no {prefix + key!r}; its keys begin with {begin}")
        if isinstance(value, TableTensor) and value.name == "ids" and KEPT in value.table_state.local:
            kept = prefix + key.removesuffix("ids") + KEPT  # not in the state of a table without rows
            state |= {kept: TableTensor(value.table_state, KEPT)} if kept in saved else {}
    later = {key: value for key, value in state.items() if isinstance(value, TableTensor) and value.name in _LATER}
    for part in ({key: value for key, value in state.items() if key not in later}, later):
        if part:
            reader.fill(part)
            state |= part
    model.load_state_dict({key.removeprefix(prefix): value for key, value in state.items()})
    return model
