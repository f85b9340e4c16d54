"""Exchange of small values (flags, steps) between ranks, on the CPU through gloo, with a deadline."""

from typing import Any

import torch

from shoal.comm.ranks import collectives
from shoal.comm.ranks.ranks import Ranks
from shoal.comm.ranks.torch_ranks import default_ranks

_group: Any = None
_group_of: Any = None


def world_size() -> int:
    """The number of ranks in the default process group; 1 if there is none."""
    return collectives.size_of() if collectives.is_started() else 1


def rank() -> int:
    return collectives.rank_in() if world_size() > 1 else 0


def _gloo() -> Ranks:
    """The default group if it uses gloo, else an additional gloo group, which all ranks make in their first call."""
    global _group, _group_of
    default: Any = collectives.group_of()
    if any(t.type == "cpu" for t in default._device_types):
        return default_ranks()
    if _group_of is not default:
        _group, _group_of = collectives.gloo_group(), default
    return default_ranks(_group)


def broadcast_ints(values: list[int], timeout_s: float | None = None) -> list[int]:
    """Rank 0's values, on every rank, within ``timeout_s`` (default: the group's timeout)."""
    if world_size() == 1:
        return values
    data = torch.tensor(values, dtype=torch.int64, device="cpu")
    _gloo().start_broadcast(data, 0).wait(timeout_s)
    return data.tolist()


def gather_ints(values: list[int]) -> list[list[int]]:
    """Every rank's values, by rank."""
    if world_size() == 1:
        return [values]
    mine = torch.tensor(values, dtype=torch.int64, device="cpu")
    everyone = torch.empty(world_size() * len(values), dtype=torch.int64, device="cpu")
    _gloo().start_gather(everyone, mine).wait()
    return everyone.reshape(world_size(), -1).tolist()
