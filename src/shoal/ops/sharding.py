"""`sharding_sparse_fids`: distribute a batch's fids to tables and shards, and return the position of each."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError
from shoal.ops import checks
from shoal.ops.layout.plan import Plan, plan_of
from shoal.proto.feature_configs import FeatureConfigs
from shoal.ragged import Ragged

_OP = "sharding_sparse_fids"
_KINDS = {"example": 0, "instance": 1, "example_batch": 2, "examplebatch": 2}
_EXAMPLE_BATCH = 2


class ShardedFids(NamedTuple):
    """The result of `sharding_sparse_fids`. List ``table * ps_num + shard`` holds one table's ids for one shard."""

    shards: dict[str, Tensor]
    """``"<table>:<shard>"`` -> int64 ids: feature by feature in sorted order, each in order of first occurrence."""
    fid_offset: Tensor
    """int64 per id occurrence: the upper 32 bits are the list, the lower ones the float offset in its buffer."""
    feature_offset: Tensor
    """int32: the start of each row in ``fid_offset``, then the total."""
    nfl_offset: Tensor
    """int64 holding uint32: each feature's first row, bit 31 set if it is shared, and ``len(feature_offset)``."""
    batch_size: Tensor
    nfl_size: Tensor
    feature_size: Tensor
    fid_size: Tensor
    emb_size: Tensor
    """int32: floats per list."""
    shards_row_split: dict[str, Tensor]
    """Per list, int64: the start of each of the table's features."""
    shards_row_split_size: dict[str, Tensor]


def sharding_sparse_fids(
    batch: Any,
    ps_num: int,
    feature_cfgs: Any,
    unique: bool | Callable[[], bool],
    input_type: str,
    *,
    version: int = 5,
) -> ShardedFids:
    """Shard the fids of a batch.

    Args:
        batch: a dict ``{feature: Ragged or list of B id lists}`` of v2 ids (with ``example_batch``, a 1-D tensor is a
            feature that all samples share); or a list of B serialized ``Example`` or ``Instance`` messages, or one
            serialized ``ExampleBatch``, or message objects. Names without a configuration are ignored.
        ps_num: shards per table; 0 means 1. An id's shard is its remainder.
        feature_cfgs: `FeatureConfigs`.
        unique: whether an id is listed once per feature (True), or at every occurrence.
        input_type: ``example``, ``example_batch`` (or ``examplebatch``) or ``instance``.
        version: the version of `fused_embedding_to_layout` that will read the offsets.

    A negative v2 id raises, and so do lists whose embeddings have 2^31 floats or more.
    """
    kind = _KINDS.get(input_type)
    if kind is None:
        raise ConfigError(f"{_OP}: input_type must be one of {', '.join(_KINDS)}, got {input_type!r}")
    if ps_num < 0:
        raise ConfigError(f"{_OP}: ps_num must be >= 0, got {ps_num}")
    unique = bool(unique() if callable(unique) else unique)
    plan = plan_of(feature_cfgs)
    table_names = _table_names(feature_cfgs)
    shards = max(1, int(ps_num))
    # `keep` keeps the memory behind the addresses in `columns` alive until finish has returned.
    if isinstance(batch, Mapping):
        columns, batch_size, keep = _from_dict(batch, plan, kind)
    else:
        keep = _core.WireBatch(kind, _serialized(batch, kind), list(plan.feature_names))
        columns, batch_size = keep.columns(), keep.batch
    table_of = {f: t for t, features in enumerate(plan.tables) for f in features}
    work = _core.ShardFids(
        [c[0] for c in columns], [c[1] for c in columns], [c[2] for c in columns], [c[3] for c in columns],
        [table_of[f] for f in range(len(columns))], list(plan.widths), len(plan.tables), shards, unique,
    )  # fmt: skip
    floats = work.list_floats
    lists = [torch.empty(n, dtype=torch.int64, device="cpu") for n in work.list_lengths]
    splits = [
        torch.empty(len(features) + 1, dtype=torch.int64, device="cpu")
        for features in plan.tables
        for _ in range(shards)
    ]
    fid_offset = torch.empty(work.fids, dtype=torch.int64, device="cpu")
    feature_offset = torch.empty(work.rows + 1, dtype=torch.int32, device="cpu")
    nfl_offset = torch.empty(len(columns) + 1, dtype=torch.int64, device="cpu")
    work.finish(
        version if version in (2, 3, 4, 5) else 1, [t.data_ptr() for t in lists], [t.data_ptr() for t in splits],
        fid_offset.data_ptr(), feature_offset.data_ptr(), nfl_offset.data_ptr(),
    )  # fmt: skip
    del keep
    names = [f"{table}:{p}" for table in table_names for p in range(shards)]
    return ShardedFids(
        dict(zip(names, lists, strict=True)), fid_offset, feature_offset, nfl_offset,
        _int32(batch_size), _int32(nfl_offset.shape[0]), _int32(feature_offset.shape[0]), _int32(fid_offset.shape[0]),
        _int32(*floats), dict(zip(names, splits, strict=True)),
        {name: _int32(s.shape[0]) for name, s in zip(names, splits, strict=True)},
    )  # fmt: skip


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def _table_names(feature_cfgs: Any) -> list[str]:
    configs = FeatureConfigs.FromString(feature_cfgs) if isinstance(feature_cfgs, bytes) else feature_cfgs
    return sorted({c.table for c in configs.feature_configs.values()}, key=lambda name: name.encode())


def _serialized(batch: Any, kind: int) -> list[bytes]:
    if isinstance(batch, bytes | bytearray | memoryview) or hasattr(batch, "SerializeToString"):
        if kind != _EXAMPLE_BATCH:
            raise ConfigError(
                f"{_OP}: batch must be a list of messages unless input_type is example_batch, got one "
                f"{type(batch).__name__}"
            )
        batch = [batch]
    messages = []
    for message in batch:
        if hasattr(message, "SerializeToString"):
            message = message.SerializeToString()
        if not isinstance(message, bytes | bytearray | memoryview):
            raise ConfigError(f"{_OP}: a message must be bytes or a protobuf message, got {type(message).__name__}")
        messages.append(bytes(message))
    return messages


def _from_dict(batch: Mapping[str, Any], plan: Plan, kind: int) -> tuple[list[tuple[int, int, int, bool]], int, Any]:
    """Addresses per configured feature, the batch size, and the tensors that the addresses point into."""
    size = ignored = None
    given: dict[str, tuple[Tensor, Tensor, bool]] = {}
    wanted = set(plan.feature_names)
    for name, value in batch.items():
        if name not in wanted:
            ignored = len(value) if isinstance(value, Ragged | list | tuple) else ignored
            continue
        if isinstance(value, Tensor):
            if kind != _EXAMPLE_BATCH or value.dim() != 1:
                raise ConfigError(
                    f"{_OP}: feature {name!r} must be a Ragged or a list of id lists"
                    f" (with example_batch also a 1-D tensor, shared), got a tensor of shape {list(value.shape)}"
                )
            ids = checks.int64(value, _OP, f"feature {name!r}").cpu().contiguous()
            given[name] = ids, torch.tensor([0, ids.numel()], device="cpu"), True
            continue
        if not isinstance(value, Ragged):
            try:
                value = Ragged.from_lists([row.tolist() if isinstance(row, Tensor) else row for row in value])
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{_OP}: feature {name!r} must be a Ragged or a list of id lists, got {value!r:.80} ({error})"
                ) from None
        value = checks.ragged(value, _OP, f"feature {name!r}")
        if size is not None and value.nrows() != size:
            raise ConfigError(f"{_OP}: feature {name!r} has {value.nrows()} samples, others have {size}")
        size = value.nrows()
        given[name] = value.tensor.cpu().contiguous(), value.row_splits.cpu().contiguous(), False
    size = ignored if size is None else size  # the batch may have none of the configured features
    if size is None and given:
        raise ConfigError(
            f"{_OP}: all features are shared, so the batch size is unknown; pass at least one that is not shared"
        )
    size = size or 0
    absent_splits = torch.zeros(2 if kind == _EXAMPLE_BATCH else size + 1, dtype=torch.int64, device="cpu")
    absent = torch.empty(0, dtype=torch.int64, device="cpu"), absent_splits, kind == _EXAMPLE_BATCH
    chosen = [given.get(name, absent) for name in plan.feature_names]
    columns = [(ids.data_ptr(), splits.data_ptr(), splits.numel() - 1, shared) for ids, splits, shared in chosen]
    return columns, size, chosen
