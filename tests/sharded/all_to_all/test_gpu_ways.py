"""Ways to shard with rows on a GPU: the same results as on the CPU, with several processes on one GPU.

Without a GPU the first tests run in Triton's interpreter, in a process that sets it up before the first import.
"""

import os
import subprocess
import sys

import pytest
import torch

import shoal
from shoal.nn import EmbeddingBagCollection, HashEmbedding
from shoal.sharded import AllToAllHashTable, loads_of, plan, shard
from shoal.sharded.all_to_all.group import AllToAllGroup
from shoal.sharded.all_to_all.owned import OwnedGroup
from shoal.sharded.all_to_all.replicated import ReplicatedGroup
from shoal.table.protocol import MEAN, SUM, Features, Part, Step
from tests.sharded.all_to_all import test_ways as cpu
from tests.sharded.helpers import run_ranks

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CARD = torch.cuda.is_available()
WORLD = 2
OTHER = {"a": "column:1", "b": "data", "c": "row", "d": "table:0", "e": "column:0,1"}
SPREADS = {
    "mixed": {"a": "row", "b": "table:1", "c": "column", "d": "data", "e": "column:1,0"},
    **{way: dict.fromkeys(cpu.DIMS, way) for way in ("row", "table:1", "column", "data")},
}

needs_kernels = pytest.mark.skipif(not INTERPRETED and not CARD, reason="needs a GPU or Triton's interpreter")
needs_card = pytest.mark.skipif(not CARD, reason="there is no CUDA device")


@pytest.mark.timeout(900)
def test_in_the_interpreter(tmp_path):
    if INTERPRETED or CARD:
        pytest.skip("they run in this process")
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path}/its", __file__, "-k", "mixed"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=890,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "1 passed" in done.stdout


def on_host(tables):
    """All rows, wherever they are; all ranks ask for them."""
    return {name: table.lookup(torch.arange(30)).cpu() for name, table in tables.items()}


def train(rank, world, spread, folder=None, device="cuda", steps=3):
    """The outputs of each step, and all rows in the end."""
    tables = cpu.tables_of(None, spread, device=device)
    model = EmbeddingBagCollection(tables, cpu.FEATURES, combiner=cpu.COMBINERS)
    seen = []
    for step in range(steps):
        out = model(cpu.batch(rank, step))
        assert out.device.type == ("cpu" if INTERPRETED else device)
        cpu.loss_of(out.cpu(), rank, step).backward()
        seen.append(out.detach().cpu())
    if folder is not None:
        for name, table in tables.items():
            table.save(folder / name)
    return seen, on_host(tables)


def restored(rank, world, spread, folder, device):
    """Rows that were restored, and what one more update makes of them and of their state."""
    tables = cpu.tables_of(None, spread, device=device)
    for name, table in tables.items():
        table.restore(folder / name)
    rows = on_host(tables)
    for table in tables.values():
        ids = torch.arange(30 if rank == 0 else 0)
        table.apply_gradients(ids, torch.ones(ids.numel(), table.dim_size), 9)
    return rows, on_host(tables)


def check_trained(results, steps=3):
    want, rows = cpu.one_process(len(results), steps)
    for rank, (seen, all_rows) in enumerate(results):
        torch.testing.assert_close(seen, want[rank], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(all_rows, rows, rtol=1e-4, atol=1e-5)
    return results[0][1]


def check_restored(rows, folder, others, device):
    after = None
    for world, spread in others:
        for found, then in run_ranks(world, restored, spread, folder, device):
            for name in cpu.DIMS:
                assert torch.equal(found[name], rows[name]), name
            after = then if after is None else after
            torch.testing.assert_close(then, after, rtol=1e-5, atol=1e-6)


@needs_kernels
def test_mixed_ways_train_as_one_process_does_and_are_restored_on_the_cpu(tmp_path):
    rows = check_trained(run_ranks(WORLD, train, SPREADS["mixed"], tmp_path, steps=2), steps=2)
    check_restored(rows, tmp_path, [(WORLD, OTHER)], "cpu")


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("name", ["row", "table:1", "column", "data"])
def test_every_way_trains_as_one_process_does_and_is_restored_in_others(tmp_path, name):
    rows = check_trained(run_ranks(WORLD, train, SPREADS[name], tmp_path))
    everywhere = dict.fromkeys(cpu.DIMS, "row")
    check_restored(rows, tmp_path, [(WORLD, OTHER), (3, SPREADS["mixed"]), (1, everywhere)], "cuda")


@pytest.mark.gpu
@needs_card
def test_checkpoints_of_the_cpu_are_restored_on_the_card(tmp_path):
    rows = check_trained(run_ranks(WORLD, train, SPREADS["mixed"], tmp_path, "cpu"))
    check_restored(rows, tmp_path, [(3, OTHER), (1, OTHER)], "cuda")


def sequences_and_weights(rank, world, way, device):
    table = AllToAllHashTable(6, way=way, seed=3, optimizer=shoal.Sgd(lr=1.0), device=device)
    ids = (torch.tensor([[5, 7, 5], [9, 9, 9]]) + rank).to(device)
    rows = HashEmbedding(table)(ids)
    rows.sum().backward()
    bags = EmbeddingBagCollection({"t": table})
    weights = torch.arange(6.0, device=device).view(2, 3).requires_grad_()
    pooled = bags({"t": ids}, {"t": weights})
    pooled.sum().backward()
    table.lookup(torch.tensor([100 + rank], device=device), insert_missing=True)
    every = table.lookup(torch.arange(5, 12))
    return [each.detach().cpu() for each in (rows, pooled, weights.grad, every)], table.size()


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("way", ["row", "table:1", "column", "data"])
def test_sequences_weights_and_inserted_rows(way):
    want = run_ranks(WORLD, sequences_and_weights, "row", "cpu")
    for own, judge in zip(run_ranks(WORLD, sequences_and_weights, way, "cuda"), want, strict=True):
        torch.testing.assert_close(own, judge, rtol=1e-5, atol=1e-6)


def sharded_model(rank, world, device):
    """A model trained alone, then spread by a plan, then trained by all ranks."""
    tables = {name: shoal.HashTable(dim, name=name, optimizer=shoal.Sgd(lr=0.1), seed=5, device=device)
              for name, dim in cpu.DIMS.items()}  # fmt: skip
    model = EmbeddingBagCollection(tables, cpu.FEATURES, combiner=cpu.COMBINERS)

    def step(number, as_rank):
        out = model(cpu.batch(as_rank, number))
        cpu.loss_of(out.cpu(), as_rank, number).backward()
        return out.detach().cpu()

    step(0, 0)
    loads = loads_of(model, lambda: model(cpu.batch(0, 3)))
    made = plan(loads, world).edited(a="row", b="table:1", c="column", d="data")
    shard(model, made)
    assert {str(table.device.type) for table in model.tables.values()} == {device}
    seen = [step(number, rank) for number in (2, 4)]
    return seen, on_host(model.tables)


@pytest.mark.gpu
@needs_card
def test_a_model_is_spread_over_ranks_with_its_rows():
    for own, judge in zip(*(run_ranks(WORLD, sharded_model, device) for device in ("cuda", "cpu")), strict=True):
        torch.testing.assert_close(own, judge, rtol=1e-4, atol=1e-5)


def groups_alone(rank, world, device):
    """Steps through the groups of several ranks, whose one rank sends everything to itself."""
    kinds = {"row": AllToAllGroup, "table": OwnedGroup, "column": OwnedGroup, "data": ReplicatedGroup}
    found = {}
    for way, kind in kinds.items():
        make = lambda _, way=way: shoal.HashTable(4, name=way, optimizer=shoal.Adagrad(lr=0.1), seed=2, device=device)  # noqa: E731
        group = kind((AllToAllHashTable(factory=make, way=way),))
        features = Features((0, 0), (SUM, MEAN), (0, 4), 8)
        for _ in range(3):
            ids = torch.tensor([3, 4, 3, 9, 4], device=device)
            offsets = torch.tensor([0, 2, 2, 4, 5], device=device)
            counts = offsets if group.traits.takes_bags else offsets[::2].diff()
            at = group.find(ids, counts, features, missing="initial")
            out = torch.empty(2, 8, device=device)
            group.pooled(at, features, offsets, None, out, missing="initial")
            group.update([Part(at, features, out.clone(), offsets)], step=Step(1, 5))
        found[way] = out.cpu()
    return found


@pytest.mark.gpu
@needs_card
def test_the_groups_of_every_way_exchange_through_nccl():
    """On one rank, since there is one card."""
    (want,) = run_ranks(1, groups_alone, "cpu")
    (got,) = run_ranks(1, groups_alone, "cuda", backend="nccl")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert want["row"].abs().sum() > 0
