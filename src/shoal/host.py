"""What differs between machines: torch's default device, whether the CPU can multiply bfloat16 matrices, free ports."""

import socket
import subprocess
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UnsupportedError


def as_tensor(given: Any) -> Tensor:
    """Return a tensor unchanged, anything else as a CPU tensor. ``torch.as_tensor`` would use the default device."""
    return given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")


_MULTIPLY = "import torch; a = torch.ones(256, 64, dtype=torch.bfloat16); a @ a.t()"


@cache
def bfloat16_works() -> bool:
    """Whether torch can multiply bfloat16 matrices on this CPU.

    Some virtual machines announce AMX instructions that do not work. torch then fails or is killed by SIGILL at the
    first large product, so a child process tries one. CPUs without AMX are not tried.
    """
    try:
        with open("/proc/cpuinfo") as file:
            announced = "amx_tile" in file.read()
    except OSError:  # not Linux
        return True
    return not announced or subprocess.run([sys.executable, "-c", _MULTIPLY], capture_output=True).returncode == 0


def require_bfloat16(setting: str) -> None:
    """Raise if this CPU cannot multiply bfloat16 matrices; ``setting`` names the setting that needs it."""
    if not bfloat16_works():
        raise UnsupportedError(
            f"{setting}: torch cannot multiply bfloat16 matrices on this CPU, whose AMX instructions do not work; set "
            "the environment variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16, which keeps torch from using them"
        )


class HeldPorts:
    """Free ports that no other program is given until `close`, also while the server that uses one restarts.

    Sockets are bound to them but do not listen, so a server that sets ``SO_REUSEADDR`` can.
    """

    def __init__(self, count: int, host: str = "127.0.0.1") -> None:
        self._sockets: list[socket.socket] = []
        try:
            for _ in range(count):
                self._sockets.append(one := socket.socket())
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind((host, 0))
        except OSError:
            self.close()
            raise
        self.numbers: list[int] = [one.getsockname()[1] for one in self._sockets]

    def close(self) -> None:
        for one in self._sockets:
            one.close()
