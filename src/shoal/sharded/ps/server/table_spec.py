"""The spec of a table on a server: its configuration and options, as in requests and manifests."""

from __future__ import annotations

import json
from typing import Any

from shoal.errors import ConfigError, DataError
from shoal.table.config.entry import HashTableConfigInstance
from shoal.table.config.messages import EmbeddingHashTableConfig
from shoal.table.filters.admission import SlidingHashFilter
from shoal.table.reconfigure import reconfigure, row_difference
from shoal.table.table import HashTable

MAX_FILES = 1024  # of one table in one checkpoint

OPTIONS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "seed": int,
    "default_seed": bool,
    "on_bad_gradient": str,
    "extra_restore_names": list,
    "saver_parallel": int,
    "clocked": bool,
    "filter": (dict, type(None)),
}
"""The options of a table in addition to its configuration. With ``default_seed`` an existing table can have another
seed; ``clocked`` tables refuse times far ahead of the server's clock."""


def parse_spec(config: Any, options: Any) -> dict[str, Any]:
    """The options of a table with its configuration in hex, from the two frames of a CREATE."""
    try:
        spec = json.loads(bytes(options))
        EmbeddingHashTableConfig.FromString(bytes(config))
    except Exception as error:
        raise DataError(f"CREATE must have a table configuration and JSON options ({error})") from None
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        raise DataError("the options of CREATE must be a JSON object with a name")
    name = spec["name"]
    for key, value in spec.items():
        if key not in OPTIONS or not isinstance(value, OPTIONS[key]):
            raise ConfigError(f"table {name!r}: the options of CREATE are {', '.join(OPTIONS)}, got {key!r}: {value!r}")
    if not name or "\n" in name or name.encode("utf-8", "replace").decode() != name:
        raise ConfigError(f"a table's name must be UTF-8, not empty and without line breaks, got {name!r}")
    if not all(isinstance(extra, str) for extra in spec.get("extra_restore_names", ())):
        raise ConfigError(f"table {name!r}: extra_restore_names must be names, got {spec['extra_restore_names']!r}")
    if spec.get("saver_parallel", -1) > MAX_FILES:
        raise ConfigError(f"table {name!r}: saver_parallel must be at most {MAX_FILES}, got {spec['saver_parallel']}")
    return {**spec, "config": bytes(config).hex()}


def build_table(spec: dict[str, Any], hash_filter: Any = None) -> HashTable:
    """Build a table from its spec, with the spec's filter unless one is given.

    The table has no background eviction: the server evicts, so that it is logged.
    """
    config = _config(spec)
    config.enable_feature_eviction = False
    rates = [0.0] * len(config.entry_config.segments)  # every update carries its own
    return HashTable.from_config(
        HashTableConfigInstance(config, rates, spec.get("extra_restore_names")),
        name=spec["name"],
        hash_filter=hash_filter or build_filter(spec.get("filter"), spec["name"]),
        on_bad_gradient=spec.get("on_bad_gradient", "raise"),
        seed=spec.get("seed", 0),
        saver_parallel=spec.get("saver_parallel", -1),
        clocked=spec.get("clocked", False),
    )


def _config(spec: dict[str, Any]) -> EmbeddingHashTableConfig:
    return EmbeddingHashTableConfig.FromString(bytes.fromhex(spec["config"]))


# --- changing the spec of a table -------------------------------------------------------------------------------------


def check_change(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise for a new spec that the rows of the existing table do not allow."""
    difference = row_difference(_config(old), _config(new))
    if not difference and old.get("seed", 0) != new.get("seed", 0):
        difference = f"its new rows depend on seed {old.get('seed', 0)}, not {new.get('seed', 0)}"
    if difference:
        raise ConfigError(
            f"table {new['name']!r} exists, and its configuration cannot change so: {difference}; use its "
            "configuration, or another name for a new table (the rows of this one stay)"
        )


def change_table(table: HashTable, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Apply a spec that passed `check_change` to a table; keeps its rows, and its filter's counts if they fit."""
    kept: Any = table.hash_filter
    if old.get("filter") != new.get("filter"):
        counted: Any = kept
        kept = build_filter(new.get("filter"), new["name"])
        if same_counts(old, new):
            for block in range(counted.split_num):
                kept.set_block(block, counted.get_block(block))
            kept.set_head(counted.head, counted.head_increment, counted.failure_count)
    reconfigure(table, build_table(new, kept))


def same_counts(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether the filters of two specs can share their counts."""
    shapes = []
    for spec in (old, new):
        made = build_filter(spec.get("filter"), spec["name"])
        shapes.append((made.capacity, made.split_num) if isinstance(made, SlidingHashFilter) else None)
    return shapes[0] is not None and shapes[0] == shapes[1]


# --- filters ----------------------------------------------------------------------------------------------------------


def build_filter(spec: dict[str, Any] | None, name: str) -> Any:
    """Build an admission filter from its description; None without one."""
    if not spec:
        return None
    from shoal.table.filters import admission as filters

    config = bytes.fromhex(spec.get("config", ""))
    kind = spec.get("type", "sliding_hash_filter")
    if kind == "sliding_hash_filter":
        return filters.create_hash_filter(spec.get("capacity", 300_000_000), spec.get("split_num", 7), config, name)
    if kind == "probabilistic_filter":
        return filters.create_probabilistic_filter(spec.get("equal_probability", False), config, name)
    if kind == "no_filter":
        return None
    raise ConfigError(f"a filter's type must be sliding_hash_filter, probabilistic_filter or no_filter, got {kind!r}")
