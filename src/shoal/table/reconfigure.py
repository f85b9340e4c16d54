"""Changes of a table's settings that leave its rows unchanged."""

from __future__ import annotations

from shoal.errors import ConfigError, UnsupportedError
from shoal.table.config.messages import EmbeddingHashTableConfig, EntryConfig
from shoal.table.table import HashTable


def row_difference(old: EmbeddingHashTableConfig, new: EmbeddingHashTableConfig) -> str:
    """Describes how the rows of two configurations differ; empty if their layout is the same.

    Rates, expiry, initializers and an optimizer's parameters do not matter: existing rows stay valid under them.
    """
    kinds = [EntryConfig.EntryType.Name(config.entry_config.entry_type) for config in (old, new)]
    if kinds[0] != kinds[1]:
        return f"its rows are for {kinds[0].lower()}, not for {kinds[1].lower()}"
    if old.skip_zero_embedding != new.skip_zero_embedding:
        return f"skip_zero_embedding is {old.skip_zero_embedding}, not {new.skip_zero_embedding}"
    before, after = old.entry_config.segments, new.entry_config.segments
    if len(before) != len(after):
        return f"its rows have {len(before)} segments, not {len(after)}"
    for index, (a, b) in enumerate(zip(before, after, strict=True)):
        where = f" of segment {index}" if len(before) > 1 else ""
        if a.dim_size != b.dim_size:
            return f"dim{where} is {a.dim_size}, not {b.dim_size}"
        optimizers = [segment.opt_config.WhichOneof("type") for segment in (a, b)]
        if optimizers[0] != optimizers[1]:
            return f"the optimizer{where} is {optimizers[0]}, not {optimizers[1]}"
        codecs = [segment.comp_config.WhichOneof("type") or "fp32" for segment in (a, b)]
        if codecs[0] != codecs[1] or (codecs[0] != "fp32" and a.comp_config != b.comp_config):
            return f"the compressor{where} is {a.comp_config!s}, not {b.comp_config!s}".replace("\n", " ")
    return ""


def reconfigure(table: HashTable, like: HashTable) -> None:
    """Gives ``table`` the settings of ``like``, an empty table with the same row layout; its rows and seed stay.

    No other thread may write to the table meanwhile; reads can continue.
    """
    if table.on_gpu or like.on_gpu:
        raise UnsupportedError(f"table {table.name!r}: the settings of a table on a GPU cannot be changed")
    difference = row_difference(table.table_config, like.table_config)
    if difference:
        raise ConfigError(f"table {table.name!r}: {difference}")
    table._native.set_layout(like._native.layout)
    table._native.set_filter(like.hash_filter and like.hash_filter.native)
    table.hash_filter = like.hash_filter
    table.config, table.table_config = like.config, like.table_config
    table.extra_restore_names, table.saver_parallel = like.extra_restore_names, like.saver_parallel
    table.on_bad_gradient, table._bad_gradient = like.on_bad_gradient, like._bad_gradient
    table._expiry = like._expiry
    table.clocked, table.finite_values = like.clocked, like.finite_values
