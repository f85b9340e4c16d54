"""All uses of ``torch.distributed.checkpoint``: its descriptions of pieces of tensors, and its reader."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch

Offsets = Iterable[int]
Sizes = Iterable[int]


def write_items(fqn: str, dtype: torch.dtype, size: Sizes, pieces: Iterable[tuple[Offsets, Sizes]]) -> list[Any]:
    """Return a planner's items that write the given pieces of tensor ``fqn``."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties, items = TensorProperties(dtype=dtype), []
    for chunk in chunk_list(pieces):
        data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(size))
        index = MetadataIndex(fqn, chunk.offsets)
        items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    return items


def chunk_list(pieces: Iterable[tuple[Offsets, Sizes]]) -> list[Any]:
    """Return the pieces as a planner's list of chunks."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(size)) for at, size in pieces]


class Reader:
    """A checkpoint in a folder that ``torch.distributed.checkpoint.save`` wrote."""

    def __init__(self, checkpoint_id: str | os.PathLike[str]) -> None:
        import torch.distributed.checkpoint as dcp

        self._reader = dcp.FileSystemReader(os.fspath(checkpoint_id))

    def names(self) -> set[str]:
        return set(self._reader.read_metadata().state_dict_metadata)

    def fill(self, state: dict[str, Any]) -> None:
        """Load the values of ``state``; with several ranks, all of them call it together."""
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # expected with a single process
            dcp.load(state, storage_reader=self._reader)
