"""Benchmarks of the communication profiles, selected by environment variables or called by name."""

import logging
import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shoal.comm.horovod import hvd_lib
from shoal.comm.launch.launch_env import env_int

logger = logging.getLogger(__name__)

WINDOW = 20  # iterations per sample
KINDS = ("c2g", "g2g", "c2c", "g2c", "ar")


class A2aPlan(NamedTuple):
    """The sizes of one all-to-all benchmark, and the call that it measures."""

    total_len: int
    per_peer: int
    call: str
    name: str


def byteps_a2a_plan(total_len: int, size: int, dst_gpu: bool = True, src_gpu: bool = True) -> A2aPlan:
    """The plan for ``total_len`` floats over ``size`` ranks; CPU to CPU exchanges an eighth of them."""
    if not dst_gpu and not src_gpu:
        total_len //= 8
    if total_len % size:
        raise AssertionError(f"all-to-all of {total_len} floats cannot be cut into {size} equal parts")
    suffix = ("g" if src_gpu else "c") + "2" + ("g" if dst_gpu else "c")
    call = {"c2g": "alltoall_cpu2gpu", "g2c": "alltoall_gpu2cpu"}.get(suffix, "alltoall")
    return A2aPlan(total_len, total_len // size, call, f"data_len_{total_len}_{suffix}")


def _samples(
    operation: Callable[[], Any], total_len: int, total_niter: int, name: str, on_gpu: bool, note: str = ""
) -> list[float]:
    """Goodput in Gb/s per 20 iterations, without the first 20."""
    rank, size = hvd_lib.rank(), hvd_lib.size()
    print(f"rank {rank}/{size}: {name} starts", flush=True)
    goodputs = []
    began = time.perf_counter()
    for i in range(1, total_niter + 1):
        operation()
        if i % WINDOW:
            continue
        if on_gpu:
            torch.cuda.synchronize()
        latency_ms = (time.perf_counter() - began) / WINDOW * 1000
        goodput = total_len * 32 / latency_ms / 1e6 if latency_ms else math.inf
        goodputs.append(goodput)
        if rank == 0:
            print(f"{name}: iteration {i} latency {latency_ms:.3f} ms goodput {goodput:.3f} Gb/s{note}", flush=True)
        began = time.perf_counter()
    print(f"rank {rank}/{size}: {name} ends", flush=True)
    return goodputs[1:]


def _no_cuda(name: str) -> bool:
    if torch.cuda.is_available():
        return False
    logger.info("%s needs a GPU and there is none; nothing was measured", name)
    return True


def byteps_benchmark_ar(
    total_len: int, total_niter: int = 10000, use_cpu: bool = False, op: str = "pushpull"
) -> list[float]:
    """Goodput samples (Gb/s) of an all-reduce of ``total_len`` floats; ``op`` is used only in the name."""
    name = f"data_len_{total_len}_{op}_{'cpu' if use_cpu else 'gpu'}"
    if not use_cpu and _no_cuda(name):
        return []
    device = torch.device("cpu") if use_cpu else torch.device("cuda", torch.cuda.current_device())
    tensor = torch.full((total_len, 1), float(hvd_lib.rank() + 1), device=device)
    return _samples(
        lambda: hvd_lib.push_pull(tensor, average=True, name=name),
        total_len,
        total_niter,
        name,
        not use_cpu,
        f" cpu {use_cpu}",
    )


def byteps_benchmark_a2a(
    total_len: int, total_niter: int = 10000, dst_gpu: bool = True, src_gpu: bool = True
) -> list[float]:
    """Goodput samples (Gb/s) of an exchange of ``total_len`` floats between all ranks."""
    size = hvd_lib.size()
    plan = byteps_a2a_plan(total_len, size, dst_gpu, src_gpu)
    if (dst_gpu or src_gpu) and _no_cuda(plan.name):
        return []
    device = torch.device("cuda", torch.cuda.current_device()) if src_gpu else torch.device("cpu")
    tensor = torch.full((plan.total_len, 1), float(hvd_lib.rank() + 1), device=device)
    splits = [plan.per_peer] * size
    call = getattr(hvd_lib, plan.call)
    return _samples(
        lambda: call(tensor, splits, recv_splits=splits, name=plan.name),
        plan.total_len,
        total_niter,
        plan.name,
        dst_gpu or src_gpu,
    )


def bps_comm_benchmark() -> None:
    """Run the benchmarks named in ``MONOLITH_BENCHMARK_BPS`` and print a summary of each."""
    from shoal.comm.horovod import distribution_utils as replaceable

    kind = os.environ.get("MONOLITH_BENCHMARK_BPS", "none")
    if kind not in (*KINDS, "all"):
        raise AssertionError(f"MONOLITH_BENCHMARK_BPS must be one of {', '.join(KINDS)} or all, got {kind}")
    iterations = env_int("MONOLITH_BENCHMARK_ITERS", 200)
    for one in KINDS if kind == "all" else (kind,):
        summary = []
        if one == "ar":
            length = env_int("MONOLITH_BENCHMARK_BPS_AR_LEN", 65536000)
            for use_cpu in (True, False):
                summary.append((length, _mean(replaceable.byteps_benchmark_ar(length, iterations, use_cpu=use_cpu))))
        else:
            length = env_int("MONOLITH_BENCHMARK_BPS_A2A_LEN", 65536000)
            for _ in range(3):
                samples = replaceable.byteps_benchmark_a2a(
                    length, iterations, dst_gpu=one in ("c2g", "g2g"), src_gpu=one in ("g2c", "g2g")
                )
                summary.append((length, _mean(samples)))
                length //= 2
        print(f"{one}_summary: {summary}", flush=True)


def _mean(samples: list[float]) -> float:
    return sum(samples) / len(samples) if samples else math.nan
