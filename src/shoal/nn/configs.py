"""`EmbeddingBagConfig` and `EmbeddingConfig`: descriptions of tables with the same fields as in TorchRec."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import ConfigError, UnsupportedError, did_you_mean
from shoal.table.config.initializers import (
    ConstantsInitializer,
    OnesInitializer,
    RandomUniformInitializer,
    ZerosInitializer,
)
from shoal.table.table import HashTable, check_values

_TRAINED = ("FP32", "FP16", "BF16")
_POOLED = {"SUM": "sum", "MEAN": "mean"}


@dataclass
class EmbeddingConfig:
    """Describes a table of an `EmbeddingCollection` with TorchRec's fields; TorchRec's own class works, too.

    >>> EmbeddingConfig(num_embeddings=1000, embedding_dim=16, name="item", feature_names=["clicked"]).embedding_dim
    16
    """

    num_embeddings: int = 0
    """Expected number of rows n, not a limit: any int64 id can have a row. New rows are uniform in ±1/sqrt(n)."""
    embedding_dim: int = 0
    name: str = ""
    data_type: Any = "FP32"
    """FP32, FP16 or BF16; rows are always held in float32, and quantized when a model is exported."""
    feature_names: list[str] = field(default_factory=list)
    """The keys of a batch that read this table; by default the table's name."""
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[[Tensor], Any] | None = None
    """Fills a weight ``[num_embeddings, embedding_dim]``. Uniform, constant, zeros and ones from ``torch.nn.init``
    initialize each row when it is created; any other function is called once and gives the rows of ids 0, 1, …"""


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """Describes a table of an `EmbeddingBagCollection`, as `EmbeddingConfig` does, and its pooling."""

    pooling: Any = "SUM"
    """SUM or MEAN, as text or as TorchRec's ``PoolingType``."""


class Configured(NamedTuple):
    """Tables made from configurations, the features that read them, and the batch key of each feature."""

    configs: list[Any]
    tables: dict[str, Any]
    features: dict[str, str]
    """Name of each result -> name of its table. A key that several tables read gives a result ``key@table`` in each."""
    combiners: dict[str, str]
    keys: list[str]
    """The batch key of each feature."""
    by_table: list[list[str]]
    """The results of each table."""

    @staticmethod
    def of(
        who: str, given: Any, kind: type, *, device: Any, optimizer: Any, make_table: Callable[..., Any] | None
    ) -> Configured | None:
        """Build from configurations; return None if ``given`` are tables by name."""
        options = {"device": device, "optimizer": optimizer, "make_table": make_table}
        if isinstance(given, Mapping) or not isinstance(given, Sequence) or isinstance(given, str | bytes):
            if extra := [name for name, value in options.items() if value is not None]:
                raise ConfigError(
                    f"{who}: {extra[0]} must be given with configurations only; these tables exist already"
                )
            return None
        configs = [_checked(who, one, kind) for one in given]
        twice = [name for name, count in Counter(one.name for one in configs).items() if count > 1]
        if twice or not configs:
            problem = f"{twice[0]!r} twice" if twice else "an empty list"
            raise ConfigError(f"{who}: tables must be configurations with distinct names, got {problem}")
        keys = [[str(key) for key in getattr(one, "feature_names", None) or [one.name]] for one in configs]
        readers = Counter(key for own in keys for key in own)
        by_table = [
            [f"{key}@{one.name}" if readers[key] > 1 else key for key in own]
            for one, own in zip(configs, keys, strict=True)
        ]
        features = {name: one.name for one, own in zip(configs, by_table, strict=True) for name in own}
        flat = [key for own in keys for key in own]
        if len(features) != len(flat):
            raise ConfigError(f"{who}: a table's feature_names must be distinct, got {keys}")
        pooled = {one.name: _pooling(who, one) for one in configs} if hasattr(kind, "pooling") else {}
        combiners = {name: pooled.get(table, "") for name, table in features.items()}
        return Configured(configs, _tables(configs, **options), features, combiners, flat, by_table)

    def reads_as_is(self, keys: Sequence[Any]) -> bool:
        """Whether the keys of a batch are exactly the features, in any order."""
        return len(keys) == len(self.features) and all(key in self.features for key in keys)

    def places(self, keys: Sequence[Any]) -> list[int]:
        """Return the position of each feature's key in a batch."""
        place = {str(key): number for number, key in enumerate(keys)}
        if missing := [key for key in self.keys if key not in place]:
            raise ConfigError(f"a batch must have the keys of all features; {missing} are missing from {list(place)}")
        return [place[key] for key in self.keys]


def _checked(who: str, one: Any, kind: type) -> Any:
    if isinstance(one, Mapping):
        known = [each.name for each in fields(kind)]
        if unknown := [name for name in one if name not in known]:
            raise ConfigError(f"{who}: a configuration has no field {unknown[0]!r}{did_you_mean(unknown[0], known)}")
        one = kind(**one)
    dim = getattr(one, "embedding_dim", None)
    if not isinstance(dim, int) or dim < 1 or not getattr(one, "name", None):
        raise ConfigError(f"{who}: a configuration must have a name and an embedding_dim >= 1, got {one!r:.90}")
    word = _word(getattr(one, "data_type", "FP32"))
    if word not in _TRAINED:
        raise ConfigError(
            f"{who}: table {one.name!r}: data_type must be one of {', '.join(_TRAINED)} in training, got {word}; rows "
            "are quantized when a model is exported"
        )
    return one


def _pooling(who: str, config: Any) -> str:
    word = _word(getattr(config, "pooling", "SUM"))
    if word not in _POOLED:
        raise ConfigError(f"{who}: table {config.name!r}: pooling must be SUM or MEAN, got {word}")
    return _POOLED[word]


def _tables(
    configs: Sequence[Any], *, device: Any, optimizer: Any, make_table: Callable[..., Any] | None
) -> dict[str, Any]:
    options: dict[str, Any] = {} if optimizer is None else {"optimizer": optimizer}
    place = torch.device(device or "cpu")
    if place.type not in ("cpu", "meta"):  # a new table allocates nothing, so meta is cpu
        options["device"] = device
    made = {}
    for one in configs:
        initializer, fill = _initializer(one)
        own = {"name": one.name, "initializer": initializer} | _expiry(one) | options
        table = made[one.name] = (make_table or HashTable)(one.embedding_dim, **own)
        if fill is not None and place.type != "meta":
            weight = torch.empty(one.num_embeddings, one.embedding_dim, device="cpu")
            with torch.no_grad():
                filled = fill(weight)
            replace_rows(table, weight if filled is None else filled)
    return made


def replace_rows(table: Any, weight: Tensor) -> None:
    """Replace all rows with those of ``weight`` ``[n, dim]``, for ids 0 to n - 1, with fresh state."""
    if weight.dim() != 2 or weight.shape[1] != table.dim_size:
        raise ConfigError(f"table {table.name!r}: a weight must be [n, {table.dim_size}], got {list(weight.shape)}")
    weight = weight.detach().float()

    def load(own: Any, share: tuple[int, int] | None) -> None:
        ids = torch.arange(weight.shape[0], device="cpu")
        if share is not None:
            ids = ids[ids % share[1] == share[0]]
        if isinstance(own, HashTable):
            check_values(own, weight)  # all of it, so that all ranks refuse it before the first row is removed
        own.clear()
        place = getattr(own, "device", None) or "cpu"
        own.assign(ids.to(place), weight[ids.to(weight.device)].to(place))

    if hasattr(table, "load_rows"):
        table.load_rows(load)
    else:
        load(table, None)


def _word(value: Any) -> str:
    """Return the upper-case name of an enumeration member or text: SUM, FP32, …"""
    return str(getattr(value, "name", value)).upper()


def _initializer(config: Any) -> tuple[Any, Callable[[Tensor], Any] | None]:
    """Return the initializer of new rows, and the function that fills a complete weight if ``init_fn`` needs one."""
    count = getattr(config, "num_embeddings", 0) or 0
    low, high = getattr(config, "weight_init_min", None), getattr(config, "weight_init_max", None)
    bound = math.sqrt(1 / count) if count else 0.05
    uniform = RandomUniformInitializer(-bound if low is None else low, bound if high is None else high)
    fn = getattr(config, "init_fn", None)
    if fn is None:
        return uniform, None
    args, keywords = (fn.args, fn.keywords) if isinstance(fn, functools.partial) else ((), {})
    base, init = fn.func if isinstance(fn, functools.partial) else fn, torch.nn.init
    if base is init.uniform_ and not set(keywords) - {"a", "b"} and not args:
        return RandomUniformInitializer(keywords.get("a", 0.0), keywords.get("b", 1.0)), None
    if base is init.constant_ and set(keywords) == {"val"} and not args:
        return ConstantsInitializer(keywords["val"]), None
    if base in (init.zeros_, init.ones_) and not args and not keywords:
        return (ZerosInitializer() if base is init.zeros_ else OnesInitializer()), None
    if not count or getattr(config, "use_virtual_table", False):
        raise ConfigError(
            f"table {config.name!r}: init_fn must be uniform_, constant_, zeros_ or ones_ from torch.nn.init if "
            f"num_embeddings is not the number of rows, got {base!r:.60}"
        )
    return uniform, fn


def _expiry(config: Any) -> dict[str, Any]:
    """Translate a virtual table's eviction policy into arguments of `HashTable`."""
    policy = getattr(config, "virtual_table_eviction_policy", None)
    kind = type(policy).__name__
    if policy is None or kind == "NoEvictionPolicy":
        return {}
    if kind == "TimestampBasedEvictionPolicy":
        minutes = int(policy.eviction_ttl_mins)
        return {"expire_after": f"{-(-minutes // 60)}h"} if minutes else {}
    raise UnsupportedError(
        f"table {config.name!r}: {kind} is not supported; leave it out and give the tables a budget, for example "
        "make_table=functools.partial(shoal.HashTable, max_rows=1_000_000, evict='lfu')"
    )
