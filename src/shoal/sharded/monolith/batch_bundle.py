"""The keys of a sharded batch in ``features`` and in the bundle that a lookup passes to its update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal.errors import ConfigError
from shoal.sharded.monolith.layout_config import PREFIX, ParserCtx, as_features, params_of, shard_batch

SPARSE_FEATURES = f"{PREFIX}sparse_features"
SIZES = ("batch_size", "nfl_size", "feature_size", "fid_size", "emb_size")
OFFSETS = ("fid_offset", "feature_offset", "nfl_offset")
LISTS = ("shards", "shards_row_split", "shards_row_split_size")


def take_shards(features: dict[str, Any], ctx: ParserCtx) -> dict[str, Any]:
    """Take the sharded batch out of ``features``; names with ``/`` become dicts. A raw batch is sharded first."""
    if SPARSE_FEATURES in features:
        params = params_of(ctx)
        sharded = shard_batch(features[SPARSE_FEATURES], params, ctx.parser_type)
        del features[SPARSE_FEATURES]
        features.update(as_features(sharded, params.use_native_multi_hash_table))
    taken: dict[str, Any] = {}
    for key in [key for key in features if key.startswith(PREFIX)]:
        name = key.removeprefix(PREFIX)
        value = features.pop(key)
        group, slash, rest = name.partition("/")
        if slash:
            taken.setdefault(group, {})[rest] = value
        else:
            taken[name] = value
    if "shards" not in taken:
        raise ConfigError(
            "features must hold a sharded batch; call sharding_sparse_fids_with_context(batch, features) first, or put "
            f"the batch under {SPARSE_FEATURES!r}"
        )
    return taken


def keep_shards(sharded: Mapping[str, Any], bundle: dict[str, Any]) -> None:
    """Put the ids of every table and part into the bundle."""
    for name in LISTS:
        for key, value in sharded.get(name, {}).items():
            table, ps = key.rsplit(":", 1)
            bundle[f"{PREFIX}{name}@{ps}@{table}"] = value


def pop_shards(bundle: dict[str, Any], tables: Sequence[str], shards: int) -> list[dict[str, Any]]:
    """Take the ids out of the bundle: per part ``{"ids": {table: ids}, "splits": {table: row splits or None}}``."""
    lists = []
    for ps in range(shards):
        ids, splits, _ = (
            {table: bundle.pop(f"{PREFIX}{name}@{ps}@{table}", None) for table in tables} for name in LISTS
        )  # fmt: skip
        lists.append({"ids": ids, "splits": splits})
    return lists


def keep_rows(
    bundle: dict[str, Any], lists: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Tensor]], *, fids: bool,
    native: bool,
) -> None:  # fmt: skip
    """Put the rows that were read into the bundle and, if ``fids``, also their ids."""
    for ps, (part, found) in enumerate(zip(lists, rows, strict=True)):
        for table, embs in found.items():
            key = f"{PREFIX}{table}:{ps}"
            bundle[f"{key}:embs"] = embs
            if fids:
                bundle[f"{key}:fids"] = part["ids"][table]
                if native:
                    bundle[f"{key}:fids_row_split"] = part["splits"][table]


def rows_of(bundle: Mapping[str, Any], tables: Sequence[str], shards: int) -> list[Tensor]:
    """The rows of all lists, table after table and part after part."""
    return [bundle[f"{PREFIX}{table}:{ps}:embs"] for table in tables for ps in range(shards)]


def work_of(
    bundle: Mapping[str, Any], tables: Sequence[str], shards: int, grads: Sequence[Tensor]
) -> list[dict[str, Any]]:
    """Per part the ids, row splits and gradients of its tables; ``grads`` are in the order of `rows_of`."""
    lists = []
    for ps in range(shards):
        keys = {table: f"{PREFIX}{table}:{ps}" for table in tables}
        lists.append(
            {
                "ids": {table: bundle[f"{key}:fids"] for table, key in keys.items()},
                "splits": {table: bundle.get(f"{key}:fids_row_split") for table, key in keys.items()},
                "grads": {table: grads[i * shards + ps] for i, table in enumerate(tables)},
            }
        )
    return lists
