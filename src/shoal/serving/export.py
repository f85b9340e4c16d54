"""Exports: which directories, what is in them, and how they appear at once or not at all."""

import base64
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.serving.manifest import Manifest, SignatureSpec, TableSpec, TensorSpec
from shoal.serving.program import Feature, describe, input_specs, named_outputs
from shoal.serving.retention import add_export, delete_old_exports
from shoal.serving.servable import Servable, TableView, dtype_of, table_signatures
from shoal.table.export_mode import ExportMode
from shoal.table.messages import EmbeddingHashTableConfig, EntryConfig, FloatCompressorConfig

EXPORT_DIR_BASE = "exported_models"


def plan_export(
    export_dir_base: str | os.PathLike,
    num_ps: int,
    timestamp: int | None = None,
    global_step: int | None = None,
    rank: int | None = None,
    with_remote_gpu: bool = False,
    dense_only: bool = False,
) -> dict[str, str]:
    """sub-graph -> directory of what one process writes.

    ``rank`` given means full synchronous training, with ``num_ps`` the number of ranks: rank r writes ``ps_r``, rank 0
    also ``entry`` and ``dense_0``, and the version is the global step so that ranks agree. Otherwise the version is
    ``timestamp``, by default now; where a directory of that second exists, it waits for the next one.
    """
    if rank is None:
        shards = range(num_ps)
    elif not 0 <= rank < max(1, num_ps):
        raise ConfigError(f"plan_export: rank {rank} is out of range for {num_ps} ranks")
    else:
        shards = range(rank, min(rank + 1, num_ps))
    names = ["entry"] if not rank else []
    if not dense_only:
        names += [f"ps_{shard}" for shard in shards]
    if with_remote_gpu and not rank:
        names.append("dense_0")
    base = os.fspath(export_dir_base)
    if rank is not None:
        if global_step is None:
            raise ConfigError("plan_export: synchronous training names versions by step; give global_step")
        version = int(global_step)
    elif timestamp is not None:
        version = int(timestamp)
    else:
        version = int(time.time())
        while any(os.path.exists(os.path.join(base, name, str(version))) for name in names):
            time.sleep(max(0.0, version + 1 - time.time()))
            version = int(time.time())
    return {name: os.path.join(base, name, str(version)) for name in names}


def write_atomically(final: str | os.PathLike, write: Callable[[Path], None]) -> bool:
    """Lets ``write`` fill a temporary sibling and renames it to ``final``; False if ``final`` exists, which is kept."""
    final = Path(final)
    if final.exists():
        return False
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.parent / f".{final.name}-tmp-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        write(temporary)
        try:
            os.rename(temporary, final)
        except OSError:
            if not final.exists():
                raise
            return False  # somebody else was quicker
        return True
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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


def asset_prefix(table_name: str) -> str:
    return table_name.replace(":", "-").replace("/", "-")


def export_tables(
    directory: Path,
    views: Sequence[TableView],
    *,
    shared_assets: Path | None = None,
    final: Path | None = None,
    codec: FloatCompressorConfig | None = None,
    skip_zero_embedding: bool = False,
) -> list[TableSpec]:
    """Writes tables into ``assets/``, or points at a checkpoint's ``.assets`` directory, and describes them."""
    specs = []
    for view in views:
        prefix = asset_prefix(view.name)
        if shared_assets is None:
            (directory / "assets").mkdir(exist_ok=True)
            view.table.save(str(directory / "assets" / prefix))
            where = "assets"
        else:
            where = os.path.relpath(shared_assets.resolve(), (final or directory).resolve())
        configs = [serving_config(each, codec, skip_zero_embedding) for each in view.configs()]
        for config, rows in zip(configs, view.sub_rows(), strict=True):
            config.initial_capacity = max(1, rows)  # a replica's index fits what is loaded into it
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
    """Writes one embedding shard. ``tables`` is what ``ModelServer.serve_tables`` takes. False if it exists."""
    views = as_views(tables)
    shared = Path(shared_assets) if shared_assets is not None else None

    def write(directory: Path) -> None:
        specs = export_tables(
            directory,
            views,
            shared_assets=shared,
            final=Path(final),
            codec=codec,
            skip_zero_embedding=skip_zero_embedding,
        )
        signatures = {name: each.spec for name, each in table_signatures(views, lambda: Servable({})).items()}
        _manifest(final, model_name, sub_graph, global_step, signatures, specs, None).write(directory)

    return write_atomically(final, write)


def as_views(tables: Any) -> list[TableView]:
    if isinstance(tables, Mapping):
        return [
            TableView(table, None if hasattr(table, "raw_assign") else {alias: table.name})
            for alias, table in tables.items()
        ]
    return [TableView(table) for table in (tables if isinstance(tables, list | tuple) else [tables])]


def _manifest(
    final: str | os.PathLike,
    model_name: str,
    sub_graph: str,
    step: int,
    signatures: Mapping[str, SignatureSpec],
    tables: list[TableSpec],
    program: dict[str, Any] | None,
) -> Manifest:
    return Manifest(
        model_name=model_name,
        sub_graph=sub_graph,
        version=int(Path(final).name),
        global_step=step,
        signatures=dict(signatures),
        tables=tables,
        program=program,
    )


def export_program(
    net: torch.nn.Module,
    features: Mapping[str, Feature],
    dense: Mapping[str, torch.Tensor],
    dims: Mapping[str, int],
    file: Path,
) -> dict[str, TensorSpec]:
    """Traces the net for any batch size with ``torch.export``, saves it, and describes its outputs."""
    arguments: dict[str, torch.Tensor] = {}
    shapes: dict[str, dict[int, Any]] = {}
    rows = max([len(value) for value in dense.values()] + [2])
    batch = torch.export.Dim.AUTO
    for alias, feature in features.items():
        middle = (3,) if feature.combiner == "none" else ()
        arguments[alias] = torch.zeros(rows, *middle, dims[feature.slot])
        shapes[alias] = {0: batch, 1: torch.export.Dim.AUTO} if middle else {0: batch}
    for alias, value in dense.items():
        arguments[alias] = value if len(value) == rows else value[:1].expand(rows, *value.shape[1:]).clone()
        shapes[alias] = {0: batch}
    training = net.training
    net.eval()
    try:
        with torch.no_grad():
            results = named_outputs(net(**arguments))
            exported = torch.export.export(net, (), arguments, dynamic_shapes=shapes)
    finally:
        net.train(training)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(exported, str(file))
    return {alias: TensorSpec(dtype_of(value), [None, *value.shape[1:]]) for alias, value in results.items()}


class ModelExporter:
    """Exports a model: an entry with its net, and the tables, with it (standalone) or in shards beside it.

    Args:
        model_dir: the model's directory; exports go to ``<model_dir>/exported_models``.
        model_name: recorded in every manifest.
        net: called with ``{alias: tensor}`` as keywords; features arrive pooled.
        features: the sparse inputs.
        dense: alias -> an example ``[B, ...]`` of each dense input.
        codec: how serving rows are stored; None = each table's own compressor.
        warmup: a warm-up file that is copied beside the entry.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike,
        *,
        model_name: str,
        net: torch.nn.Module,
        features: Mapping[str, Feature],
        dense: Mapping[str, torch.Tensor] | None = None,
        codec: FloatCompressorConfig | None = None,
        skip_zero_embedding: bool = False,
        export_dir_base: str = EXPORT_DIR_BASE,
        max_rpc_deadline_millis: float = 30000,
        warmup: str | os.PathLike | None = None,
    ) -> None:
        self.model_dir = Path(model_dir)
        self.base = self.model_dir / export_dir_base
        self.model_name = model_name
        self._net, self._features, self._dense = net, dict(features), dict(dense or {})
        self._codec, self._skip_zero = codec, skip_zero_embedding
        self._deadline, self._warmup = max_rpc_deadline_millis, warmup

    def export(
        self,
        tables: Sequence[Any],
        *,
        global_step: int,
        mode: ExportMode = ExportMode.STANDALONE,
        timestamp: int | None = None,
        rank: int | None = None,
        num_ps: int | None = None,
        with_remote_gpu: bool = False,
        dense_only: bool = False,
        include_graphs: Iterable[str] | None = None,
        shared_assets: str | os.PathLike | None = None,
        existing_steps: Iterable[int] | None = None,
    ) -> dict[str, str]:
        """Writes one version and returns sub-graph -> directory.

        ``tables``: the tables of each shard, what ``ModelServer.serve_tables`` takes; standalone, all of them go into
        one directory. ``existing_steps``: steps of the checkpoints that exist; exports of other steps are deleted.
        """
        shards = [as_views(each) for each in tables]
        count = num_ps if num_ps is not None else len(shards)
        if mode == ExportMode.STANDALONE:
            if dense_only:
                raise ConfigError("a dense-only export needs ExportMode.DISTRIBUTED; standalone holds everything")
            plan = {"": os.path.join(self.base, str(timestamp if timestamp is not None else _free_second(self.base)))}
        else:
            plan = plan_export(self.base, count, timestamp, global_step, rank, with_remote_gpu, dense_only)
        if include_graphs is not None:
            wanted = set(include_graphs)
            plan = {name: where for name, where in plan.items() if name in wanted}
        shared = Path(shared_assets) if shared_assets is not None else None
        for name, where in plan.items():
            if name.startswith("ps_"):
                shard = int(name[3:])
                views = shards[shard] if rank is None else shards[0]
                wrote = export_ps(
                    where, views_tables(views),
                    model_name=self.model_name, sub_graph=name, global_step=global_step, shared_assets=shared,
                    codec=self._codec, skip_zero_embedding=self._skip_zero,
                )  # fmt: skip
            else:
                wrote = write_atomically(where, self._writer(name, where, global_step, shards, count, shared))
            if wrote:
                add_export(Path(where).parent, where, global_step)
            if existing_steps is not None:
                delete_old_exports(Path(where).parent, {*existing_steps, global_step})
        return plan

    def _writer(
        self, name: str, where: str, step: int, shards: list[list[TableView]], count: int, shared: Path | None
    ) -> Callable[[Path], None]:
        dims = {
            alias: view.dims[view.sub_tables.index(sub)]
            for views in shards
            for view in views
            for alias, sub in view.slots.items()
        }
        if missing := sorted({each.slot for each in self._features.values()} - dims.keys()):
            raise ConfigError(
                f"model {self.model_name!r}: no table serves the slots {missing}; tables serve {sorted(dims)}"
            )

        def write(directory: Path) -> None:
            outputs = export_program(
                self._net, self._features, self._dense, dims, directory / "variables" / "program.pt2"
            )
            signature = SignatureSpec(input_specs(self._features, self._dense), outputs)
            signatures = {"serving_default": signature}
            tables: list[TableSpec] = []
            remote = name != ""
            if not remote:
                views = [view for group in shards for view in group]
                tables = export_tables(
                    directory, views, shared_assets=shared, final=Path(where), codec=self._codec,
                    skip_zero_embedding=self._skip_zero,
                )  # fmt: skip
                pushes = table_signatures(views, lambda: Servable({}))
                signatures |= {key: each.spec for key, each in pushes.items() if each.push}
            program = describe(
                self._features, list(outputs), remote=remote, num_ps=count, dims=dims,
                max_rpc_deadline_millis=self._deadline,
            )  # fmt: skip
            if name.startswith("dense"):
                signatures = {"gpu_remote_call": signature}
            if self._warmup is not None and name in ("", "entry"):
                (directory / "assets.extra").mkdir()
                shutil.copy(self._warmup, directory / "assets.extra" / "tf_serving_warmup_requests")
            _manifest(where, self.model_name, name or "standalone", step, signatures, tables, program).write(directory)

        return write


def views_tables(views: Sequence[TableView]) -> Any:
    """The tables behind views, in the form that gives the same views again."""
    if any(view.multi for view in views):
        return [view.table for view in views]
    return {next(iter(view.slots)): view.table for view in views}


def _free_second(base: Path) -> int:
    version = int(time.time())
    while (base / str(version)).exists():
        time.sleep(max(0.0, version + 1 - time.time()))
        version = int(time.time())
    return version
