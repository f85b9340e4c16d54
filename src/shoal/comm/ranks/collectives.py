"""torch's process groups and their collectives: the one module of the library that calls `torch.distributed` for them.

Ranks are those of the group (the default group where it is None), never those of the world. ``later=True`` starts a
collective and returns its handle, whose ``wait(timeout)`` ends it.
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
"""What a communication hook of ``DistributedDataParallel`` gets."""
Op = Literal["sum", "min", "max"]

# Under the names that torch has given them since 2.13, whichever torch this is.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- groups -----------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Whether this torch was built with process groups."""
    return dist.is_available()


def missing_backends(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of ``names`` that this torch lacks, and the backends that it has."""
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
    """Whether torch raised ``error`` because another process went away or could not be reached."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def start(backend: str = "gloo", **options: Any) -> None:
    """Makes the default group, with the options of ``init_process_group``.

    Under ``torchrun`` the ranks agree on a part of the launcher's store for this start alone: after a restart it holds
    what the ranks before left there.
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
    """Ends the default group."""
    dist.destroy_process_group()


def group_of(group: Group = None) -> Any:
    """The group itself; None where the default one was not started."""
    return dist.group.WORLD if group is None else group


def rank_in(group: Group = None) -> int:
    return dist.get_rank(group)


def size_of(group: Group = None) -> int:
    return dist.get_world_size(group)


def members(group: Group = None) -> list[int]:
    """The ranks of the world that are in the group, by their rank in it."""
    return dist.get_process_group_ranks(group_of(group))


def backend_of(group: Group = None) -> str:
    """The name of the group's backend, such as ``gloo``."""
    return dist.get_backend(group)


def backends(group: Group = None) -> str:
    """What carries the tensors of each device, such as ``cpu:gloo,cuda:nccl``."""
    return str(dist.get_backend_config(group))


def gloo_group(ranks: Sequence[int] | None = None, timeout: timedelta | None = None) -> Any:
    """A gloo group of some ranks of the world, who all call this; of all ranks unless given."""
    if ranks is None:
        return dist.new_group(backend="gloo")
    return dist.new_group(list(ranks), backend="gloo", timeout=timeout, use_local_synchronization=True)


def group_like(group: Group = None, timeout: timedelta | None = None) -> Any:
    """Another group of the same ranks with the same backends; all of them call this."""
    return dist.new_group(members(group), backend=backends(group), timeout=timeout, use_local_synchronization=True)


def store_of() -> Any:
    """The store through which the default group was made."""
    return dist.distributed_c10d._get_default_store()


def watch_store(group: Any) -> Any:
    """The part of a group's store in which ranks say who is alive; None for a backend without a store, as MPI's."""
    try:
        return part_of(group.get_group_store(), "shoal.watch")
    except (RuntimeError, AttributeError):
        return None


def another_connection(group: Any) -> Any:
    """The store of a group over a connection of its own; None where it has no store, or cannot be had again."""
    try:
        return part_of(group.get_group_store().clone(), "shoal.pulse")
    except (RuntimeError, AttributeError):
        return None


def part_of(store: Any, prefix: str) -> Any:
    """The keys of a store that start with a prefix."""
    return dist.PrefixStore(prefix, store)


def local_store() -> Any:
    """A store in this process alone."""
    return dist.HashStore()


def tcp_store(port: int = 0, timeout: timedelta | None = None) -> Any:
    """A store for processes of this machine: a new one, on a free port, or with ``port`` the one that is there."""
    if port:
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout or timedelta(minutes=5))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)  # torch's own is open to other machines
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )


# --- collectives ------------------------------------------------------------------------------------------------------


def all_reduce(tensor: Tensor, op: Op = "sum", group: Group = None, *, later: bool = False) -> Any:
    """In place."""
    return dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), group=group, async_op=later)


def broadcast(tensor: Tensor, root: int, group: Group = None, *, later: bool = False) -> Any:
    """In place, from rank ``root`` of the group."""
    return dist.broadcast(tensor, group=group_of(group), group_src=root, async_op=later)


def gather(parts: list[Tensor] | None, tensor: Tensor, root: int, group: Group = None, *, later: bool = False) -> Any:
    """Every rank's tensor into ``parts`` of rank ``root`` of the group; the others give None."""
    return dist.gather(tensor, parts, group=group_of(group), group_dst=root, async_op=later)


def all_to_all(
    out: Tensor,
    flat: Tensor,
    recv: Sequence[int] | None = None,
    send: Sequence[int] | None = None,
    group: Group = None,
    *,
    later: bool = False,
) -> Any:
    """``send[r]`` rows of ``flat`` to rank ``r`` and ``recv[r]`` of its rows to ``out``; equal shares unless given."""
    sizes = (None if counts is None else list(counts) for counts in (recv, send))
    return dist.all_to_all_single(out, flat, *sizes, group=group, async_op=later)


def send(tensor: Tensor, to: int, group: Group = None) -> Any:
    """Starts to send to a rank of the group."""
    return dist.isend(tensor, group=group_of(group), group_dst=to)


def recv(tensor: Tensor, source: int, group: Group = None) -> Any:
    """Starts to receive from a rank of the group."""
    return dist.irecv(tensor, group=group_of(group), group_src=source)


def barrier(group: Group = None) -> None:
    dist.barrier(group)


# --- hooks of DistributedDataParallel ---------------------------------------------------------------------------------


def torch_hooks() -> tuple[Any, Any]:
    """torch's modules of communication hooks: ``default_hooks`` and ``powerSGD_hook``."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    return default_hooks, powerSGD_hook
