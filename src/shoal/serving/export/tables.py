"""Tables in an export: their files, how a replica stores them, and shards that hold only tables."""

import base64
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.durable import file_bases
from shoal.errors import ConfigError
from shoal.serving.export.manifest import Manifest, SignatureSpec, TableSpec
from shoal.serving.export.plan import Writer, write_version
from shoal.serving.server.servable import Servable, TableView, as_views
from shoal.serving.server.table_signatures import table_signatures
from shoal.table.checkpoint import save_multi_table, save_table
from shoal.table.checkpoint.assets import base_in
from shoal.table.config.messages import EmbeddingHashTableConfig, EntryConfig, FloatCompressorConfig


def serving_config(
    config: EmbeddingHashTableConfig, codec: FloatCompressorConfig | None = None, skip_zero_embedding: bool = False
) -> EmbeddingHashTableConfig:
    """The lookup-only form of a table's configuration. ``codec`` replaces each segment's compressor (default fp32)."""
    serving = EmbeddingHashTableConfig()
    serving.CopyFrom(config)
    serving.entry_config.entry_type = EntryConfig.SERVING
    serving.skip_zero_embedding = skip_zero_embedding
    serving.enable_feature_eviction = False
    for segment in serving.entry_config.segments:
        if codec is not None:
            segment.comp_config.CopyFrom(codec)
        elif segment.comp_config.WhichOneof("type") is None:
            segment.comp_config.fp32.SetInParent()
    return serving


def with_unique_names(shards: Sequence[Sequence[TableView]]) -> list[TableView]:
    """The tables of all shards for one export; if names collide, shard ``i``'s table becomes ``<name>_<i>``.

    Raises:
        ConfigError: two tables would still have the same name.
    """
    names = [view.name for views in shards for view in views]
    views = [
        view.renamed(f"{view.name}_{shard}") if names.count(view.name) > 1 else view
        for shard, of_shard in enumerate(shards)
        for view in of_shard
    ]
    named = [view.name for view in views]
    if twice := sorted({name for name in named if named.count(name) > 1}):
        raise ConfigError(f"names of an export's tables must be unique, got {twice[0]!r} twice; rename one")
    return views


def export_tables(
    directory: Path,
    views: Sequence[TableView],
    *,
    shared_assets: Path | None = None,
    final: Path | None = None,
    codec: FloatCompressorConfig | None = None,
    skip_zero_embedding: bool = False,
) -> list[TableSpec]:
    """Write tables into ``assets/``, or refer to a checkpoint's ``.assets`` directory; returns their specs."""
    specs = []
    bases = file_bases(view.name for view in views)
    for view in views:
        prefix = bases[view.name] if shared_assets is None else base_in(os.fspath(shared_assets), view.table.name)
        if shared_assets is None:
            (directory / "assets").mkdir(exist_ok=True)
            save = save_multi_table if view.multi else save_table
            save(view.table, str(directory / "assets" / prefix), state=False)
            where = "assets"
        else:
            where = os.path.relpath(shared_assets.resolve(), (final or directory).resolve())
        configs = [serving_config(each, codec, skip_zero_embedding) for each in view.configs()]
        for config, rows in zip(configs, view.sub_rows(), strict=True):
            config.initial_capacity = max(1, rows)  # a replica's index is sized for the rows that it loads
        specs.append(
            TableSpec(
                name=view.name,
                kind="multi" if view.multi else "hash",
                sub_tables=view.sub_tables if view.multi else [],
                dims=view.dims,
                asset_prefix=prefix,
                asset_dir=where,
                slots=view.slots,
                configs=[base64.b64encode(each.SerializeToString()).decode() for each in configs],
            )
        )
    return specs


def export_ps(
    final: str | os.PathLike,
    tables: Any,
    *,
    model_name: str,
    sub_graph: str,
    global_step: int,
    shared_assets: str | os.PathLike | None = None,
    codec: FloatCompressorConfig | None = None,
    skip_zero_embedding: bool = False,
) -> bool:
    """Write one embedding shard. ``tables``: as for ``ModelServer.serve_tables``. Returns False if it exists."""
    write = ps_writer(
        final, tables, model_name=model_name, sub_graph=sub_graph, global_step=global_step,
        shared_assets=shared_assets, codec=codec, skip_zero_embedding=skip_zero_embedding,
    )  # fmt: skip
    return write_version(final, write)


def ps_writer(
    final: str | os.PathLike,
    tables: Any,
    *,
    model_name: str,
    sub_graph: str,
    global_step: int,
    shared_assets: str | os.PathLike | None,
    codec: FloatCompressorConfig | None,
    skip_zero_embedding: bool,
) -> Writer:
    """The function that writes an embedding shard, as `export_ps` does."""
    views = with_unique_names([as_views(tables)])
    shared = Path(shared_assets) if shared_assets is not None else None

    def write(directory: Path) -> dict[str, Any]:
        begin = time.time()
        specs = export_tables(
            directory,
            views,
            shared_assets=shared,
            final=Path(final),
            codec=codec,
            skip_zero_embedding=skip_zero_embedding,
        )
        signatures = {name: each.spec for name, each in table_signatures(views, lambda: Servable({})).items()}
        return manifest_of(
            final, model_name, sub_graph, global_step, signatures, specs, None, None if shared else begin
        ).fields()

    return write


def manifest_of(
    final: str | os.PathLike,
    model_name: str,
    sub_graph: str,
    step: int,
    signatures: Mapping[str, SignatureSpec],
    tables: list[TableSpec],
    program: dict[str, Any] | None,
    rows_read_at: float | None = None,
) -> Manifest:
    """The manifest of a version whose directory will be ``final``."""
    return Manifest(
        model_name=model_name,
        sub_graph=sub_graph,
        version=int(Path(final).name),
        global_step=step,
        signatures=dict(signatures),
        tables=tables,
        program=program,
        rows_read_at=rows_read_at,
    )
