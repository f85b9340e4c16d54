"""A training process's settings for torch: GPU memory, visible device, threads."""

import logging
from dataclasses import dataclass, field

import torch

from shoal.errors import ConfigError

logger = logging.getLogger(__name__)

PIN_STAGING = False  # pin host tensors that are copied to a GPU


@dataclass
class GPUOptions:
    """A process's GPU settings."""

    allow_growth: bool = False
    per_process_gpu_memory_fraction: float = 0.0
    visible_device_list: str = ""
    force_gpu_compatible: bool = False


@dataclass
class SessionConfig:
    """GPU options and thread counts (0: torch's own choice) of a training process."""

    gpu_options: GPUOptions = field(default_factory=GPUOptions)
    intra_op_parallelism_threads: int = 0
    inter_op_parallelism_threads: int = 0
    allow_soft_placement: bool = False


def apply_session_config(cfg: SessionConfig) -> None:
    """Apply ``cfg`` to torch; without CUDA only the thread counts apply.

    The device is the listed number, or 0 if only one device is visible because the launcher selected it already.
    """
    global PIN_STAGING
    if cfg.intra_op_parallelism_threads > 0:
        torch.set_num_threads(cfg.intra_op_parallelism_threads)
    if cfg.inter_op_parallelism_threads > 0 and torch.get_num_interop_threads() != cfg.inter_op_parallelism_threads:
        try:
            torch.set_num_interop_threads(cfg.inter_op_parallelism_threads)
        except RuntimeError as error:  # torch allows it once, before any parallel work
            logger.warning("inter_op_parallelism_threads=%d was not set: %s", cfg.inter_op_parallelism_threads, error)
    if not torch.cuda.is_available():
        return
    gpu = cfg.gpu_options
    PIN_STAGING = gpu.force_gpu_compatible
    device = device_index(gpu.visible_device_list, torch.cuda.device_count())
    if device is not None:
        torch.cuda.set_device(device)
    fraction = gpu.per_process_gpu_memory_fraction
    if fraction > 0:
        torch.cuda.set_per_process_memory_fraction(fraction)
        if not gpu.allow_growth:
            free, total = torch.cuda.mem_get_info()
            wanted = int(total * fraction) - torch.cuda.memory_reserved()
            if 0 < wanted <= free:
                torch.empty(wanted, dtype=torch.uint8, device="cuda")  # freed at once, kept by the caching allocator


def device_index(visible_device_list: str, count: int) -> int | None:
    """The index, among ``count`` visible devices, of the listed device; None if the list is empty."""
    text = visible_device_list.split(",")[0].strip()
    if not text:
        return None
    try:
        index = int(text)
    except ValueError:
        raise ConfigError(f"visible_device_list must be a device's number, got {visible_device_list!r}") from None
    if 0 <= index < count:
        return index
    if count == 1:
        return 0
    raise ConfigError(
        f"visible_device_list names device {index}, but this process sees only {count}; check CUDA_VISIBLE_DEVICES"
    )
