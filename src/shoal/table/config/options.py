"""Conversion of the options of ``HashTable(dim, ...)`` to the full configuration that tables are built from."""

from datetime import timedelta
from typing import Any

from shoal.errors import ConfigError
from shoal.table.budget.limits import write_budget
from shoal.table.clock import DAY_S, HOUR_S
from shoal.table.config.compressors import Fp32Compressor
from shoal.table.config.durations import seconds_of
from shoal.table.config.entry import CombineAsSegment, HashTableConfigInstance
from shoal.table.config.initializers import RandomUniformInitializer, ZerosInitializer
from shoal.table.config.learning_rate import LearningRate, check_rate
from shoal.table.config.messages import CuckooEmbeddingHashTableConfig, EmbeddingHashTableConfig, EntryConfig
from shoal.table.config.optim import as_row_optimizer

_INITIALIZERS = {"uniform": RandomUniformInitializer, "zeros": ZerosInitializer}
_MAX = (1 << 32) - 1


def config_of_options(
    name: str,
    dim: int,
    *,
    optimizer: Any,
    initializer: Any,
    expire_after: timedelta | str | None,
    lr: LearningRate | None,
    max_rows: int | None = None,
    max_bytes: Any = None,
    evict: Any = None,
) -> HashTableConfigInstance:
    """A configuration with one segment of ``dim`` weights; see `HashTable` for the options."""
    if lr is not None:
        check_rate(lr, f"table {name!r}: lr")
    message, rate = as_row_optimizer(optimizer, lr)
    if isinstance(initializer, str):
        if initializer not in _INITIALIZERS:
            raise ConfigError(
                f"table {name!r}: initializer must be one of {sorted(_INITIALIZERS)}, got {initializer!r}"
            )
        initializer = _INITIALIZERS[initializer]()
    config = EmbeddingHashTableConfig(
        entry_config=EntryConfig(segments=[CombineAsSegment(dim, initializer, message, Fp32Compressor())]),
        cuckoo=CuckooEmbeddingHashTableConfig(),
    )
    if expire_after is not None:
        _write_expiry(config.slot_expire_time_config, expire_after, name)
    write_budget(config, f"table {name!r}", max_rows=max_rows, max_bytes=max_bytes, evict=evict)
    return HashTableConfigInstance(config, [rate])


def _write_expiry(config: Any, expire_after: timedelta | str, name: str) -> None:
    seconds = seconds_of(expire_after, f"table {name!r}: expire_after")
    if seconds % HOUR_S:
        raise ConfigError(f"table {name!r}: expire_after must be a whole number of hours, got {expire_after!r}")
    if seconds // DAY_S > _MAX or (seconds % DAY_S and seconds // HOUR_S > _MAX):
        raise ConfigError(
            f"table {name!r}: expire_after must be at most {_MAX} days, got {expire_after!r}; None means never"
        )
    if seconds % DAY_S:
        config.default_expire_hours = seconds // HOUR_S
    else:
        config.default_expire_time = seconds // DAY_S
