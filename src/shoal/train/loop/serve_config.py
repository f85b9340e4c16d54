"""``[serve]``: exports of the model, and pushes of fresh rows and weights to replicas."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

from shoal.errors import ConfigError, did_you_mean
from shoal.train.loop.guard.config import GuardConfig
from shoal.train.loop.table_config import at_least

CODECS = {"float32": None, "half": None, "fixed_r8": "r", "one_bit": "amplitude"}
"""How replicas can store rows, with the meaning of the number after the colon, for codecs that need one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """``[serve]``: exports and pushes. Without ``dir`` nothing is exported, without ``push_every_s`` nothing pushed."""

    dir: str | None = None
    """Folder for exports, which `shoal serve` reads: one at the end of the run, and one every ``every_s``."""
    every_s: float = 0.0
    """Seconds between exports; 0 exports only at the end."""
    keep: int = 2
    """The number of newest exports to keep."""
    when_better: bool = False
    """Export only after the best evaluation so far, at most once per ``every_s``."""
    model: str | None = None
    """The name that servers and clients use; by default that of the folder ``dir`` or of the configuration file."""
    push_every_s: float = 0.0
    """Seconds between pushes of fresh rows and weights to the replicas in ``registry``; 0 disables pushes."""
    registry: str | None = None
    """The replicas' registry, as for `shoal serve --registry`: ``zk://host:port``, ``dir:///path`` or a folder."""
    codec: str = "float32"
    """How replicas store rows: ``float32``, ``half``, ``fixed_r8:R`` (one byte per weight, in [-R, R)) or
    ``one_bit:A`` (-A or A). Rows are exported and pushed in this form."""
    compiled: bool = False
    """Compile the net of each export with AOTInductor, for `shoal serve --compiled`; needs a C++ compiler."""
    at_start: bool = False
    """Also export before the first step if ``dir`` has no version yet, so that replicas can start."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """``[serve.guard]``: when pushes and exports stop automatically."""

    def __post_init__(self) -> None:
        at_least("serve", self, every_s=0, keep=1, push_every_s=0)
        for name in ("dir", "model", "registry"):
            if getattr(self, name) == "":
                raise ConfigError(f"[serve] {name} must not be empty; leave it out instead")
        if self.model is not None and (os.sep in self.model or self.model in (".", "..") or "\0" in self.model):
            raise ConfigError(f"[serve] model must be a name without {os.sep!r}, got {self.model!r}")
        if self.dir is None and (self.every_s or self.when_better or self.at_start):
            given = "every_s" if self.every_s else "when_better" if self.when_better else "at_start"
            raise ConfigError(f'[serve] {given} needs a folder for the exports; set dir = "exports/NAME"')
        if self.push_every_s and self.registry is None:
            raise ConfigError(
                '[serve] push_every_s needs a registry to find the replicas in; set registry = "dir:///PATH"'
            )
        self._check_codec()

    def _check_codec(self) -> None:
        kind, colon, text = self.codec.partition(":")
        if kind not in CODECS:
            forms = ", ".join(
                name if number is None else f"{name}:{number[0].upper()}" for name, number in CODECS.items()
            )
            raise ConfigError(f"[serve] codec must be one of {forms}, got {self.codec!r}{did_you_mean(kind, CODECS)}")
        needs = CODECS[kind]
        if needs is None and colon:
            raise ConfigError(f"[serve] codec {kind} must be given without a number, got {self.codec!r}")
        if needs is not None and not _positive(text):
            raise ConfigError(f"[serve] codec must be {kind}: and its {needs}, such as {kind}:0.5, got {self.codec!r}")

    @property
    def name(self) -> str | None:
        """The model's name, if it is configured."""
        if self.model is not None or self.dir is None:
            return self.model
        return os.path.basename(os.path.abspath(self.dir))


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
