"""Loads an exported directory as a servable: restores its tables into serving rows and loads its program."""

import base64
import logging
from functools import partial
from pathlib import Path

from shoal.durable import read_folder
from shoal.durable.replace import digests_known
from shoal.errors import DataError
from shoal.serving.export.manifest import Manifest, TableSpec, inside
from shoal.serving.server.net.placement import ON_CPU, Placement
from shoal.serving.server.program import load_program
from shoal.serving.server.rounds import Rounds
from shoal.serving.server.servable import Servable, TableView
from shoal.serving.server.table_signatures import table_signatures
from shoal.serving.server.trained import load_trained
from shoal.serving.server.warm_up import warm_up
from shoal.table import HashTable, HashTableConfigInstance
from shoal.table.config.messages import EmbeddingHashTableConfig
from shoal.table.multi import MultiHashTable, convert_to_cached_config

log = logging.getLogger(__name__)


def load_servable(directory: Path, root: Path, placement: Placement = ON_CPU) -> Servable:
    """Load one version.

    Args:
        directory: the version's directory.
        root: files outside this folder are not read.
        placement: where to put rows and net.

    Raises:
        DataError: a file is missing, damaged or outside ``root``.
    """
    directory = inside(root, directory)
    manifest = _verified(directory)
    views: dict[str, TableView] = {}
    for spec in manifest.tables:
        views[spec.name] = load_table(directory, spec, root, placement.device)
    servable = Servable(
        {}, views, manifest.rows_read_at, stamps=dict(manifest.stamps), version=manifest.version,
        exported_step=manifest.global_step,
    )  # fmt: skip
    signatures = table_signatures(list(views.values()), lambda: servable)
    if manifest.program is not None:
        for name in ("lookup", "raw_lookup"):  # a standalone export answers with its program
            signatures.pop(name, None)
        load = load_program if manifest.features is None else load_trained
        programs, servable.graphs, servable.program = load(directory, manifest, views, placement)
        signatures |= programs
    servable.signatures = signatures
    Rounds(servable)
    servable.warm_up = partial(warm_up, servable, directory)
    return servable


def _verified(directory: Path) -> Manifest:
    """The manifest, after verifying every file that it names.

    Rows are verified while they are read, against the manifest next to them, which is verified here.
    """
    try:
        saved = read_folder(directory, unsealed=True)
        saved.verify(saved.files.keys() - digests_known(directory).keys())
        return Manifest.of(saved)
    except OSError as error:
        raise DataError(f"cannot read {error.filename or directory}: {error.strerror}") from None


def load_table(directory: Path, spec: TableSpec, root: Path, device: str = "cpu") -> TableView:
    """One table of an export, restored into serving rows on a device."""
    if len(spec.configs) != (needed := max(1, len(spec.sub_tables))):
        raise DataError(
            f"{directory}: table {spec.name!r} must have {needed} configs in the manifest, got {len(spec.configs)}"
        )
    configs = [EmbeddingHashTableConfig.FromString(base64.b64decode(text)) for text in spec.configs]
    basename = inside(root, directory / spec.asset_dir) / spec.asset_prefix
    if basename.name != spec.asset_prefix:
        raise DataError(f"{directory}: asset_prefix {spec.asset_prefix!r} is not a file name")
    instances = [HashTableConfigInstance(config, [0.0] * len(config.entry_config.segments)) for config in configs]
    if spec.kind == "hash":
        table = HashTable.from_config(instances[0], name=spec.name, device=device)
    elif spec.kind == "multi":
        cached = convert_to_cached_config(dict(zip(spec.sub_tables, instances, strict=True)))
        table = MultiHashTable(cached, name=spec.name, device=device)
    else:
        raise DataError(f"{directory}: the kind of table {spec.name!r} must be hash or multi, got {spec.kind!r}")
    table.restore(str(basename))
    return TableView(table, spec.slots)
