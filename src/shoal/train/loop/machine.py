"""The resources of a run's machine: memory, threads, the device."""

from __future__ import annotations

import os

import torch

from shoal import _core
from shoal.errors import ConfigError
from shoal.train.loop.config import Config


def resident_bytes() -> int:
    """Memory of this process in bytes; 0 if unknown."""
    try:
        with open("/proc/self/statm") as file:
            import resource

            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ImportError):
        return 0


def fair_threads() -> int | None:
    """Threads per rank when several ranks share this machine's CPUs; None keeps torch's default."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks < 2 or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, _core.num_threads() // ranks)


def find_table_device(config: Config, dense: torch.device) -> str:
    """The device of this process's rows: the CPU, the GPU of the dense part if it has one, else this rank's GPU."""
    if config.table.device == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError('[table] device is "cuda", but torch finds no GPU here')
    if dense.type == "cuda":
        return f"cuda:{dense.index or 0}"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def find_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"[train] device must be cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("[train] device is cuda, but torch finds no GPU here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"[train] device is {name}, but torch finds {torch.cuda.device_count()} GPUs here")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"[train] device must be cpu, cuda or cuda:N, got {name!r}")
    return device
