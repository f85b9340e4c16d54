"""A model with tables in all ways, and the functions that ranks run, for the tests of checkpoints of torch."""

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shoal
from shoal.nn import EmbeddingBagCollection, load_dcp
from shoal.sharded import AllToAllHashTable

DIMS = {"a": 4, "b": 6, "c": 8, "d": 3}
MIXED = {"a": "row", "b": "table:1", "c": "column", "d": "data"}
OTHER = {"a": "column", "b": "row", "c": "table:0", "d": "row"}
NOW = 1_700_000_000


class Model(nn.Module):
    """Bags over four tables and a dense layer. ``ways`` None: local tables."""

    def __init__(self, ways=None, device="cpu", optimizer=None, **options):
        super().__init__()
        torch.manual_seed(0)
        options = {"optimizer": optimizer or shoal.Adam(lr=0.1), "seed": 3, "device": device, **options}
        make = shoal.HashTable if ways is None else AllToAllHashTable
        tables = {
            name: make(dim, name=name, **options, **({} if ways is None else {"way": ways[name]}))
            for name, dim in DIMS.items()
        }
        self.bags = EmbeddingBagCollection(tables, combiner="mean")
        self.bags.clock = lambda: NOW
        self.top = nn.Linear(sum(DIMS.values()), 1)

    def forward(self, batch):
        return self.top(self.bags(batch).cpu())


def batch(rank, step, ids=60):
    make = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randint(ids, (5, 3), generator=make) for name in DIMS}


def learn(model, rank, steps):
    for step in steps:
        model(batch(rank, step)).square().sum().backward()


def rows(model, ids=60):
    return {name: table.lookup(torch.arange(ids)).cpu() for name, table in model.bags.tables.items()}


def after(model, rank):
    """Rows once the first rank has trained a step more, which shows optimizer state as well as weights."""
    given = batch(0, 50) if rank == 0 else {name: torch.empty(0, 3, dtype=torch.int64) for name in DIMS}
    model.bags(given).square().sum().backward()
    return rows(model)


def times(model):
    """Of each table, the largest time that this process has."""
    return {name: getattr(table, "table", table).max_update_time for name, table in model.bags.tables.items()}


def save(rank, world, ways, path, how="state", device="cpu"):
    model = Model(ways, device)
    learn(model, rank, range(3))
    before = rows(model)
    if how == "async":
        future = dcp.async_save({"model": model.state_dict()}, checkpoint_id=path)
        learn(model, rank, range(10, 12))  # is not in the checkpoint
        future.result()
    elif how == "writer":
        future = dcp.async_save({"model": model}, storage_writer=dcp.FileSystemWriter(path))
        learn(model, rank, range(10, 12))
        future.result()
    elif how == "stateful":
        dcp.save({"model": model}, checkpoint_id=path)
    else:
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    return before, model.top.weight.detach()


def load(rank, world, ways, path, how="state", device="cpu"):
    model = Model(ways, device)
    learn(model, rank, [77])  # rows that the checkpoint replaces
    with torch.no_grad():
        model.top.weight.zero_()
    if how == "stateful":
        dcp.load({"model": model}, checkpoint_id=path)
    elif how == "helper":
        load_dcp(model, path, prefix="model.")
    else:
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
    found, weight = rows(model), model.top.weight.detach().clone()
    return found, weight, times(model), after(model, rank)
