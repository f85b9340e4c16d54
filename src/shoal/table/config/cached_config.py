"""The configurations of a `MultiHashTable`, computed once and shared by all tables built from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.table.config.entry import HashTableConfigInstance, infer_dim_size
from shoal.table.config.messages import EmbeddingHashTableConfig, MultiEmbeddingHashTableConfig


@dataclass(frozen=True)
class CachedConfig:
    """The configurations of a `MultiHashTable`, computed once for many tables."""

    configs: dict[str, HashTableConfigInstance]
    """Sorted by name."""
    serialized: bytes
    """A `MultiEmbeddingHashTableConfig`."""
    dims: list[int]
    slot_expire_time_config: bytes
    """The expiry of the first table that has one; tables without one use it too."""

    def own(self, name: str) -> HashTableConfigInstance:
        """The configuration of one table, with the shared expiry if it sets none."""
        config = self.configs[name]
        message = EmbeddingHashTableConfig()
        message.CopyFrom(config.table_config)
        if self.slot_expire_time_config and not message.HasField("slot_expire_time_config"):
            message.slot_expire_time_config.ParseFromString(self.slot_expire_time_config)
        return HashTableConfigInstance(message, config.learning_rate_fns, config.extra_restore_names)


def convert_to_cached_config(configs: Mapping[str, HashTableConfigInstance]) -> CachedConfig:
    """Prepares configurations for `MultiHashTable.from_cached_config`."""
    ordered = {name: configs[name] for name in sorted(configs)}
    messages = [config.table_config for config in ordered.values()]
    expiry = [m.slot_expire_time_config for m in messages if m.HasField("slot_expire_time_config")]
    return CachedConfig(
        configs=ordered,
        serialized=MultiEmbeddingHashTableConfig(names=list(ordered), configs=messages).SerializeToString(),
        dims=[infer_dim_size(message) for message in messages],
        slot_expire_time_config=expiry[0].SerializeToString() if expiry else b"",
    )
