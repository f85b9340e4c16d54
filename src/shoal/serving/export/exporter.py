"""`ModelExporter`: writes a net and its tables as a version that a model server can load."""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.comm.ranks.ranks import Ranks
from shoal.errors import ConfigError
from shoal.serving.cluster.rollout import newest_everywhere
from shoal.serving.export.manifest import SignatureSpec, TableSpec
from shoal.serving.export.plan import (
    EXPORT_DIR_BASE,
    Drafts,
    Writer,
    checked_version,
    free_second,
    plan_export,
    write_versions,
)
from shoal.serving.export.retention import add_export, delete_old_exports
from shoal.serving.export.tables import export_tables, manifest_of, ps_writer, with_unique_names
from shoal.serving.export.trace import describe, example_inputs, export_program, input_specs, pooled_specs
from shoal.serving.server.program import REMOTE_NET, Feature
from shoal.serving.server.servable import Servable, TableView, as_views
from shoal.serving.server.table_signatures import table_signatures
from shoal.table.config.messages import FloatCompressorConfig
from shoal.table.export_mode import ExportMode


class ModelExporter:
    """Exports a model: an entry with the net, and the tables either with it (standalone) or in separate shards.

    Args:
        model_dir: the model's directory; exports go to ``<model_dir>/exported_models``.
        model_name: recorded in every manifest.
        net: called with ``{alias: tensor}`` as keyword arguments; features are already pooled.
        features: the sparse inputs.
        dense: alias -> an example ``[B, ...]`` of each dense input.
        codec: how serving rows are stored; None = each table's own compressor.
        warmup: a warm-up file to copy next to the entry.
        compiled: also compile the net with AOTInductor if there is a C++ compiler; an export then takes about ten
            seconds longer. `shoal serve --compiled` runs the compiled net.
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
        compiled: bool = False,
    ) -> None:
        self.model_dir = Path(model_dir)
        self.base = self.model_dir / export_dir_base
        self.model_name = model_name
        self._net, self._features, self._dense = net, dict(features), dict(dense or {})
        self._codec, self._skip_zero = codec, skip_zero_embedding
        self._deadline, self._warmup, self._compiled = max_rpc_deadline_millis, warmup, compiled

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
        ranks: Ranks | None = None,
    ) -> dict[str, str]:
        """Write one version and return sub-graph -> directory.

        Args:
            tables: the tables of each shard, as for ``ModelServer.serve_tables``; a standalone export puts all of them
                into one directory.
            with_remote_gpu: put the net into ``dense_0``, which the entry calls with pooled rows.
            existing_steps: steps of the checkpoints that exist; exports of other steps are deleted.

        An entry uses the shards of its own version; the entry of a ``dense_only`` export, the newest version that all
        shards had when it was written.

        A distributed export is atomic: servers ignore its directories until the last one has its final name, and ignore
        those of an export that was killed (`shoal.serving.export.whole`).

        With ``ranks`` (`shoal.comm.default_ranks`) all ranks of synchronous training call this together, each with its
        own shard; if one fails, all raise and nothing is published. With only ``rank``, each process writes its part
        independently, and parts left by a killed run are reused if their step is the same.
        """
        if ranks is not None:
            rank, num_ps = ranks.rank, ranks.world_size
        shards = [as_views(each) for each in tables]
        count = num_ps if num_ps is not None else len(shards)
        if mode == ExportMode.STANDALONE:
            if dense_only:
                raise ConfigError(
                    "a dense-only export must use ExportMode.DISTRIBUTED; a standalone export contains everything"
                )
            version = free_second(self.base) if timestamp is None else checked_version(timestamp, "timestamp")
            plan = {"": os.path.join(self.base, str(version))}
        else:
            plan = plan_export(self.base, count, timestamp, global_step, rank, with_remote_gpu, dense_only)
        save = {} if mode == ExportMode.STANDALONE else self._save(set(plan), count, global_step, rank, ranks)
        if include_graphs is not None:
            wanted, save = set(include_graphs), {}
            plan = {name: where for name, where in plan.items() if name in wanted}
        shared = Path(shared_assets) if shared_assets is not None else None
        writers = {}
        for name, where in sorted(plan.items(), key=lambda each: each[0] == "entry"):  # last: the entry
            if name.startswith("ps_"):
                shard = int(name[3:])
                views = shards[shard] if rank is None else shards[0]
                writers[where] = ps_writer(
                    where, views,
                    model_name=self.model_name, sub_graph=name, global_step=global_step, shared_assets=shared,
                    codec=self._codec, skip_zero_embedding=self._skip_zero,
                )  # fmt: skip
            else:
                rows = newest_everywhere(self.base, count) if dense_only else int(Path(where).name)
                writers[where] = self._writer(name, where, global_step, shards, count, shared, with_remote_gpu, rows)
        new = _together(ranks, writers, save) if ranks is not None else write_versions(writers, save)
        for where in plan.values():
            if where in new:
                add_export(Path(where).parent, where, global_step)
            if existing_steps is not None:
                delete_old_exports(Path(where).parent, {*existing_steps, global_step})
        return plan

    def _save(self, names: set[str], count: int, step: int, rank: int | None, ranks: Ranks | None) -> dict[str, Any]:
        """The manifest fields that all parts of a distributed export share."""
        if ranks is not None:
            names = {name for of_rank in ranks.gather(sorted(names)) for name in of_rank}
            token = ranks.from_first(secrets.token_hex(8) if ranks.first else None)
        elif rank is not None:
            names |= {"entry", *(f"ps_{shard}" for shard in range(count) if f"ps_{rank}" in names)}
            token = f"step-{step}"
        else:
            token = secrets.token_hex(8)
        for name in names:  # a part counts as missing only if its folder exists
            os.makedirs(self.base / name, exist_ok=True)
        return {"save": token, "parts": sorted(names)}

    def _writer(
        self,
        name: str,
        where: str,
        step: int,
        shards: list[list[TableView]],
        count: int,
        shared: Path | None,
        with_remote_gpu: bool,
        shard_version: int | None,
    ) -> Callable[[Path], dict[str, Any]]:
        dims = {
            alias: view.dims[view.sub_tables.index(sub)]
            for views in shards
            for view in views
            for alias, sub in view.slots.items()
        }
        if missing := sorted({each.slot for each in self._features.values()} - dims.keys()):
            raise ConfigError(
                f"model {self.model_name!r}: no table has the slots {missing}; the tables have {sorted(dims)}"
            )

        def write(directory: Path) -> dict[str, Any]:
            net_is_here = not (name == "entry" and with_remote_gpu)
            file = directory / "variables" / "program.pt2" if net_is_here else None
            try:
                inputs_and_shapes = example_inputs(self._features, self._dense, dims)
                net = export_program(self._net, *inputs_and_shapes, file, compiled=self._compiled)
            except ConfigError as error:
                raise ConfigError(f"model {self.model_name!r}: {error}") from error
            tables: list[TableSpec] = []
            if name.startswith("dense"):
                inputs = pooled_specs(self._features, self._dense, dims, net.lengths)
                signatures = {REMOTE_NET: SignatureSpec(inputs, net.outputs, net.row_wise)}
                program = describe({}, list(net.outputs), compiled=net.compiled)
            else:
                inputs = input_specs(self._features, self._dense, net.lengths)
                signatures = {"serving_default": SignatureSpec(inputs, net.outputs, net.row_wise)}
                program = describe(
                    self._features, list(net.outputs), remote=name != "", num_ps=count, dims=dims,
                    max_rpc_deadline_millis=self._deadline, remote_net=not net_is_here, shard_version=shard_version,
                    compiled=net.compiled,
                )  # fmt: skip
            read_at = None
            if not name:
                read_at = time.time() if shared is None else None
                views = with_unique_names(shards)
                tables = export_tables(
                    directory, views, shared_assets=shared, final=Path(where), codec=self._codec,
                    skip_zero_embedding=self._skip_zero,
                )  # fmt: skip
                pushes = table_signatures(views, lambda: Servable({}))
                signatures |= {key: each.spec for key, each in pushes.items() if each.push}
            if self._warmup is not None and name in ("", "entry"):
                (directory / "assets.extra").mkdir()
                shutil.copy(self._warmup, directory / "assets.extra" / "tf_serving_warmup_requests")
            return manifest_of(
                where, self.model_name, name or "standalone", step, signatures, tables, program, read_at
            ).fields()

        return write


def _together(ranks: Ranks, writers: Mapping[str, Writer], save: Mapping[str, Any]) -> set[str]:
    """`write_versions` on all ranks: nothing is renamed before all have written, and the entry is renamed last."""
    with Drafts(writers, save) as drafts:
        ranks.together(drafts.write)
        is_entry = lambda final: Path(final).parent.name == "entry"  # noqa: E731
        new = ranks.together(lambda: sorted(drafts.publish(lambda final: not is_entry(final))))[ranks.rank]
        return {*new, *ranks.together(lambda: sorted(drafts.publish(is_entry)))[ranks.rank]}
