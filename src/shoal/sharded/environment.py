"""The environment variables of synchronous training, under the names that existing launch scripts set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal.switches import switch


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncEnvironment:
    """The settings in these variables: the dtype of exchanged gradients, and how dense gradients are reduced."""

    backward_dtype: torch.dtype = torch.float32
    """float16 if ``MONOLITH_WITH_OPTIMIZED_HOROVOD`` is not empty or ``MONOLITH_WITH_BYTEPS_BWD_CAST`` is 16."""
    fake_cast: bool = False
    """``MONOLITH_WITH_BYTEPS_BWD_FAKE_CAST`` with cast 16: received gradients are replaced by zeros, for debugging."""
    allreduce_fusion: str = ""
    allreduce_fp16: bool = False
    skip_allreduce: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> SyncEnvironment:
        env = os.environ if environ is None else environ
        for name in (
            "MONOLITH_WITH_HOROVOD_FID_G2G", "MONOLITH_WITH_HOROVOD_FWD_G2G", "MONOLITH_WITH_HOROVOD_BWD_G2G",
            "MONOLITH_WITH_BYTEPS", "MONOLITH_WITH_BYTEPS_FID", "MONOLITH_WITH_BYTEPS_FWD", "MONOLITH_WITH_BYTEPS_BWD",
            "MONOLITH_WITH_BYTEPS_FWD_GDR", "MONOLITH_WITH_BYTEPS_FWD_GDR_G2G", "MONOLITH_WITH_BYTEPS_BWD_GDR",
            "MONOLITH_WITH_BYTEPS_BWD_GDR_G2G", "MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD",
        ):  # fmt: skip
            switch(name, 0, env)  # no effect here, but a malformed value is still reported
        cast = switch("MONOLITH_WITH_BYTEPS_BWD_CAST", 32, env)
        fake = switch("MONOLITH_WITH_BYTEPS_BWD_FAKE_CAST", 0, env)
        half = bool(env.get("MONOLITH_WITH_OPTIMIZED_HOROVOD")) or cast == 16
        return cls(
            backward_dtype=torch.float16 if half else torch.float32,
            fake_cast=cast == 16 and bool(fake),
            allreduce_fusion=env.get("MONOLITH_WITH_ALLREDUCE_FUSION", ""),
            allreduce_fp16=bool(switch("MONOLITH_WITH_ALLREDUCE_FP16", 0, env)),
            skip_allreduce=bool(switch("MONOLITH_SKIP_ALLREDUCE", 0, env)),
        )


def __getattr__(name: str) -> Any:
    """``environment``: the settings of this process, read on first use."""
    if name != "environment":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, SyncEnvironment.read())
