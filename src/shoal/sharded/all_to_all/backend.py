"""The communication backends of synchronous tables, under the names that `shoal.sharded` exports."""

from shoal.comm.ranks.ranks import AllToAll, SingleRank
from shoal.comm.ranks.torch_ranks import ProcessGroup, default_ranks

default_backend = default_ranks

__all__ = ["AllToAll", "ProcessGroup", "SingleRank", "default_backend"]
