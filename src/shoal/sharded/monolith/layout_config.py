"""Makes the settings of sharding and pooling from features, combiners and layouts, and the context that holds them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import ConfigError
from shoal.ops.sharding import ShardedFids, sharding_sparse_fids
from shoal.proto.feature_configs import FeatureConfig, FeatureConfigs, OutConfig, PoolingType
from shoal.sharded.route import part_count
from shoal.table.config.entry import HashTableConfigInstance
from shoal.table.export_mode import is_exporting
from shoal.table.merged import merge_configs

PREFIX = "__sharding_sparse_fids__"
FAKE_TABLE = "native_multi_hash_table_fake_table"


def _unique_in_training() -> bool:
    return not is_exporting()


@dataclass
class ShardingSparseFidsOpParams:
    """How a batch is sharded, and for which tables."""

    num_ps: int
    use_native_multi_hash_table: bool
    unique: Callable[[], bool] = _unique_in_training
    transfer_float16: bool = False
    sub_table_name_to_config: dict[str, HashTableConfigInstance] = field(default_factory=dict)
    feature_configs: FeatureConfigs = field(default_factory=FeatureConfigs)
    enable_gpu_emb: bool = False
    use_gpu: bool = False


def gen_feature_configs(
    num_ps: int,
    feature_name_to_config: Mapping[str, HashTableConfigInstance],
    layout_configs: Mapping[str, OutConfig],
    feature_to_unmerged_slice_dims: Mapping[str, Sequence[int]],
    feature_to_combiner: Mapping[str, Any],
    use_native_multi_hash_table: bool,
    transfer_float16: bool = False,
    unique: Callable[[], bool] | None = None,
    enable_gpu_emb: bool = False,
    use_gpu: bool = False,
) -> ShardingSparseFidsOpParams:
    """The settings of a `PartitionedHashTable`.

    With native tables every feature has its own table; otherwise features of equal configuration share one, named by
    the MD5 of their names. ``transfer_float16`` turns native tables off. ``unique`` returns whether an id is sent only
    once per feature; the default is True except during an export.
    """
    native = use_native_multi_hash_table and not transfer_float16
    names = sorted(feature_name_to_config)
    if native:
        sub_tables = {name: feature_name_to_config[name] for name in names}
        table_of = {name: name if enable_gpu_emb else FAKE_TABLE for name in names}
    else:
        sub_tables, table_of = merge_configs(feature_name_to_config)
    features = {}
    for name in names:
        for given, what in (
            (feature_to_unmerged_slice_dims, "feature_to_unmerged_slice_dims"),
            (feature_to_combiner, "feature_to_combiner"),
        ):  # fmt: skip
            if name not in given:
                raise ConfigError(f"{what} must have an entry for feature {name!r}")
        pooling, length = _pooling(name, feature_to_combiner[name])
        features[name] = FeatureConfig(
            table=table_of[name], pooling_type=pooling, slice_dims=list(feature_to_unmerged_slice_dims[name]),
            max_sequence_length=length,
        )  # fmt: skip
    return ShardingSparseFidsOpParams(
        num_ps=part_count(num_ps),
        use_native_multi_hash_table=native,
        unique=unique or _unique_in_training,
        transfer_float16=transfer_float16,
        sub_table_name_to_config=sub_tables,
        feature_configs=FeatureConfigs(features, dict(layout_configs)),
        enable_gpu_emb=enable_gpu_emb,
        use_gpu=use_gpu,
    )


def _pooling(feature: str, combiner: Any) -> tuple[PoolingType, int]:
    kind = type(combiner).__name__
    if kind == "ReduceSum":
        return PoolingType.SUM, 0
    if kind == "ReduceMean":
        return PoolingType.MEAN, 0
    if kind == "FirstN" and combiner.max_seq_length > 0:
        return PoolingType.FIRSTN, int(combiner.max_seq_length)
    raise ConfigError(
        f"feature {feature!r}: a combiner must be ReduceSum, ReduceMean or FirstN with a length above 0, got "
        f"{combiner!r}"
    )


class ParserCtx:
    """How batches are read; within ``with ctx:`` it is the default.

    ``parser_type`` is the input type of `sharding_sparse_fids`, ``sharding_sparse_fids_op_params`` the result of
    `gen_feature_configs`.
    """

    def __init__(self, enable_fused_layout: bool = False) -> None:
        self.enable_fused_layout = enable_fused_layout
        self.parser_type = "example"
        self.sharding_sparse_fids_op_params: ShardingSparseFidsOpParams | None = None

    def __enter__(self) -> ParserCtx:
        _stack().append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _stack().pop()


_local = threading.local()
_default = ParserCtx()


def _stack() -> list[ParserCtx]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def get_default_parser_ctx() -> ParserCtx:
    """The context of the innermost ``with``, or else the process's."""
    return _stack()[-1] if _stack() else _default


def params_of(parser_ctx: ParserCtx | None) -> ShardingSparseFidsOpParams:
    ctx = get_default_parser_ctx() if parser_ctx is None else parser_ctx
    if ctx.sharding_sparse_fids_op_params is None:
        raise ConfigError(
            "the parser context has no sharding_sparse_fids_op_params; set it to the result of gen_feature_configs()"
        )
    return ctx.sharding_sparse_fids_op_params


def shard_batch(batch: Any, params: ShardingSparseFidsOpParams, parser_type: str) -> ShardedFids:
    """`sharding_sparse_fids` with a context's settings."""
    version = 4 if params.enable_gpu_emb else 5
    return sharding_sparse_fids(
        batch, params.num_ps, params.feature_configs, params.unique(), parser_type, version=version
    )


def sharding_sparse_fids_with_context(
    batch: Any, features: dict[str, Any], parser_ctx: ParserCtx | None = None
) -> dict[str, Any]:
    """Shard a batch and put the result into ``features``, from which `PartitionedHashTable.lookup` takes it.

    Keys have the prefix ``__sharding_sparse_fids__``; nested names are joined by ``/``. Returns ``features``.
    """
    ctx = get_default_parser_ctx() if parser_ctx is None else parser_ctx
    params = params_of(ctx)
    features.update(as_features(shard_batch(batch, params, ctx.parser_type), params.use_native_multi_hash_table))
    return features


def as_features(sharded: ShardedFids, native: bool) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in sharded._asdict().items():
        if name.startswith("shards_row_split") and not native:
            continue
        if isinstance(value, dict):
            flat.update({f"{PREFIX}{name}/{key}": item for key, item in value.items()})
        else:
            flat[f"{PREFIX}{name}"] = value
    return flat
