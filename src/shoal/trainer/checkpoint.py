"""Checkpoints of a run: a folder with rows, dense tensors, positions and metrics, which is there when it is whole.

``<dir>/ckpt-<step>/`` holds the table's record files (one set for all ranks, readable by `shoal.table`),
``dense.safetensors``, ``rank-00000.safetensors`` … and ``manifest.json``, written last. The folder is filled under
another name and renamed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal import _core
from shoal.durable import MANIFEST, Draft, read_folder, remove_folder, temporary_path
from shoal.errors import ConfigError, DataError, missing_extra
from shoal.host import as_tensor
from shoal.ops.reorder.op import empty_shards
from shoal.table.checkpoint import list_checkpoints, naming, restore_table
from shoal.table.checkpoint.filters import restore_hash_filter, save_hash_filter
from shoal.table.checkpoint.incremental import _expiry_to_json
from shoal.table.checkpoint.manifest import Manifest
from shoal.table.checkpoint.single import check_distinct, naming_table
from shoal.table.table import HashTable
from shoal.trainer.ranks import Ranks


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """What a checkpoint is made of, besides the rows."""

    step: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    reader: dict[str, Any]
    """Where this rank reads on."""
    metrics: dict[str, np.ndarray]
    """This rank's."""
    content: dict[str, Any] = field(default_factory=dict)
    """Plain values, the same on all ranks."""


def save_checkpoint(directory: str, snapshot: Snapshot, table: HashTable | None, ranks: Ranks, keep: int) -> str:
    """All ranks together; the folder that came into being, or was there."""
    name = f"ckpt-{snapshot.step:08d}"
    target = os.path.join(directory, name)
    there, token = ranks.from_first((os.path.isfile(os.path.join(target, MANIFEST)), secrets.token_hex(8)))
    if there:
        return target
    folder = Draft(target, token)
    draft = folder.path
    if ranks.first:
        folder.begin()
    ranks.barrier()
    try:
        described = _save_rows(draft, table, ranks) if table is not None else []
        if table is not None:
            save_hash_filter(table.hash_filter, _filter_base(draft, ranks), True)
        _save_tensors(os.path.join(draft, f"rank-{ranks.rank:05d}.safetensors"), _rank_tensors(snapshot))
        readers = ranks.gather(snapshot.reader)  # all ranks have written
        if ranks.first:
            _save_tensors(os.path.join(draft, "dense.safetensors"), _dense_tensors(snapshot))
            content = {"tables": described, **snapshot.content, "world": ranks.world, "readers": readers}
            folder.seal(Manifest(kind="full", step=snapshot.step, content=content).fields())
            folder.publish()
            _prune(directory, keep)
        ranks.barrier()
    except BaseException:
        if ranks.first:
            folder.discard()
        raise
    return target


def newest(directory: str) -> str | None:
    """The newest complete checkpoint."""
    found = list_checkpoints(directory) if os.path.isdir(directory) else []
    return found[-1].path if found else None


def load_checkpoint(path: str, snapshot: Snapshot, table: HashTable | None, ranks: Ranks) -> Manifest:
    """Fills model, optimizer and rows from a folder; ``snapshot`` gets this rank's position and metrics.

    On another number of ranks the rows are shared out anew; positions do not fit then and ``reader`` stays empty, and
    an admission filter counts from 0.
    """
    manifest = Manifest.of(read_folder(path, unsealed=True))
    content = manifest.content
    same = content.get("world") == ranks.world
    _load_dense(_load_tensors(os.path.join(path, "dense.safetensors")), snapshot)
    if table is not None:
        _load_rows(path, manifest, table, ranks, same)
    snapshot.step = manifest.step
    if same:
        snapshot.reader = content["readers"][ranks.rank]
        tensors = _load_tensors(os.path.join(path, f"rank-{ranks.rank:05d}.safetensors"))
        torch.set_rng_state(tensors.pop("rng"))
        snapshot.metrics = {name.removeprefix("metrics."): tensor.numpy() for name, tensor in tensors.items()}
    return manifest


def check_identity(path: str, wanted: dict[str, Any]) -> Manifest:
    """Refuses a checkpoint of a run with other data, table or model."""
    manifest = Manifest.read(os.path.join(path, MANIFEST))
    had = manifest.content.get("identity")
    if not isinstance(had, dict):
        raise DataError(f"checkpoint {path} is none of `shoal train`")
    was, now = dict(_flat(had)), dict(_flat(wanted))
    for name in sorted(was.keys() | now.keys()):
        if was.get(name) != now.get(name):
            raise ConfigError(
                f"checkpoint {path} was made with {name} = {was.get(name)!r}, the configuration has {now.get(name)!r}; "
                "set it back, or begin anew with --fresh or in another folder"
            )
    return manifest


# --- rows -------------------------------------------------------------------------------------------------------------


def _save_rows(draft: str, table: HashTable, ranks: Ranks) -> list[dict[str, Any]]:
    """Every rank writes as many files; together they are the files of one table."""
    each = max(ranks.gather(naming.shard_count(-1, table.size())))
    base = os.path.join(draft, naming.file_base(table.name))
    count = each * ranks.world
    paths = [naming.shard_path(base, ranks.rank * each + i, count) for i in range(each)]
    native = table._native
    rows = _core.save([(native, None, 0)], [temporary_path(path) for path in paths], paths, False, 0, None)
    mine = {
        "rows": sum(sum(of_file) for of_file, _ in rows),
        "max_update_time": native.max_update_time(),
        "calls": native.calls(),
    }
    parts = ranks.gather(mine)
    return [
        {
            "name": table.name,
            "file": os.path.basename(base),
            "shards": count,
            "rows": sum(part["rows"] for part in parts),
            "removed": 0,
            "dim": table.dim_size,
            "max_update_time": max(part["max_update_time"] for part in parts),
            "scales": native.scales(),
            "expiry": _expiry_to_json(table.table_config.slot_expire_time_config),
            "calls": [part["calls"] for part in parts],
        }
    ]


def _filter_base(folder: str, ranks: Ranks) -> str:
    return os.path.join(folder, f"filter-{ranks.rank:05d}")


def _load_rows(path: str, manifest: Manifest, table: HashTable, ranks: Ranks, same: bool) -> None:
    described = next((one for one in manifest.content["tables"] if one["name"] == table.name), None)
    if described is None:
        raise DataError(f"checkpoint {path} has no rows of table {table.name!r}; were they on parameter servers?")
    base = os.path.join(path, described["file"])
    if same:
        paths = naming.find_shards(base)
        each = len(paths) // ranks.world
        with naming_table(table.name):
            load = _core.Load(table._native, True, *naming.shard_rule(None))
            taken, _ = load.read(paths[ranks.rank * each : (ranks.rank + 1) * each], None)
            check_distinct(load, taken)
            load.commit()
        table._native.set_calls(described["calls"][ranks.rank])
        restore_hash_filter(table.hash_filter, _filter_base(path, ranks), True)
    else:
        restore_table(table, base, shard=(ranks.rank, ranks.world, bool(empty_shards(ranks.world))))
    table._native.raise_max_update_time(described["max_update_time"])
    table._native.set_scales(described["scales"])


# --- dense tensors ----------------------------------------------------------------------------------------------------


def _dense_tensors(snapshot: Snapshot) -> dict[str, Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in snapshot.model.state_dict().items()}
    for index, state in snapshot.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"optimizer.{index}.{name}"] = as_tensor(value)
    return tensors


def _load_dense(tensors: dict[str, Tensor], snapshot: Snapshot) -> None:
    model = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    try:
        snapshot.model.load_state_dict(model)
    except RuntimeError as error:
        raise DataError(f"the checkpoint's dense tensors do not fit the model: {error}") from None
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            states.setdefault(int(index), {})[key] = tensor
    groups = snapshot.optimizer.state_dict()["param_groups"]
    snapshot.optimizer.load_state_dict({"state": states, "param_groups": groups})


def _rank_tensors(snapshot: Snapshot) -> dict[str, Tensor]:
    metrics = {f"metrics.{name}": torch.from_numpy(np.ascontiguousarray(a)) for name, a in snapshot.metrics.items()}
    return {"rng": torch.get_rng_state(), **metrics}


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise missing_extra("safetensors", "train") from None
    return safetensors.torch


def _save_tensors(path: str, tensors: dict[str, Tensor]) -> None:
    _safetensors().save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _load_tensors(path: str) -> dict[str, Tensor]:
    try:
        return _safetensors().load_file(path)
    except Exception as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _prune(directory: str, keep: int) -> None:
    for old in list_checkpoints(directory)[:-keep]:
        remove_folder(old.path)
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(".tmp-ckpt-"):  # left by a process that was killed
                shutil.rmtree(entry.path, ignore_errors=True)


def _flat(value: Any, name: str = "") -> Any:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, list(value) if isinstance(value, tuple | list) else value
