"""Horovod's calls for the communication profiles ``byteps`` and ``horovod``, both on a torch process group.

Nothing starts before the first collective or ``init``. If the profile's own module can be imported, rank and size come
from it; torch computes the collectives in either case.
"""

import atexit
import importlib
import logging
import math
import os
import socket
import sys
import types
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.comm.launch.launch_env import env_int, is_one, launcher_value
from shoal.comm.ranks import collectives
from shoal.comm.ranks.buffers import flat_bytes
from shoal.comm.ranks.ranks import Ranks
from shoal.comm.ranks.telemetry import TELEMETRY
from shoal.comm.ranks.torch_ranks import default_ranks
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.comm.horovod.hooks import BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook

logger = logging.getLogger(__name__)

PROFILES = {"byteps": "byteps.torch", "horovod": "horovod.torch"}
TIMEOUT_S = 1800

_foreign: Any = None  # the profile's own module, once initialised
_warned: set[str] = set()
_job_uuid = ""
_kept: list[Ranks] = []
"""The `Ranks` of the last call, reused by the next one."""
atexit.register(_kept.clear)  # torch's groups must end before the interpreter does


class _Module(types.ModuleType):
    @property
    def enable_bps(self) -> bool:
        """Whether the byteps profile is enabled; read from the environment on each access."""
        return env_int("MONOLITH_WITH_BYTEPS", 0) != 0


sys.modules[__name__].__class__ = _Module


def __getattr__(name: str) -> Any:
    if name != "BroadcastGlobalVariablesHook":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shoal.comm.horovod import hooks  # it imports this module

    return hooks.BroadcastGlobalVariablesHook


def init(backend: str | None = None, lazy: bool = False) -> None:
    """Start the profile ``backend`` (None: byteps if enabled, else horovod); ``lazy`` defers it to the first use.

    Raises:
        ImportError: this torch was built without process groups.
    """
    global _foreign
    if backend is None:
        backend = "byteps" if env_int("MONOLITH_WITH_BYTEPS", 0) else "horovod"
    if backend not in PROFILES:
        raise ConfigError(f"hvd_lib.init: backend must be one of {', '.join(PROFILES)}, got {backend!r}")
    require()
    module = _profile_module(backend)
    if module is not None:
        module.init()
        _foreign = module
    if not lazy:
        start_group()


def require() -> None:
    if not collectives.is_available():
        raise ImportError("hvd_lib: this torch was built without process groups; install one that has them")


def _profile_module(profile: str) -> Any:
    try:
        module = importlib.import_module(PROFILES[profile])
        if callable(getattr(module, "init", None)):
            return module
    except ImportError:
        pass
    if profile not in _warned:
        _warned.add(profile)
        logger.warning("%s is not installed; the %s profile uses only torch", PROFILES[profile], profile)
    return None


def start_group() -> None:
    """Start the default process group unless it exists."""
    require()
    if collectives.is_started():
        return
    rank_, size_, local_size_ = rank(), size(), local_size()
    from shoal.comm.horovod.distribution_utils import FLAGS
    from shoal.comm.launch import device_utils

    on_gpu = torch.cuda.is_available() and (FLAGS.enable_gpu_training or device_utils.is_gpu_training())
    _hide_missing_interfaces()
    collectives.start(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        rank=rank_,
        world_size=size_,
        timeout=timedelta(seconds=TIMEOUT_S),
        **rendezvous(size_, local_size_),
    )
    logger.info("process group of %d ranks started on rank %d", size_, rank_)


def rendezvous(size_: int, local_size_: int) -> dict[str, Any]:
    """The arguments of ``init_process_group`` for this job's rendezvous."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address and port:
        return {"init_method": "env://"}
    if size_ == 1:
        return {"store": collectives.local_store()}
    if not address and local_size_ != size_:
        raise RuntimeError(
            f"MASTER_ADDR is not set and only {local_size_} of {size_} ranks are on this node; tell every rank where "
            "rank 0 is, as in: mpirun -x MASTER_ADDR=<host of rank 0> ..."
        )
    uuid = os.environ.get("BYTEPS_UUID") or _job_uuid or os.environ.get("PMIX_NAMESPACE", "")
    port = port or str(29500 + zlib.crc32(str(uuid).encode()) % 1000)
    return {"init_method": f"tcp://{address or '127.0.0.1'}:{port}"}


def _hide_missing_interfaces() -> None:
    """Hide interfaces that this host does not have (such as eth0 in many containers): gloo and NCCL fail on them.

    The variable is removed for native libraries only; ``os.environ`` keeps its value.
    """
    have = {name for _, name in socket.if_nameindex()}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        names = os.environ.get(variable, "")
        wanted = [n.strip().lstrip("=") for n in names.split(",") if n.strip()]
        if not wanted or names.startswith("^"):  # NCCL's syntax for excluded interfaces
            continue
        prefixes = variable.startswith("NCCL") and not names.startswith("=")
        if not any(n == h or (prefixes and h.startswith(n)) for n in wanted for h in have):
            logger.warning("%s=%s is not an interface of this host; the library chooses one", variable, names)
            os.unsetenv(variable)


def _ranks() -> Ranks:
    if not collectives.is_started():
        start_group()
    ranks = default_ranks()
    _kept[:] = [ranks]
    return ranks


def _who(quantity: str, ask: Any) -> int:
    if collectives.is_started() and ask is not None:
        return ask()
    if _foreign is not None and callable(getattr(_foreign, quantity, None)):
        return int(getattr(_foreign, quantity)())
    return launcher_value(quantity)


def rank() -> int:
    return _who("rank", collectives.rank_in)


def size() -> int:
    return _who("size", collectives.size_of)


def local_rank() -> int:
    return _who("local_rank", None)


def local_size() -> int:
    return _who("local_size", None)


def allgather(t: Tensor) -> Tensor:
    """Concatenate every rank's ``t`` along dim 0, in rank order; first dimensions may differ."""
    ranks = _ranks()
    t = t.detach() if t.ndim else t.detach().reshape(1)
    each = math.prod(t.shape[1:]) * t.element_size()
    with ranks.turn:
        rows = ranks.gather_totals(len(t))
        came = ranks.all_to_all(flat_bytes(t).repeat(ranks.world_size), [len(t) * each] * ranks.world_size,
                                [n * each for n in rows])  # fmt: skip
    return came.view(t.dtype).view(sum(rows), *t.shape[1:])


def broadcast(t: Tensor, root_rank: int) -> Tensor:
    """``root_rank``'s ``t``, in new memory."""
    ranks, t = _ranks(), t.detach()
    if not 0 <= root_rank < ranks.world_size:
        raise ConfigError(f"hvd_lib.broadcast: root_rank must be 0..{ranks.world_size - 1}, got {root_rank}")
    root = ranks.rank == root_rank
    if root and ranks.world_size == 1:
        return t.clone(memory_format=torch.contiguous_format)
    out = torch.empty_like(t, memory_format=torch.contiguous_format)
    wire = ranks.on_wire(flat_bytes(t.data if root else out))  # as bytes: no backend supports every dtype
    started = ranks.start_broadcast(wire, root_rank)
    if root:
        out.copy_(t)  # while it is sent
    started.wait()
    return out if root else wire.to(t.device).view(t.dtype).view(t.shape)


def allreduce(t: Tensor, average: bool = True) -> Tensor:
    """The mean (or the sum) over ranks, in new memory; a mean of integers rounds down."""
    return push_pull(t, average)


def push_pull(t: Tensor, average: bool = True, name: str | None = None) -> Tensor:
    """``allreduce`` under a name for telemetry."""
    ranks = _ranks()
    wide = torch.int32 if t.dtype == torch.int16 else t.dtype  # no backend supports int16
    out = ranks.on_wire(t.detach().to(wide, copy=True, memory_format=torch.contiguous_format))
    with TELEMETRY.timed(f"PushPull.{name or 'unnamed'}"):
        if ranks.world_size > 1:
            ranks.start_reduce(out).wait()
    if average:
        world, integral = size(), not (out.is_floating_point() or out.is_complex())
        out = out // world if integral else out.div_(torch.tensor(world, device=out.device))
    return out.to(t.device, t.dtype)


def push_pull_group(tensors: Sequence[Tensor], average: bool = True, name: str | None = None) -> list[Tensor]:
    """``push_pull`` many tensors, flattened by dtype into buckets of ``BYTEPS_PARTITION_BYTES`` (25 MiB)."""
    limit = env_int("BYTEPS_PARTITION_BYTES", 25 << 20)
    buckets: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for i, t in enumerate(tensors):
        bucket, used = filling.get((t.dtype, t.device), ([], 0))
        if not bucket or used + t.nbytes > limit:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(i)
        filling[t.dtype, t.device] = (bucket, used + t.nbytes)
    result: list[Tensor] = list(tensors)
    for number, bucket in enumerate(buckets):
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in bucket])
        flat = push_pull(flat, average, f"{name or 'group'}.{number}")
        for i, part in zip(bucket, flat.split([tensors[i].numel() for i in bucket]), strict=True):
            result[i] = part.view(tensors[i].shape)
    return result


def alltoall(t: Tensor, splits: Any, recv_splits: Any = None, name: str | None = None) -> Tensor:
    """Send ``splits[r]`` rows to rank ``r``; returns the received rows by rank. ``recv_splits`` saves an exchange."""
    ranks = _ranks()
    out_rows = _split_list(splits, "splits")
    given_rows = None if recv_splits is None else _split_list(recv_splits, "recv_splits")
    if sum(out_rows) != len(t):
        raise ConfigError(f"hvd_lib.alltoall: splits must add up to the {len(t)} rows of the tensor, got {out_rows}")
    _check_partition(t, out_rows, name)
    with TELEMETRY.timed(f"alltoall.{name or 'unnamed'}"):
        row_bytes = math.prod(t.shape[1:]) * t.element_size()
        with ranks.turn:
            one = [1] * ranks.world_size
            in_rows = (
                ranks.all_to_all(torch.tensor(out_rows, device="cpu"), one, one).tolist()
                if given_rows is None
                else given_rows
            )
            sent, received = ([n * row_bytes for n in rows] for rows in (out_rows, in_rows))
            came = ranks.all_to_all(flat_bytes(t.detach()), sent, received)
    return came.view(t.dtype).view(sum(in_rows), *t.shape[1:])


def _split_list(splits: Any, name: str) -> list[int]:
    rows = splits.tolist() if isinstance(splits, Tensor) else [int(n) for n in splits]
    if len(rows) != size() or min(rows) < 0:
        raise ConfigError(f"hvd_lib.alltoall: {name} must be one number >= 0 for each of {size()} ranks, got {rows}")
    return rows


def _check_partition(t: Tensor, rows: list[int], name: str | None) -> None:
    limit = env_int("BYTEPS_P2P_PARTITION_BYTES", 0)
    row_bytes = t.nbytes // len(t) if len(t) else 0
    most = max(rows, default=0) * row_bytes
    if limit and most > limit:
        logger.warning(
            "alltoall %s sends %d bytes to one peer, more than BYTEPS_P2P_PARTITION_BYTES=%d",
            name or "unnamed",
            most,
            limit,
        )


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def alltoall_cpu2gpu(t: Tensor, splits: Any, recv_splits: Any = None, name: str | None = None) -> Tensor:
    """Exchange rows from CPU to GPU: by gloo, then copied; with FWD_GDR=1 copied first, then by NCCL."""
    if is_one("MONOLITH_WITH_BYTEPS_FWD_GDR"):
        return alltoall(t.to(_device(), non_blocking=True), splits, recv_splits, name)
    return _staged(alltoall(t, splits, recv_splits, name)).to(_device(), non_blocking=True)


def alltoall_gpu2cpu(t: Tensor, splits: Any, recv_splits: Any = None, name: str | None = None) -> Tensor:
    """Exchange rows from GPU to CPU: copied first, then by gloo; with BWD_GDR=1 by NCCL, then copied."""
    if is_one("MONOLITH_WITH_BYTEPS_BWD_GDR"):
        return alltoall(t, splits, recv_splits, name).cpu()
    return alltoall(t.cpu(), splits, recv_splits, name)


def _staged(t: Tensor) -> Tensor:
    from shoal.comm.launch import session

    return t.pin_memory() if session.PIN_STAGING and torch.cuda.is_available() else t


def get_telemetry() -> list[tuple[str, float, float, int]]:
    """``(name, mean_ms, stdev_ms, count)`` of each operation timed while ``BYTEPS_TELEMETRY_ON`` is 1."""
    return TELEMETRY.rows()
