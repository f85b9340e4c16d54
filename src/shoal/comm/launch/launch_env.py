"""Environment variables of the launcher and the user, read on every call."""

import os

from shoal.errors import ConfigError
from shoal.switches import env_int as env_int

# quantity -> (Open MPI's variable, torchrun's, default)
LAUNCHER = {
    "rank": ("OMPI_COMM_WORLD_RANK", "RANK", 0),
    "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK", 0),
    "size": ("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE", 1),
    "local_size": ("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", 1),
}


def launcher_int(quantity: str) -> int | None:
    """The launcher's ``rank``, ``local_rank``, ``size`` or ``local_size``; None if it is not set."""
    for name in LAUNCHER[quantity][:2]:
        if name in os.environ:
            try:
                return int(os.environ[name])
            except ValueError:
                raise ConfigError(f"environment variable {name} must be an integer, got {os.environ[name]!r}") from None
    return None


def launcher_value(quantity: str) -> int:
    """``launcher_int``, or the value for a single process."""
    value = launcher_int(quantity)
    return LAUNCHER[quantity][2] if value is None else value


def is_mpi_mode() -> bool:
    """Whether a launcher started ranks: Open MPI's local rank is set, even empty, or torchrun's three variables."""
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
        return True
    return all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def is_one(name: str) -> bool:
    """Whether a variable is exactly ``1``."""
    return os.environ.get(name, "") == "1"


def uses_gdr() -> bool:
    return is_one("MONOLITH_WITH_BYTEPS_FWD_GDR") or is_one("MONOLITH_WITH_BYTEPS_BWD_GDR")
