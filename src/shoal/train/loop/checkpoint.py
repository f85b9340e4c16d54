"""Checkpoints of a run: a folder with rows, dense tensors, positions and metrics, which appears once complete.

``<dir>/ckpt-<step>/`` holds the tables' record files (one set per table for all ranks, readable by `shoal.table`),
``dense.safetensors``, ``rank-00000.safetensors`` … and ``manifest.json``, written last, with a digest of every file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal import _core
from shoal.comm.ranks.ranks import Ranks
from shoal.durable import Draft, Saved, file_bases, temporary_path
from shoal.errors import ConfigError, DataError, missing_extra
from shoal.host import as_tensor
from shoal.table.checkpoint import naming, restore_table
from shoal.table.checkpoint.filters import restore_hash_filter, save_hash_filter
from shoal.table.checkpoint.incremental import expiry_to_json
from shoal.table.checkpoint.manifest import Manifest
from shoal.table.checkpoint.single import restore_files
from shoal.table.table import HashTable
from shoal.train.loop.measure.metrics import added

_DENSE = "dense.safetensors"
_FEATURES = "table.features."


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The contents of a checkpoint other than the rows."""

    step: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    reader: dict[str, Any]
    """Where this rank continues to read."""
    metrics: dict[str, np.ndarray]
    """This rank's metrics."""
    deal: Callable[[list[Any]], dict[str, Any]] = lambda readers: {}
    """Computes this rank's position from ``readers``, the positions of another number of ranks."""
    content: dict[str, Any] = field(default_factory=dict)
    """Plain values, the same on all ranks."""


class Target(NamedTuple):
    """The table that receives a checkpoint's rows on one rank."""

    table: HashTable
    way: str = "row"
    every: bool = False
    """Whether it gets all rows, instead of only those of this rank by ``id mod ranks``."""
    empty: bool = False
    """Whether it gets no rows, because another rank has them."""


def save_checkpoint(
    target: str,
    snapshot: Snapshot,
    tables: Sequence[HashTable],
    ranks: Ranks,
    make_room: Callable[[], None],
    ways: Sequence[str] = (),
) -> None:
    """Write a checkpoint to the folder ``target``. All ranks must call it together.

    Args:
        tables: the rows of this process, the same tables in the same order on every rank.
        make_room: called by the first rank when the new folder is complete; must remove ``target`` if it exists.
        ways: how each table is distributed over ranks; by row unless given.

    Raises:
        OSError: a rank could not write; every rank raises, and the new folder is removed.
    """
    draft = Draft(target, ranks.from_first(os.urandom(8).hex()))
    counts = ranks.gather([naming.shard_count(-1, table.size()) for table in tables])
    files = [max(each) for each in zip(*counts, strict=True)]
    bases = file_bases(table.name for table in tables)

    def begin() -> None:
        if ranks.first:
            draft.begin()

    def write() -> dict[str, Any]:
        path = os.path.join(draft.path, _rank_file(ranks.rank))
        _write_tensors(path, _rank_tensors(snapshot))
        rows = [_write_rows(draft, one, bases, ranks, each) for one, each in zip(tables, files, strict=True)]
        return {"reader": snapshot.reader, "rows": rows}

    def publish() -> None:
        if ranks.first:
            _write_tensors(os.path.join(draft.path, _DENSE), _dense_tensors(snapshot))
            written = list(zip(*(part["rows"] for part in parts), strict=True))  # by table, then by rank
            spread = ways or ["row"] * len(tables)
            described = [
                _describe(table, bases[table.name], each) | {"way": way}
                for table, each, way in zip(tables, written, spread, strict=True)
            ]
            content = {"tables": described, **snapshot.content, "world": ranks.world_size}
            content["readers"] = [part["reader"] for part in parts]
            digests = {name: digest for each in written for part in each for name, digest in part["files"].items()}
            draft.seal(Manifest(kind="full", step=snapshot.step, content=content).fields(), digests)
            make_room()
            draft.publish()

    try:
        ranks.together(begin)
        parts = ranks.together(write)
        ranks.together(publish)
    except BaseException:
        if ranks.first:
            draft.discard()
        raise


def load_checkpoint(saved: Saved, snapshot: Snapshot, tables: Sequence[HashTable | Target], ranks: Ranks) -> Manifest:
    """Load model, optimizer and rows from a folder; ``snapshot`` gets this rank's position and metrics.

    With another number of ranks, rows and unread data (``snapshot.deal``) are redistributed; an admission filter
    counts from 0. Ranks do not communicate.

    Raises:
        DataError: a file is damaged. Model and optimizer are unchanged; the rows must be loaded again.
    """
    manifest = Manifest.of(saved)
    content = manifest.content
    try:
        same = content.get("world") == ranks.world_size
        dense = _read_tensors(saved, _DENSE)
        of_ranks = [_read_tensors(saved, _rank_file(rank)) for rank in _ranks_for(ranks, content.get("world", 0))]
        readers = content["readers"]
        reader = readers[ranks.rank] if same else snapshot.deal(readers)
        for table in tables:
            target = table if isinstance(table, Target) else Target(table)
            _load_rows(saved, content["tables"], target, ranks, same)
    except (KeyError, IndexError, TypeError) as error:  # only a manifest without a digest can be changed unnoticed
        raise DataError(f"{saved.manifest} was not written by `shoal train` ({error!r})") from error
    _load_dense(dense, snapshot)
    snapshot.step = manifest.step
    snapshot.reader = reader
    states = [one.pop("rng") for one in of_ranks]
    if same:
        torch.set_rng_state(states[0])
    if of_ranks:
        metrics = [{name.removeprefix("metrics."): t.numpy() for name, t in one.items()} for one in of_ranks]
        snapshot.metrics = metrics[0] if same or not metrics[0] else added(metrics)
    return manifest


def _ranks_for(ranks: Ranks, world: int) -> Sequence[int]:
    """The ranks of the checkpoint whose metrics this rank continues: its own, or if the number of ranks has changed,
    all of them on the first rank."""
    if world == ranks.world_size:
        return [ranks.rank]
    return range(world) if ranks.first else []


def read_dense(saved: Saved) -> dict[str, Tensor]:
    """The dense tensors of a checkpoint: ``model.NAME`` and ``optimizer.INDEX.NAME``."""
    return _read_tensors(saved, _DENSE)


def check_identity(saved: Saved, wanted: dict[str, Any]) -> None:
    """Raise ``ConfigError`` if a checkpoint was written with other data, tables or another model."""
    had = Manifest.of(saved).content.get("identity")
    if not isinstance(had, dict):
        raise DataError(f"checkpoint {saved.folder} was not written by `shoal train`")
    was, now = dict(_flat(had)), dict(_flat(wanted))
    name = next((name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)), None)
    if name is None:
        return
    then = f"with {name} = {was[name]!r}" if name in was else f"without {name}"
    wants = repr(now[name]) if name in now else "none"
    if name.startswith(_FEATURES):
        section = name.rpartition(".")[0]
        theirs, ours = (any(key.startswith(f"{section}.") for key in one) for one in (was, now))
        if theirs != ours:
            then, wants = f"{'with' if theirs else 'without'} settings in [{section}]", "some" if ours else "none"
    raise ConfigError(
        f"checkpoint {saved.folder} was written {then}, the configuration has {wants}; change it back, or start over "
        "with --fresh (which moves the checkpoints aside) or in another folder"
    )


# --- rows -------------------------------------------------------------------------------------------------------------


def _write_rows(draft: Draft, table: HashTable, bases: dict[str, str], ranks: Ranks, each: int) -> dict[str, Any]:
    """Every rank writes ``each`` files; together they are the files of one table."""
    file = bases[table.name]
    base = os.path.join(draft.path, file)
    paths = [naming.shard_path(base, ranks.rank * each + i, each * ranks.world_size) for i in range(each)]
    written = _core.save([table.source(stale=True)], [temporary_path(path) for path in paths], paths, False, 0, None)
    save_hash_filter(table.hash_filter, _filter_base(draft.path, file, len(bases), ranks), True)
    return {
        "files": {os.path.basename(path): digest for path, (_, digest) in zip(paths, written, strict=True)},
        "rows": sum(sum(rows) for rows, _ in written),
        **table.training_state(),
    }


def _describe(table: HashTable, file: str, parts: Sequence[Any]) -> dict[str, Any]:
    """The table's part of the manifest."""
    return {
        "name": table.name,
        "file": file,
        "shards": sum(len(part["files"]) for part in parts),
        "rows": sum(part["rows"] for part in parts),
        "removed": 0,
        "dim": table.dim_size,
        "max_update_time": max(part["max_update_time"] for part in parts),
        "scales": table.training_state()["scales"],
        "expiry": expiry_to_json(table.table_config.slot_expire_time_config),
        "calls": [part["calls"] for part in parts],
        "empty_rank0": False,
        **(table.budget_report() if isinstance(table, HashTable) else {}),
    }


def _filter_base(folder: str, file: str, tables: int, ranks: Ranks) -> str:
    """The path of the counts of a table's filter; without the table's name if the checkpoint has only one table."""
    return os.path.join(folder, f"filter-{file}-{ranks.rank:05d}" if tables > 1 else f"filter-{ranks.rank:05d}")


def _load_rows(saved: Saved, tables: list[dict[str, Any]], target: Target, ranks: Ranks, same: bool) -> None:
    table = target.table
    described = next((one for one in tables if one["name"] == table.name), None)
    if described is None:
        raise ConfigError(
            f"checkpoint {saved.folder} has no rows of table {table.name!r}; check whether they were on parameter "
            "servers"
        )
    base = os.path.join(saved.folder, described["file"])
    # Checkpoints without "empty_rank0" come from a version in which rank 0 of more than four ranks had no rows.
    way = described.get("way", "row")
    as_it_was = way == target.way and way.partition(":")[0] in ("row", "table")
    if same and as_it_was and not described.get("empty_rank0", ranks.world_size > 4):
        files = naming.open_shards(base, saved)
        each = len(files.paths) // ranks.world_size
        mine = slice(ranks.rank * each, (ranks.rank + 1) * each)
        own = naming.Shards(files.paths[mine], files.names[mine], saved)
        counts = _filter_base(saved.folder, described["file"], len(tables), ranks)

        def restore_counts() -> None:
            saved.verify({f"{os.path.basename(counts)}.manifest"} & saved.files.keys())  # has the digests of the counts
            restore_hash_filter(table.hash_filter, counts, True)

        restore_files(table, [own], restore_counts)
        table.set_training_state({"calls": described["calls"][ranks.rank]})
    elif target.empty:
        table.clear()
    else:
        restore_table(table, base, shard=None if target.every else (ranks.rank, ranks.world_size), saved=saved)
    table.set_training_state({"max_update_time": described["max_update_time"], "scales": described["scales"]})


# --- dense tensors ----------------------------------------------------------------------------------------------------


def _dense_tensors(snapshot: Snapshot) -> dict[str, Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in snapshot.model.state_dict().items()}
    for index, state in snapshot.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"optimizer.{index}.{name}"] = as_tensor(value)
    return tensors


def load_model(saved: Saved, model: nn.Module) -> None:
    """Load the weights of a checkpoint into ``model``; raises DataError if the file is damaged."""
    _load_weights(_read_tensors(saved, _DENSE), model)


def _load_weights(tensors: dict[str, Tensor], into: nn.Module) -> None:
    model = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    try:
        into.load_state_dict(model)
    except RuntimeError as error:
        raise ConfigError(f"the checkpoint's dense tensors do not fit the model: {error}") from None


def _load_dense(tensors: dict[str, Tensor], snapshot: Snapshot) -> None:
    _load_weights(tensors, snapshot.model)
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            states.setdefault(int(index), {})[key] = tensor
    groups = snapshot.optimizer.state_dict()["param_groups"]
    snapshot.optimizer.load_state_dict({"state": states, "param_groups": groups})


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _rank_tensors(snapshot: Snapshot) -> dict[str, Tensor]:
    metrics = {f"metrics.{name}": torch.from_numpy(np.ascontiguousarray(a)) for name, a in snapshot.metrics.items()}
    return {"rng": torch.get_rng_state(), **metrics}


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise missing_extra("safetensors", "train") from None
    return safetensors.torch


def _write_tensors(path: str, tensors: dict[str, Tensor]) -> None:
    data = _safetensors().save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_tensors(saved: Saved, name: str) -> dict[str, Tensor]:
    data = saved.read(name)
    try:
        return _safetensors().load(data)
    except Exception as error:
        raise DataError(f"{saved.path(name)} cannot be read ({error})") from error


def _flat(value: Any, name: str = "") -> Any:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, list(value) if isinstance(value, tuple | list) else value
