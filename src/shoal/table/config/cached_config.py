"""The configurations of a `MultiHashTable`, worked out once for the many that are built from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.table.config.entry import HashTableConfigInstance, infer_dim_size
from shoal.table.config.messages import EmbeddingHashTableConfig, MultiEmbeddingHashTableConfig


@dataclass(frozen=True)
class CachedConfig:
    """The configurations of a `MultiHashTable`, worked out once for many."""

    configs: dict[str, HashTableConfigInstance]
    """Sorted by name."""
    serialized: bytes
    """A `MultiEmbeddingHashTableConfig`."""
    dims: list[int]
    slot_expire_time_config: bytes
    """Of the first table that has one; it is also used for tables without one."""

    def own(self, name: str) -> HashTableConfigInstance:
        """The configuration of one table, with the first one's expiry if it has none."""
        config = self.configs[name]
        message = EmbeddingHashTableConfig()
        message.CopyFrom(config.table_config)
        if self.slot_expire_time_config and not message.HasField("slot_expire_time_config"):
            message.slot_expire_time_config.ParseFromString(self.slot_expire_time_config)
        return HashTableConfigInstance(message, config.learning_rate_fns, config.extra_restore_names)


def convert_to_cached_config(configs: Mapping[str, HashTableConfigInstance]) -> CachedConfig:
    """What `MultiHashTable.from_cached_config` builds tables from."""
    ordered = {name: configs[name] for name in sorted(configs)}
    messages = [config.table_config for config in ordered.values()]
    expiry = [m.slot_expire_time_config for m in messages if m.HasField("slot_expire_time_config")]
    return CachedConfig(
        configs=ordered,
        serialized=MultiEmbeddingHashTableConfig(names=list(ordered), configs=messages).SerializeToString(),
        dims=[infer_dim_size(message) for message in messages],
        slot_expire_time_config=expiry[0].SerializeToString() if expiry else b"",
    )
