"""An exported directory as a servable: its tables restored into serving rows, its program loaded."""

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
from shoal.stamps import Stamp
from shoal.table import HashTable, HashTableConfigInstance
from shoal.table.config.messages import EmbeddingHashTableConfig
from shoal.table.multi import MultiHashTable, convert_to_cached_config

log = logging.getLogger(__name__)


def load_servable(directory: Path, root: Path, placement: Placement = ON_CPU) -> Servable:
    """Loads one version.

    Args:
        directory: the version's directory.
        root: no file outside is read.
        placement: where rows and net are to be.

    Raises:
        DataError: something is missing, broken or outside of ``root``.
    """
    directory = inside(root, directory)
    manifest = _verified(directory)
    views: dict[str, TableView] = {}
    for spec in manifest.tables:
        views[spec.name] = load_table(directory, spec, root, placement.device)
    stamps = {source: Stamp(*each) for source, each in (getattr(manifest, "stamps", None) or {}).items()}
    servable = Servable(
        {}, views, manifest.rows_read_at, stamps=stamps, version=manifest.version, exported_step=manifest.global_step
    )
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
    """The manifest, once every file that it names is known to be as it was written.

    Rows are checked while they are read, by the manifest next to them, which is checked here.
    """
    try:
        saved = read_folder(directory, unsealed=True)
        saved.verify(saved.files.keys() - digests_known(directory).keys())
        return Manifest.of(saved)
    except OSError as error:
        raise DataError(f"{error.filename or directory} cannot be read: {error.strerror}") from None


def load_table(directory: Path, spec: TableSpec, root: Path, device: str = "cpu") -> TableView:
    """One table of an export, restored into serving rows on a device."""
    if not spec.configs or len(spec.configs) != max(1, len(spec.sub_tables)):
        raise DataError(f"{directory}: table {spec.name!r} has {len(spec.configs)} configurations in the manifest")
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
        raise DataError(f"{directory}: table {spec.name!r} is of kind {spec.kind!r}; hash and multi are known")
    table.restore(str(basename))
    return TableView(table, spec.slots)
