"""torch's process groups and their collectives; the only module that calls `torch.distributed` for them.

Rank numbers are those within the group (None: the default group), never those of the world. ``later=True`` starts a
collective and returns its handle; ``wait(timeout)`` completes it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from shoal.comm.ranks.restarts.roster import meet

Group = Any
"""A ``torch.distributed.ProcessGroup``, or None for the default one."""
GradBucket = dist.GradBucket
"""The argument of a ``DistributedDataParallel`` communication hook."""
Op = Literal["sum", "min", "max"]

# Named as in torch 2.13 and later; earlier versions have other names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- groups -----------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Whether this torch was built with process groups."""
    return dist.is_available()


def missing_backends(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The backends in ``names`` that this torch does not have, and all that it has."""
    tests = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
        "xccl": dist.is_xccl_available,
    }
    known = {name.lower() for name in dist.Backend.backend_list}
    missing = [name for name in names if name not in known or not tests.get(name, lambda: True)()]
    return missing, [name for name, test in tests.items() if test()]


def is_started() -> bool:
    """Whether this process has a default group."""
    return dist.is_available() and dist.is_initialized()


def is_lost_connection(error: BaseException) -> bool:
    """Whether torch raised ``error`` because another process exited or could not be reached."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def start(backend: str = "gloo", **options: Any) -> None:
    """Start the default group, with the options of ``init_process_group``.

    Under ``torchrun`` the ranks agree on a new key prefix in the launcher's store for each start, because after a
    restart the store still holds the keys of the previous ranks.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and "store" not in options:
        method = options.get("init_method") or "env://"
        if method == "env://":
            options = _restartable(options)
    dist.init_process_group(backend, **options)


def _restartable(options: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in options.items() if name != "init_method"}
    timeout = options.get("timeout") or timedelta(minutes=30)
    rank, size = (int(options.get(name) or os.environ[variable]) for name, variable in
                  (("rank", "RANK"), ("world_size", "WORLD_SIZE")))  # fmt: skip
    store, rank, size = next(iter(dist.rendezvous("env://", rank, size, timeout=timeout)))
    store.set_timeout(timeout)
    name = meet(store, rank, size, timeout.total_seconds())
    return options | {"store": part_of(store, f"shoal.start/{name}"), "rank": rank, "world_size": size}


def stop() -> None:
    """End the default group."""
    dist.destroy_process_group()


def group_of(group: Group = None) -> Any:
    """The group itself; None if the default one was not started."""
    return dist.group.WORLD if group is None else group


def rank_in(group: Group = None) -> int:
    return dist.get_rank(group)


def size_of(group: Group = None) -> int:
    return dist.get_world_size(group)


def members(group: Group = None) -> list[int]:
    """The world ranks of the group's members, by their rank in the group."""
    return dist.get_process_group_ranks(group_of(group))


def backend_of(group: Group = None) -> str:
    """The name of the group's backend, such as ``gloo``."""
    return dist.get_backend(group)


def backends(group: Group = None) -> str:
    """The backend of each device type, such as ``cpu:gloo,cuda:nccl``."""
    return str(dist.get_backend_config(group))


def gloo_group(ranks: Sequence[int] | None = None, timeout: timedelta | None = None) -> Any:
    """A gloo group of some world ranks (default: all); each of them must call this."""
    if ranks is None:
        return dist.new_group(backend="gloo")
    return dist.new_group(list(ranks), backend="gloo", timeout=timeout, use_local_synchronization=True)


def group_like(group: Group = None, timeout: timedelta | None = None) -> Any:
    """A new group of the same ranks with the same backends; all of them must call this."""
    return dist.new_group(members(group), backend=backends(group), timeout=timeout, use_local_synchronization=True)


def store_of() -> Any:
    """The store of the default group."""
    return dist.distributed_c10d._get_default_store()


def watch_store(group: Any) -> Any:
    """The keys of a group's store in which ranks report that they are alive; None without a store (MPI)."""
    try:
        return part_of(group.get_group_store(), "shoal.watch")
    except (RuntimeError, AttributeError):
        return None


def another_connection(group: Any) -> Any:
    """A second connection to a group's store; None if there is no store, or it cannot be opened twice."""
    try:
        return part_of(group.get_group_store().clone(), "shoal.pulse")
    except (RuntimeError, AttributeError):
        return None


def part_of(store: Any, prefix: str) -> Any:
    """A view of a store's keys that start with ``prefix``."""
    return dist.PrefixStore(prefix, store)


def local_store() -> Any:
    """A store for this process only."""
    return dist.HashStore()


def tcp_store(port: int = 0, timeout: timedelta | None = None) -> Any:
    """A store for processes on this machine: a new one on a free port, or the existing one on ``port``."""
    if port:
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout or timedelta(minutes=5))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)  # torch would listen on all interfaces
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )


# --- collectives ------------------------------------------------------------------------------------------------------


def all_reduce(tensor: Tensor, op: Op = "sum", group: Group = None, *, later: bool = False) -> Any:
    """Reduce over the group's ranks, in place."""
    return dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), group=group, async_op=later)


def broadcast(tensor: Tensor, root: int, group: Group = None, *, later: bool = False) -> Any:
    """Broadcast from rank ``root`` of the group, in place."""
    return dist.broadcast(tensor, group=group_of(group), group_src=root, async_op=later)


def gather(parts: list[Tensor] | None, tensor: Tensor, root: int, group: Group = None, *, later: bool = False) -> Any:
    """Gather every rank's tensor into ``parts`` on rank ``root`` of the group; the others pass None."""
    return dist.gather(tensor, parts, group=group_of(group), group_dst=root, async_op=later)


def all_to_all(
    out: Tensor, flat: Tensor, recv: Sequence[int] | None = None, send: Sequence[int] | None = None, group: Group = None
) -> None:
    """Send ``send[r]`` rows of ``flat`` to rank ``r`` and receive ``recv[r]`` in ``out``; equal shares by default."""
    sizes = (None if counts is None else list(counts) for counts in (recv, send))
    dist.all_to_all_single(out, flat, *sizes, group=group)


def send(tensor: Tensor, to: int, group: Group = None) -> Any:
    """Start sending to a rank of the group."""
    return dist.isend(tensor, group=group_of(group), group_dst=to)


def recv(tensor: Tensor, source: int, group: Group = None) -> Any:
    """Start receiving from a rank of the group."""
    return dist.irecv(tensor, group=group_of(group), group_src=source)


def barrier(group: Group = None) -> None:
    dist.barrier(group)


# --- hooks of DistributedDataParallel ---------------------------------------------------------------------------------


def torch_hooks() -> tuple[Any, Any]:
    """torch's modules with communication hooks: ``default_hooks`` and ``powerSGD_hook``."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    return default_hooks, powerSGD_hook
