"""The environment variables of the byteps profile, which ``bps_init`` sets before communication starts."""

import logging
import os
from collections.abc import Callable
from typing import NamedTuple

from shoal.comm.launch.launch_env import LAUNCHER, env_int, launcher_int, uses_gdr
from shoal.errors import ConfigError

logger = logging.getLogger(__name__)

ALL_NICS = "mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,eth0,eth1,eth2,eth3"


class _Place(NamedTuple):
    rank: int
    size: int
    local_size: int
    launcher_local_rank: int
    """-1 if the launcher does not say."""
    binding: bool


def _place() -> _Place:
    """What other variables say of this process; raises before any variable is written."""
    values = {}
    for quantity in ("rank", "size"):
        value = launcher_int(quantity)
        if value is None:
            raise RuntimeError(
                f"bps_init: neither {LAUNCHER[quantity][0]} nor {LAUNCHER[quantity][1]} is set; start the ranks with "
                "mpirun or torchrun"
            )
        values[quantity] = value
    local_size = launcher_int("local_size")
    local_size = env_int("BYTEPS_LOCAL_SIZE", 1 if local_size is None else local_size)
    if local_size < 1 or values["size"] < 1:
        raise ConfigError(f"bps_init: local size and size must be at least 1, got {local_size} and {values['size']}")
    own, binding = env_int("OMPI_COMM_WORLD_LOCAL_RANK", -1), env_int("BYTEPS_GPU_NIC_BINDING_MODE", 0) != 0
    return _Place(values["rank"], values["size"], local_size, own, binding)


def prepare(uuid: str, find_address: Callable[[str], str]) -> None:
    """Set this process's BytePS variables: roles, interfaces, RDMA and sockets."""
    place = _place()
    env = os.environ
    env.setdefault("BYTEPS_ALLTOALL_SESSION_SIZE", "3")
    env.setdefault("BYTEPS_LOCAL_SIZE", str(place.local_size))
    local_rank, node = place.rank % place.local_size, place.rank // place.local_size
    if place.launcher_local_rank not in (-1, local_rank):
        logger.warning(
            "rank %d should have local rank %d under block placement, but the launcher says %d; using the launcher's "
            "value (place ranks with --map-by ppr:%d:node)",
            place.rank,
            local_rank,
            place.launcher_local_rank,
            place.local_size,
        )
        local_rank = place.launcher_local_rank
    socket_path = f"/tmp/bps_{uuid}_socket_{node}"
    os.makedirs(socket_path, exist_ok=True)
    gdr = uses_gdr()
    interface = _bind_nic(local_rank, gdr) if place.binding else env.get("DMLC_INTERFACE", "eth0")
    address = find_address(interface)
    if not address:
        logger.warning("interface %s has no IPv4 address; DMLC_NODE_HOST is left empty", interface)
    written = {
        "UCX_RDMA_CM_SOURCE_ADDRESS": address,
        "DMLC_NODE_HOST": address,
        "DMLC_ROLE": "joint",
        "DMLC_WORKER_ID": place.rank,
        "DMLC_NUM_WORKER": place.size,
        "DMLC_NUM_SERVER": place.size,
        "BYTEPS_UUID": uuid,
        "BYTEPS_LOCAL_RANK": local_rank,
        "BYTEPS_SOCKET_PATH": socket_path,
        "BYTEPS_FORCE_DISTRIBUTED": 1,
        "BYTEPS_UCX_FORCE_REQ_ORDER": 1,
    }
    defaults = {
        "PSLITE_UCX_TLS": "rc_x,tcp,self,cuda",
        "DMLC_ENABLE_UCX": 1,
        "BYTEPS_OMP_THREAD_PER_GPU": 1,
        "BYTEPS_TELEMETRY_ON": 0,
        "BYTEPS_LOG_LEVEL": "info",
        "BYTEPS_SERVER_DIRECT_RESPONSE": 2,
        "BYTEPS_KEY_HASH_FN": "djb2-colocate",
        "BYTEPS_UCX_SHORT_THRESH": 0,
        "PSLITE_UCX_RNDV_THRESH": 8192,
        "BYTEPS_WORKER_LOCAL_ROOT": -1,
        "BYTEPS_P2P_PARTITION_BYTES": int(524288000 / place.size),
        "BYTEPS_PARTITION_BYTES": 1024000 if place.size < 128 else 512000,
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }
    if place.binding:
        devices = (name.partition(":")[0] for name in env["UCX_NET_DEVICES"].split(","))
        defaults["NCCL_IB_HCA"] = ",".join(name for name in devices if not name.startswith("eth"))
        if gdr:
            defaults["NCCL_NET_GDR_LEVEL"] = "SYS"
    env.update({name: str(value) for name, value in written.items()})
    for name, value in defaults.items():
        env.setdefault(name, str(value))


def _bind_nic(local_rank: int, gdr: bool) -> str:
    """Select the network card of this rank's GPU; two GPUs share one. Returns its interface, ``eth<n>``."""
    env, nic = os.environ, local_rank // 2
    env.setdefault("BYTEPS_USE_GDR_ALLREDUCE", "1")
    env["UCX_NET_DEVICES"] = ALL_NICS if env.get("BYTEPS_WITH_ALL_NICS") == "1" else f"mlx5_{nic}:1"
    if gdr:
        env["CUDA_VISIBLE_DEVICES"] = str(local_rank)
        env["BYTEPS_PIN_MEMORY"] = "1"
        env.setdefault("BYTEPS_PIN_MEMORY_CPU", "1")
        env["DMLC_NUM_CPU_DEV"] = "0"
        env["DMLC_NUM_GPU_DEV"] = "1"
        logger.info("BYTEPS_NUMA_ID is %s", env.get("BYTEPS_NUMA_ID", "not set"))
    return f"eth{nic}"


def interface_ipv4(name: str) -> str:
    """The first IPv4 address of an interface, from the OS; "" if it has none."""
    import fcntl
    import socket
    import struct

    if not 0 < len(name.encode()) < 16:  # the kernel's limit; a longer name would be truncated
        return ""
    request = struct.pack("256s", name.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
