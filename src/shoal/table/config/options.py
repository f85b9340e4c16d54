"""The options of ``HashTable(dim, ...)`` as the full configuration that tables are built from."""

from datetime import timedelta
from typing import Any

from shoal.errors import ConfigError
from shoal.table.config.compressors import Fp32Compressor
from shoal.table.config.entry import CombineAsSegment, HashTableConfigInstance
from shoal.table.config.initializers import RandomUniformInitializer, ZerosInitializer
from shoal.table.config.learning_rate import LearningRate, check_rate
from shoal.table.config.messages import CuckooEmbeddingHashTableConfig, EmbeddingHashTableConfig, EntryConfig
from shoal.table.config.optim import as_row_optimizer

_INITIALIZERS = {"uniform": RandomUniformInitializer, "zeros": ZerosInitializer}
_DAYS = {"d": 1, "w": 7, "y": 365}
_MAX_DAYS = (1 << 32) - 1


def config_of_options(
    name: str,
    dim: int,
    *,
    optimizer: Any,
    initializer: Any,
    expire_after: timedelta | str | None,
    lr: LearningRate | None,
) -> HashTableConfigInstance:
    """One segment of ``dim`` weights; every option is explained at `HashTable`."""
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
        config.slot_expire_time_config.default_expire_time = _days(expire_after, name)
    return HashTableConfigInstance(config, [rate])


def _days(expire_after: timedelta | str, name: str) -> int:
    if isinstance(expire_after, str):
        number, unit = expire_after[:-1].strip(), expire_after[-1:]
        if unit not in _DAYS or not number.isdecimal():
            raise ConfigError(
                f"table {name!r}: expire_after must be whole days, weeks or years, as in '30d' or '2w', got "
                f"{expire_after!r}"
            )
        days = int(number) * _DAYS[unit]
    elif not isinstance(expire_after, timedelta):
        raise ConfigError(
            f"table {name!r}: expire_after must be a timedelta or text such as '30d', got {expire_after!r}"
        )
    elif expire_after < timedelta() or expire_after % timedelta(days=1):
        raise ConfigError(f"table {name!r}: expire_after must be a whole number of days, got {expire_after}")
    else:
        days = expire_after.days
    if days > _MAX_DAYS:
        raise ConfigError(
            f"table {name!r}: expire_after must be at most {_MAX_DAYS} days, got {expire_after!r}; None means never"
        )
    return days
