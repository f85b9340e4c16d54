"""`Placement`: the device of a server's rows and nets, and the precision of its computation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.errors import ConfigError, UnsupportedError
from shoal.host import require_bfloat16
from shoal.table.cuda.backend import interpreted

PRECISIONS = ("fp32", "bf16")
BATCH_ROWS = {"cpu": 1024, "cuda": 8192}
"""Default maximum number of joined rows, by kind of device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The device and precision that versions are loaded with.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N``: where rows and nets are.
        precision: ``fp32``, or ``bf16``: matrix products in bfloat16, as with ``torch.autocast``. Inputs,
            rows and outputs stay float32.
        max_batch_rows: maximum rows that are joined; 0 = 1,024, or 8,192 on a GPU.
        compiled: run the nets that AOTInductor compiled at export. Their machine code comes from the export.

    Raises:
        ConfigError: an unknown device or precision.
        UnsupportedError: this machine has no such GPU, or its CPU cannot multiply bfloat16 matrices.
    """

    device: str = "cpu"
    precision: str = "fp32"
    max_batch_rows: int = 0
    compiled: bool = False

    def __post_init__(self) -> None:
        try:
            kind = torch.device(self.device).type
        except RuntimeError:
            kind = ""
        if kind not in BATCH_ROWS:
            raise ConfigError(f"device must be cpu, cuda or cuda:N, got {self.device!r}")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if self.max_batch_rows < 0:
            raise ConfigError(f"max_batch_rows must be >= 0, got {self.max_batch_rows}")
        if self.precision == "bf16" and kind == "cpu":
            require_bfloat16("precision bf16")
        if kind == "cuda" and not interpreted():
            number = torch.device(self.device).index or 0
            if number >= torch.cuda.device_count():
                count = torch.cuda.device_count()
                raise UnsupportedError(f"device {self.device!r} needs a CUDA GPU with that number; torch sees {count}")

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def torch_device(self) -> torch.device:
        """The device of tensors; the CPU if kernels are interpreted."""
        if not self.on_gpu or interpreted():
            return torch.device("cpu")
        return torch.device("cuda", torch.device(self.device).index or 0)

    @property
    def batch_rows(self) -> int:
        """Maximum rows that are joined."""
        return self.max_batch_rows or BATCH_ROWS[torch.device(self.device).type]

    @property
    def native(self) -> bool:
        """Whether nets may be run natively: on the CPU, in float32."""
        return not self.on_gpu and self.precision == "fp32"


ON_CPU = Placement()
