"""Moves rows with all their state between ranks, for checkpoints and when a table's way changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.comm.ranks.ranks import Ranks
from shoal.errors import DataError
from shoal.fid import shard_of
from shoal.sharded.all_to_all.ways import Slice
from shoal.table.checkpoint.tensors import KEPT, load_table_state, table_state
from shoal.table.config.entry import HashTableConfigInstance
from shoal.table.config.messages import EmbeddingHashTableConfig
from shoal.table.table import HashTable

_VECTOR = 0
_STATES: dict[str, list[tuple[int, int]]] = dict(_core.OPTIMIZERS)
State = dict[str, Tensor]
"""The result of `table_state`: ids, rows, state, times, config, scales, and kept if there is a budget."""
_NUMBERS = ("ids", "times", KEPT)
"""The fields with one number per row."""


def like(table: HashTable, begin: int = 0, end: int | None = None, *, device: Any = None) -> HashTable:
    """An empty table with the configuration of ``table``, for columns ``begin`` to ``end`` of its rows."""
    message = EmbeddingHashTableConfig()
    message.CopyFrom(table.config.table_config)
    if end is not None and end - begin != table.dim_size:
        message.entry_config.segments[0].dim_size = end - begin
    config = HashTableConfigInstance(message, table.config.learning_rate_fns, table.config.extra_restore_names)
    return HashTable.from_config(
        config,
        name=table.name,
        hash_filter=table.hash_filter,
        saver_parallel=table.saver_parallel,
        on_bad_gradient=table.on_bad_gradient,  # pyrefly: ignore[bad-argument-type]
        seed=table.seed,
        device=table.device if device is None else device,
        deterministic=getattr(table, "deterministic", False),
        clocked=table.clocked,
        first_column=begin,
        evict=table.own_policy,
    )


def empty_state(table: HashTable) -> State:
    """The state of ``table`` if it had no rows."""
    return table_state(like(table, device="cpu"))


def vectors_of(table: HashTable) -> int:
    """The number of values per column in a row's optimizer state."""
    kind = table.table_config.entry_config.segments[0].opt_config.WhichOneof("type")
    return [field for field, _ in _STATES[kind or "sgd"]].count(_VECTOR)


def cut(state: State, own: Slice, dim: int, vectors: int) -> State:
    """Cut a slice of columns out of rows. State per element is cut too; state per row is copied to every slice."""
    n, raw = state["ids"].numel(), state["state"]
    split = 4 * vectors * dim
    width = 4 * (own.end - own.begin)
    per_column = raw[:, :split].reshape(n, vectors, 4 * dim)[:, :, 4 * own.begin : 4 * own.end]
    per_column = per_column.reshape(n, vectors * width)
    return state | {
        "rows": state["rows"][:, own.begin : own.end].contiguous(),
        "state": torch.cat([per_column, raw[:, split:]], 1).contiguous(),
    }


def put_together(slices: list[tuple[Slice, State]], dim: int, vectors: int, name: str) -> State:
    """Join slices into rows. They must have the same ids; state per row is taken from the first slice."""
    first = slices[0][1]
    n = first["ids"].numel()
    rows = torch.empty(n, dim, device="cpu")
    per_column = torch.empty(n, vectors, 4 * dim, dtype=torch.uint8, device="cpu")
    order = first["ids"].argsort()
    for own, state in slices:
        theirs = state["ids"].argsort()
        if not torch.equal(state["ids"][theirs], first["ids"][order]):
            raise DataError(
                f"table {name!r}: its slices have rows of different ids ({n} and {state['ids'].numel()} rows); was it "
                "changed on only some ranks?"
            )
        width = own.end - own.begin
        rows[:, own.begin : own.end] = state["rows"][theirs]
        raw = state["state"][theirs, : 4 * vectors * width]
        per_column[:, :, 4 * own.begin : 4 * own.end] = raw.reshape(n, vectors, 4 * width)
    tail = first["state"][order, 4 * vectors * (slices[0][0].end - slices[0][0].begin) :]
    return first | {
        "ids": first["ids"][order],
        "times": first["times"][order],
        **({KEPT: first[KEPT][order]} if KEPT in first else {}),
        "rows": rows,
        "state": torch.cat([per_column.view(n, 4 * vectors * dim), tail], 1),
    }


def _of_rows(state: State) -> list[str]:
    """The names of a state's per-row fields."""
    return [name for name in ("ids", "times", KEPT, "rows", "state") if name in state]


def _exchanged(ranks: Ranks, parts: list[State]) -> list[State]:
    """Send ``parts[r]`` to rank ``r``; returns the received parts by rank. Rows of one part have one width."""
    got: list[State] = [{} for _ in parts]
    n = [part["ids"].numel() for part in parts]
    shapes = ranks.gather([n, [part["rows"].shape[1] for part in parts], [part["state"].shape[1] for part in parts]])
    for name in _of_rows(parts[0]):
        flat = torch.cat([part[name].reshape(-1) for part in parts])
        widths = [1 if name in _NUMBERS else own[1 if name == "rows" else 2][ranks.rank] for own in shapes]
        recv = [own[0][ranks.rank] * width for own, width in zip(shapes, widths, strict=True)]
        came = ranks.all_to_all(flat, [part[name].numel() for part in parts], recv)
        for rank, piece in enumerate(came.split(recv)):
            rows = shapes[rank][0][ranks.rank]
            got[rank][name] = piece if name in _NUMBERS else piece.view(rows, widths[rank])
    return got


def rows_by_id(table: Any) -> HashTable:
    """This rank's share (``id mod W``) of a table spread by column, as full rows. All ranks must call it together."""
    ranks, shape = table.exchange.ranks, table.shape
    vectors = vectors_of(shape)
    slices = table.way.slices(shape.dim_size, ranks.world_size)
    mine = next((own for own in slices if own.rank == ranks.rank), None)
    state = table_state(table.table) if mine is not None else empty_state(shape)
    owner = shard_of(state["ids"], ranks.world_size)
    came = _exchanged(ranks, [_some(state, owner == rank) for rank in range(ranks.world_size)])
    whole = put_together([(own, came[own.rank]) for own in slices], shape.dim_size, vectors, table.name)
    part = like(shape, device="cpu")
    load_table_state(part, empty_state(shape) | {"scales": state["scales"]} | {
        name: whole[name] for name in _of_rows(whole)
    })  # fmt: skip
    return part


def fill(table: Any, state: State) -> None:
    """Replace all rows of a table over ranks with the union of the ranks' ``state``. All must call it together."""
    ranks, shape, way = table.exchange.ranks, table.shape, table.way
    world = ranks.world_size
    if world == 1:
        load_table_state(table.table, state)
        return
    vectors = vectors_of(shape)
    none = _some(state, torch.zeros(state["ids"].numel(), dtype=torch.bool, device="cpu"))
    if way.kind == "row":
        owner = shard_of(state["ids"], world)
        parts = [_some(state, owner == rank) for rank in range(world)]
    elif way.kind == "data":
        parts = [state] * world
    else:
        parts = [none] * world
        for own in way.slices(shape.dim_size, world):
            parts[own.rank] = cut(state, own, shape.dim_size, vectors) if way.kind == "column" else state
    came = [part for part in _exchanged(ranks, parts) if part["ids"].numel()]
    fresh = table_state(like(table.table, table.table.first_column, None, device="cpu"))
    if came:
        fresh |= {name: torch.cat([part[name] for part in came]) for name in _of_rows(came[0])}
    fresh["scales"] = state["scales"]
    load_table_state(table.table, fresh)


def _some(state: State, keep: Tensor) -> State:
    return state | {name: state[name][keep] for name in _of_rows(state)}
