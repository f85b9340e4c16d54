"""Device strings: parsing them, the devices that are allowed, and the functions that place ops."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shoal.comm.launch.launch_env import is_mpi_mode
from shoal.errors import ConfigError, ContractError

__all__ = [
    "default_device_fn",
    "device_rule",
    "disable_gpu_training",
    "enable_gpu_training",
    "get_device_fn",
    "get_visible_gpus",
    "input_device_fn",
    "is_gpu_training",
    "maybe_device_if_allowed",
    "model_device_fn",
    "serving_input_device_fn",
    "within_placement_context_of",
]

_GPU_PLACEMENT_ALLOWED = False

CPU = "/device:CPU:0"
VARIABLE_TYPES = frozenset({"Variable", "VariableV2", "AutoReloadVariable", "VarHandleOp"})
_PARTS = ("job", "replica", "task", "device")
_contexts = threading.local()


def enable_gpu_training() -> None:
    """Allow ops on GPUs."""
    global _GPU_PLACEMENT_ALLOWED
    _GPU_PLACEMENT_ALLOWED = True


def disable_gpu_training() -> None:
    """Keep ops off GPUs."""
    global _GPU_PLACEMENT_ALLOWED
    _GPU_PLACEMENT_ALLOWED = False


def is_gpu_training() -> bool:
    return _GPU_PLACEMENT_ALLOWED


def get_visible_gpus(local_rank: int, processes_per_gpu: int = 1) -> str:
    """A local rank's GPU number, as text, if ``processes_per_gpu`` ranks share each GPU."""
    is_int = isinstance(processes_per_gpu, int) and not isinstance(processes_per_gpu, bool)
    if not is_int or processes_per_gpu < 1:
        raise ContractError(f"processes_per_gpu must be an int of at least 1, got {processes_per_gpu!r}")
    return str(local_rank // processes_per_gpu)


# Device strings


def parse_device(name: str) -> dict[str, str]:
    """The parts of a device string: ``job``, ``replica``, ``task`` and ``device`` (as ``GPU:1``)."""
    parts: dict[str, str] = {}
    for piece in filter(None, name.split("/")):
        key, _, value = piece.partition(":")
        if key in ("job", "replica", "task"):
            parts[key] = value
        elif key == "device":
            kind, _, index = value.partition(":")
            parts["device"] = f"{kind.upper()}:{index}" if index else kind.upper()
        elif key.upper() in ("CPU", "GPU"):
            parts["device"] = f"{key.upper()}:{value}" if value else key.upper()
        else:
            raise ConfigError(
                f"device string {name!r}: {piece!r} must start with job, replica, task, device, CPU or GPU"
            )
    return parts


def format_device(parts: dict[str, str]) -> str:
    return "".join(f"/{key}:{parts[key]}" for key in _PARTS if key in parts)


def merge_devices(outer: str, inner: str) -> str:
    """``outer``, with the parts that ``inner`` sets replaced."""
    return format_device({**parse_device(outer), **parse_device(inner)})


def to_torch_device(s: str) -> torch.device:
    """``…/device:GPU:k`` is ``cuda:k``, ``…/device:CPU:k`` is ``cpu``; no device is the current default. Job and task
    are ignored."""
    device = parse_device(s).get("device", "")
    if not device:
        return torch.get_default_device()
    kind, _, index = device.partition(":")
    return torch.device("cuda", int(index or 0)) if kind == "GPU" else torch.device(kind.lower())


def device_rule(device_name: str) -> str:
    """The device for an op that asks for ``device_name``: a GPU only if GPUs are allowed."""
    if not device_name:
        return CPU
    parts = parse_device(device_name)
    device = parts.get("device", "")
    if not device or (device.startswith("GPU") and not _GPU_PLACEMENT_ALLOWED):
        return format_device({**parts, "device": "CPU:0"})
    return device_name


def current_device() -> str:
    """The merged device string of the enclosing contexts; "" outside of any."""
    return getattr(_contexts, "device", "")


@contextlib.contextmanager
def maybe_device_if_allowed(name: str) -> Iterator[str]:
    """Place the enclosed code by ``device_rule(name)``, merged over enclosing contexts, also for torch."""
    before = current_device()
    device = merge_devices(before, device_rule(name))
    _contexts.device = device
    try:
        target = to_torch_device(device)
        usable = target.type != "cuda" or torch.cuda.is_available()
        with target if usable else contextlib.nullcontext():
            yield device
    finally:
        _contexts.device = before


def within_placement_context_of(device_type: str) -> bool:
    """Whether the enclosing contexts place code on ``device_type`` (``"GPU"`` or ``"CPU"``)."""
    return parse_device(current_device()).get("device", "").partition(":")[0] == device_type.upper()


# Functions that place ops


def _flags() -> Any:
    from shoal.comm.horovod import distribution_utils

    return distribution_utils.FLAGS


def _rank() -> int:
    from shoal.comm.horovod import distribution_utils

    return distribution_utils.get_mpi_rank()


def default_device_type() -> str:
    return "GPU" if _flags().enable_gpu_training or _GPU_PLACEMENT_ALLOWED else "CPU"


def own_job(rank: int) -> str:
    """This rank's job: rank 0 is the chief, rank r is worker r - 1."""
    return "/job:chief/replica:0/task:0" if rank == 0 else f"/job:worker/replica:0/task:{rank - 1}"


def _device_of(op: Any) -> str:
    return (getattr(op, "device", "") or "") if op is not None else ""


def default_device_fn(op: Any) -> str:
    """Place string constants and summary writers on the CPU, all else by `device_rule`."""
    name = getattr(op, "name", "") or ""
    if _is_string_constant(op) or name.startswith("Write") or name.endswith("Summary"):
        return CPU
    return device_rule(_device_of(op))


def _is_string_constant(op: Any) -> bool:
    if getattr(op, "type", None) != "Const":
        return False
    dtype = getattr(op, "dtype", None)
    if dtype is str or dtype is bytes or getattr(dtype, "kind", "") in ("U", "S"):
        return True
    return str(getattr(dtype, "name", dtype)).lower() in ("string", "str", "bytes")


def get_device_fn(cluster: Any = None, task: Any = None) -> Callable[[Any], str] | None:
    """The function that places this process's ops; None leaves them where they are."""
    flags = _flags()
    if flags.enable_sync_training:
        if not is_mpi_mode():
            raise ContractError("synchronous training needs MPI mode: start the ranks with mpirun or torchrun")
        if flags.num_ps > 0:
            job = own_job(_rank())
            return lambda op: merge_devices(job, _device_of(op))
        return default_device_fn
    if flags.is_local or not cluster or not task:
        return None
    return _parameter_server_placement(flags.num_ps, task)


def _parameter_server_placement(num_ps: int, task: Any) -> Callable[[Any], str]:
    kind, index = (task["type"], task["index"]) if isinstance(task, dict) else (task.type, task.index)
    servers = itertools.cycle(range(num_ps)) if num_ps > 0 else None

    def place(op: Any) -> str:
        if servers is not None and getattr(op, "type", None) in VARIABLE_TYPES:
            return merge_devices(f"/job:ps/task:{next(servers)}", _device_of(op))
        return merge_devices(f"/job:{kind}/task:{index}", _device_of(op))

    return place


def input_device_fn(op: Any) -> str:
    """Keep input ops on this rank's CPU."""
    flags = _flags()
    if is_mpi_mode() and flags.enable_sync_training and flags.num_ps > 0:
        return own_job(_rank()) + CPU
    return CPU


def model_device_fn(op: Any) -> str:
    """The default device, with the parts that the op sets replaced."""
    return merge_devices(f"/device:{default_device_type()}:0", _device_of(op))


def serving_input_device_fn(op: Any) -> str:
    return _device_of(op) or CPU
