"""The launch environment of synchronous training: ranks, start-up, hooks and devices.

Every function reads the environment and ``FLAGS`` when it is called. Without a launcher there is a single process:
rank 0, size 1, no hooks.
"""

import logging
import os
from typing import Any

import torch

from shoal.comm.horovod import bps_env, hvd_lib
from shoal.comm.horovod.bps_bench import (
    A2aPlan,
    bps_comm_benchmark,
    byteps_a2a_plan,
    byteps_benchmark_a2a,
    byteps_benchmark_ar,
)
from shoal.comm.horovod.hooks import BroadcastGlobalVariablesHook, ByteCCLTelemetryHook, RunContext, SessionRunHook
from shoal.comm.launch import device_utils, flags
from shoal.comm.launch.device_utils import to_torch_device
from shoal.comm.launch.flags import FLAGS
from shoal.comm.launch.launch_env import LAUNCHER, env_int, is_mpi_mode, is_one, launcher_int, uses_gdr
from shoal.comm.launch.session import GPUOptions, SessionConfig, apply_session_config
from shoal.comm.ranks.telemetry import TELEMETRY

logger = logging.getLogger(__name__)

__all__ = [
    "FLAGS",
    "A2aPlan",
    "BroadcastGlobalVariablesHook",
    "ByteCCLTelemetryHook",
    "GPUOptions",
    "RunContext",
    "SessionConfig",
    "SessionRunHook",
    "apply_session_config",
    "bps_comm_benchmark",
    "bps_init",
    "byteps_a2a_plan",
    "byteps_benchmark_a2a",
    "byteps_benchmark_ar",
    "enable_sync_training",
    "env_int",
    "get_device_str",
    "get_mpi_local_rank",
    "get_mpi_local_size",
    "get_mpi_rank",
    "get_mpi_size",
    "get_sync_run_hooks",
    "init_sync_train_and_update_conf",
    "is_mpi_mode",
    "reset_for_testing",
    "sync_train_inited",
    "to_torch_device",
    "try_init_cuda",
    "update_session_config_for_gpu",
]

_SYNC_TRAIN_INITED = False


def sync_train_inited() -> bool:
    """Whether this process has started communication."""
    return _SYNC_TRAIN_INITED


def reset_for_testing() -> None:
    """Reset the process-wide guards and all flags to their defaults; an existing process group stays."""
    global _SYNC_TRAIN_INITED
    _SYNC_TRAIN_INITED = False
    device_utils._GPU_PLACEMENT_ALLOWED = False
    flags.FLAGS.reset()
    hvd_lib._foreign = None
    hvd_lib._job_uuid = ""
    TELEMETRY.clear()


# Who this process is


def _launcher(quantity: str, function: str) -> int:
    value = launcher_int(quantity)
    if value is None:
        value = LAUNCHER[quantity][2]
        logger.warning("%s use default %s", function, value)
    return value


def get_mpi_rank() -> int:
    """This process's rank, from ``OMPI_COMM_WORLD_RANK`` or ``RANK``; 0, with a warning, when neither is set."""
    return _launcher("rank", "get_mpi_rank")


def get_mpi_local_rank() -> int:
    """This process's rank among the processes of this node."""
    return _launcher("local_rank", "get_mpi_local_rank")


def get_mpi_size() -> int:
    """The number of processes."""
    return _launcher("size", "get_mpi_size")


def get_mpi_local_size() -> int:
    """The number of processes on this node."""
    return _launcher("local_size", "get_mpi_local_size")


# Starting communication


def _interface_ipv4(name: str) -> str:
    """The first IPv4 address of an interface; "" if it has none. Replace it where the OS cannot be queried."""
    return bps_env.interface_ipv4(name)


def bps_init(uuid: str) -> None:
    """Set the variables of the byteps profile, then start communication.

    Raises:
        RuntimeError: the launcher gave no rank or size; no variable was set.
    """
    bps_env.prepare(uuid, _interface_ipv4)
    hvd_lib.init("byteps", lazy=False)


def init_sync_train_and_update_conf(dct_config: Any = None, *, conf: Any = None) -> None:
    """Start communication once and write this rank and the number of ranks into a configuration.

    A missing communication library is logged as a warning.

    Args:
        dct_config: an object with ``uuid``, ``model_dir`` and the fields that are written: ``num_ps``, ``index``,
            ``num_workers``, ``reorder_fids_in_data_pipeline`` and ``enable_variable_partition``.
        conf: another name for ``dct_config``.
    """
    global _SYNC_TRAIN_INITED
    if (dct_config is None) == (conf is None):
        raise TypeError("init_sync_train_and_update_conf must get one configuration, as dct_config")
    conf = dct_config if conf is None else conf
    logger.info("entering synchronous training")
    try:
        first = not _SYNC_TRAIN_INITED
        if first:
            hvd_lib._job_uuid = str(getattr(conf, "uuid", "") or "")
            if env_int("MONOLITH_WITH_BYTEPS", 0):
                bps_init(conf.uuid)
                with_horovod = not (
                    env_int("MONOLITH_WITH_BYTEPS_BCAST", 1) and env_int("MONOLITH_WITH_BYTEPS_ALLREDUCE", 1)
                )
            else:
                with_horovod = True
            if with_horovod:
                hvd_lib.init("horovod")
            _SYNC_TRAIN_INITED = True
        rank, size = hvd_lib.rank(), hvd_lib.size()
        if first and not getattr(conf, "merge_sync_training_ckpt", True):
            conf.model_dir = os.path.join(conf.model_dir, str(conf.uuid), f"index-{rank:04d}")
        conf.num_ps = 0
        conf.reorder_fids_in_data_pipeline = True
        conf.index = rank
        conf.num_workers = size
        conf.enable_variable_partition = False
    except ImportError as error:
        logger.warning("synchronous training has no communication library: %s", error)


def enable_sync_training() -> bool:
    """Whether ``--enable_sync_training`` is set and a launcher started this process."""
    try:
        return bool(FLAGS.enable_sync_training and is_mpi_mode())
    except Exception:
        return False


def try_init_cuda() -> None:
    """In MPI mode, select this rank's GPU and start the enabled profile. Call it before any CUDA call."""
    global _SYNC_TRAIN_INITED
    if not is_mpi_mode():
        return
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        if torch.cuda.is_initialized():
            logger.warning(
                "CUDA is already initialised, so CUDA_VISIBLE_DEVICES comes too late; call try_init_cuda first"
            )
        local_rank = get_mpi_local_rank()
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)
    try:
        if _SYNC_TRAIN_INITED or not FLAGS.enable_sync_training:
            return
        if env_int("MONOLITH_WITH_BYTEPS", 0):
            hvd_lib.init("byteps")
        elif env_int("MONOLITH_WITH_HOROVOD", 0):
            hvd_lib.init("horovod")
        else:
            logger.info("no all-reduce tool was found: neither MONOLITH_WITH_BYTEPS nor MONOLITH_WITH_HOROVOD is on")
            return
        _SYNC_TRAIN_INITED = True
    except Exception as error:
        logger.info("communication was not started: %s", error)


# Devices, hooks and session settings


def get_device_str(force_on_cpu: bool = False) -> str:
    """The default device of ops; "" leaves the choice to each op."""
    kind = "CPU" if force_on_cpu else device_utils.default_device_type()
    if not (is_mpi_mode() and FLAGS.enable_sync_training):
        return f"/device:{kind}:0"
    if FLAGS.num_ps > 0:
        return f"{device_utils.own_job(get_mpi_rank())}/device:{kind}:0"
    return ""


def get_sync_run_hooks(is_full_sync: bool = False) -> list[Any]:
    """New hooks: the start-up broadcast and, for full synchronous training on byteps, the telemetry."""
    if not enable_sync_training():
        return []
    backend = "horovod"
    if env_int("MONOLITH_WITH_BYTEPS", 0):
        broadcast_by = env_int("MONOLITH_WITH_BYTEPS_BCAST", 1)
        if broadcast_by == -1:
            return []
        backend = "byteps" if broadcast_by else "horovod"
    hooks: list[Any] = [hvd_lib.BroadcastGlobalVariablesHook(0, device=get_device_str(), backend=backend)]
    if backend == "byteps" and is_full_sync:
        hooks.append(ByteCCLTelemetryHook(50))
    return hooks


def update_session_config_for_gpu(session_config: SessionConfig) -> None:
    """Set this rank's GPU options; other fields keep their values."""
    gpu = session_config.gpu_options
    gpu.allow_growth = True
    if not enable_sync_training():
        return
    if env_int("MONOLITH_WITH_BYTEPS", 0) and uses_gdr():
        gpu.allow_growth = False  # the network has already pinned its memory
        gpu.per_process_gpu_memory_fraction = 0.4
    local_rank = os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK")
    gpu.visible_device_list = os.environ.get("LOCAL_RANK", "0") if local_rank is None else local_rank
    if is_one("MONOLITH_FORCE_GPU_COMPATIBLE") or "MONOLITH_FORCE_GPU_COMPATIBLE" not in os.environ:
        gpu.force_gpu_compatible = True
