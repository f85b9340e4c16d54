"""The lookup ops in plain torch."""

import torch
from torch import Tensor

from shoal.errors import ConfigError


def id_places(ids: list[Tensor], input: Tensor) -> Tensor:
    """Where each id of ``input`` first occurs in the concatenated ``ids``."""
    if input.numel() == 0:
        return torch.empty_like(input)
    table = torch.cat(ids)
    order = table.argsort(stable=True)
    at = torch.searchsorted(table[order], input.contiguous())
    known = torch.cat([table[order], input.new_zeros(1)])[at] == input
    known &= at < table.shape[0]
    if not bool(known.all()):
        raise ConfigError(f"id {int(input[~known].flatten()[0])} of input is not among ids")
    return order[at]


def map_id_to_embedding(
    ids: list[Tensor], embeddings: list[Tensor], input: Tensor, multi_threads: bool
) -> tuple[Tensor, Tensor]:
    place = id_places(ids, input)
    rows = torch.cat(embeddings).index_select(0, place.flatten())
    return rows.view(*input.shape, embeddings[0].shape[1]), place
