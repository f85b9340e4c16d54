"""Checkpoints of ``torch.distributed``: tables in all ways, loaded by other numbers of ranks; then processes."""

import copy
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import shoal
from shoal.errors import UnsupportedError
from shoal.nn import HashEmbedding, HashEmbeddingBag, load_dcp
from shoal.sharded import AllToAllHashTable
from shoal.table import SlotOccurrenceThresholdConfig, create_hash_filter
from tests.nn import dcp_ranks as ranks
from tests.nn.dcp_ranks import DIMS, MIXED, OTHER, Model, learn, rows
from tests.sharded.helpers import run_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore::pytest.PytestUnraisableExceptionWarning",  # files that dcp_to_torch_save leaves open
)
T = torch.tensor


def bag(optimizer="adagrad", **options):
    return HashEmbeddingBag(shoal.HashTable(4, name="t", optimizer=optimizer, seed=1, **options))


def trained(model, ids=range(30), steps=2):
    for _ in range(steps):
        (model([[i, i + 1] for i in ids]) * torch.arange(1.0, 1 + len(ids)).view(-1, 1)).sum().backward()
    return model


def into(model, path):
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)
    return model


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "rowwise_adagrad"])
def test_a_table_is_loaded_whatever_it_held_before(tmp_path, optimizer):
    ours = trained(bag(optimizer))
    dcp.save(ours.state_dict(), checkpoint_id=tmp_path)
    for other in (bag(optimizer), trained(bag(optimizer), range(50, 70))):
        into(other, tmp_path)
        assert len(other.table) == 31
        for _ in range(2):  # optimizer state was loaded, too
            assert torch.equal(other.table.lookup(torch.arange(60)), ours.table.lookup(torch.arange(60)))
            trained(ours, [5, 40], 1), trained(other, [5, 40], 1)
        into(ours, tmp_path)
    empty = bag(optimizer)
    dcp.save(empty.state_dict(), checkpoint_id=tmp_path / "empty")
    assert len(into(ours, tmp_path / "empty").table) == 0


def test_large_tables_come_in_blocks(tmp_path, monkeypatch):
    from shoal.nn.state import saved

    monkeypatch.setattr(saved, "_BLOCK_BYTES", 2000)
    monkeypatch.setattr(saved, "_PART_BYTES", 400)
    ours = trained(bag(), range(-300, 300))
    ours.table.assign(T([-(1 << 63), (1 << 63) - 1]), torch.ones(2, 4))
    dcp.save(ours.state_dict(), checkpoint_id=tmp_path)
    chunks = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["table.rows"].chunks
    assert len(chunks) > 40
    assert max(chunk.sizes[0] for chunk in chunks) * 48 <= 2000
    every = T([*range(-300, 302), -(1 << 63), (1 << 63) - 1])
    for load in (into, load_dcp):
        assert torch.equal(load(bag(), tmp_path).table.lookup(every), ours.table.lookup(every))


def test_state_is_a_copy_that_is_made_when_it_is_needed():
    model = trained(bag())
    state, before = model.state_dict(), model.table.lookup(torch.arange(31))
    assert not state["table.rows"].table_state.copied
    trained(model, [3])
    assert state["table.rows"].table_state.copied  # the update made the copy
    trained(model, [4])
    model.load_state_dict(state)
    assert torch.equal(model.table.lookup(torch.arange(31)), before)
    changes = [
        lambda t: t.assign(T([1]), torch.ones(1, 4)), lambda t: t.assign_add(T([1]), torch.ones(1, 4)),
        lambda t: t.apply_gradients(T([1]), torch.ones(1, 4)), lambda t: t.erase(T([1])), lambda t: t.clear(),
        lambda t: t.reinitialize(T([1])), lambda t: t.evict(1 << 31), lambda t: t.lookup(T([99]), insert_missing=True),
    ]  # fmt: skip
    for change in changes:
        state = model.state_dict()
        change(model.table)
        assert state["table.rows"].table_state.copied
        model.load_state_dict(state)
        assert torch.equal(model.table.lookup(torch.arange(31)), before)
        assert len(model.table) == 31


def test_the_tensors_are_tensors():
    state = trained(bag()).state_dict()
    assert repr(state["table.rows"]) == "TableTensor(rows of table 't', [31, 4], float32)"
    assert isinstance(state["table.rows"], torch.Tensor)
    ids, found = state["table.ids"], state["table.rows"]
    assert found.size(1) == 4
    assert found.size() == (31, 4)
    assert found.numpy().tolist() == found.tensor().tolist() == (found + 0).tolist()
    assert found.sum().item() == pytest.approx(found.numpy().sum())
    assert sorted(ids.tolist()) == ids.sort().values.tolist() == list(range(31))
    assert torch.zeros_like(found).sum() == 0
    assert copy.deepcopy(state)["table.rows"].equal(found)
    assert found[:2].add(1).shape == (2, 4)
    with pytest.raises(UnsupportedError, match="load_state_dict"):
        found.copy_(torch.zeros(31, 4))


def test_what_does_not_fit_is_refused(tmp_path):
    dcp.save(trained(bag()).state_dict(), checkpoint_id=tmp_path)
    wide = HashEmbeddingBag(shoal.HashTable(6, name="t"))
    with pytest.raises(dcp.api.CheckpointException, match=r"Size mismatch between saved torch.Size\(\[31, 4\]\)"):
        into(wide, tmp_path)
    other = trained(bag("sgd"), [7])
    before = other.table.lookup(T([7, 8]))
    with pytest.raises((RuntimeError, dcp.api.CheckpointException), match=r"4 x adagrad|Size mismatch"):
        into(other, tmp_path)
    assert torch.equal(other.table.lookup(T([7, 8])), before)


def test_model_state_dicts_of_torch(tmp_path):
    """`get_model_state_dict` looks for an attribute of each name."""
    ours = nn.ModuleDict(
        {"one": trained(bag()), "many": HashEmbedding({"u": shoal.HashTable(2), "i": shoal.HashTable(3)})}
    )
    dcp.save({"model": get_model_state_dict(ours)}, checkpoint_id=tmp_path)
    fresh = nn.ModuleDict({"one": bag(), "many": HashEmbedding({"u": shoal.HashTable(2), "i": shoal.HashTable(3)})})
    state = {"model": get_model_state_dict(fresh)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(fresh, state["model"])
    assert torch.equal(fresh["one"].table.lookup(torch.arange(31)), ours["one"].table.lookup(torch.arange(31)))


def test_filters_budgets_and_times_come_along(tmp_path):
    def make():
        counts = create_hash_filter(300, 3, SlotOccurrenceThresholdConfig(default_occurrence_threshold=3))
        return HashEmbeddingBag(shoal.HashTable(4, name="t", hash_filter=counts, max_rows=50, seed=1))

    ours = make()
    ours.clock = lambda: 1_700_000_000
    for ids in (range(20), range(20), range(15), range(10)):  # ten ids have a row, the last five need one more
        trained(ours, [i for i in ids if i % 2 == 0], 1)
    state = ours.state_dict()
    assert "table.filter" in state
    dcp.save(state, checkpoint_id=tmp_path)
    theirs = into(make(), tmp_path)
    theirs.clock = lambda: 1_700_000_500
    assert theirs.table.max_update_time == 1_700_000_000
    assert len(theirs.table) == len(ours.table) > 0
    for model in (ours, theirs):
        model.clock = lambda: 1_700_000_500
        trained(model, range(0, 20, 2), 1)
    assert len(theirs.table) == len(ours.table)
    assert torch.equal(theirs.table.lookup(torch.arange(22)), ours.table.lookup(torch.arange(22)))


def test_a_smaller_budget_keeps_some_rows(tmp_path):
    dcp.save(trained(bag()).state_dict(), checkpoint_id=tmp_path)
    small = into(bag(max_rows=8), tmp_path)
    assert len(small.table) == 8
    for begin in range(0, 100, 10):  # and training continues within it
        trained(small, range(begin, begin + 20), 1)
        assert len(small.table) == 8


def peak_mb(*, reset=False):
    """Of this process, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def memory(rank, world, path):
    """MB that a rank's rows take, and how much more a save took at its peak, and a load of others."""
    before = peak_mb(reset=True)
    model = nn.ModuleList([HashEmbeddingBag(AllToAllHashTable(64, optimizer="adagrad", name="t"))])
    for begin in range(0, 400_000, 20_000):
        ids = torch.arange(begin, begin + 20_000)[rank::world]
        model[0].table.apply_gradients(ids, torch.ones(ids.numel(), 64))
    own = peak_mb(reset=True) - before
    begin = peak_mb(reset=True)
    writer = dcp.FileSystemWriter(path, per_thread_copy_ahead=0)  # otherwise, on a GPU machine it holds all rows
    dcp.save(model.state_dict(), storage_writer=writer)
    saving = peak_mb() - begin
    model[0].table.table.clear()
    begin = peak_mb(reset=True)
    into(model, path)
    return own, saving, peak_mb() - begin


def test_a_save_takes_little_memory_and_a_load_that_of_the_ranks_rows(tmp_path):
    for own, saving, loading in run_ranks(2, memory, tmp_path):
        assert own > 80
        assert saving < 0.6 * own  # blocks of 16 MB and buffers of their files
        assert loading < 2.6 * own  # its own rows, as read and as stored, but not those of other ranks


SAVER = """
import sys, torch, warnings
warnings.simplefilter("ignore")
import torch.distributed.checkpoint as dcp
import shoal
from shoal.nn import HashEmbeddingBag
table = shoal.HashTable(64, name="t", optimizer="adagrad", seed=1)
ids = torch.arange(100_000)
table.assign(ids, torch.ones(100_000, 64))
print("ready", flush=True)
number = 1
while True:
    table.assign(ids, torch.full((100_000, 64), float(number)))
    dcp.save(HashEmbeddingBag(table).state_dict(), checkpoint_id=f"{sys.argv[1]}/{number}", no_dist=True)
    print(number, flush=True)
    number += 1
"""


def test_a_save_that_is_killed_leaves_the_one_before(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SAVER, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        last = int(process.stdout.readline())
        end = time.monotonic() + 60
        while not (tmp_path / str(last + 1)).exists() and time.monotonic() < end:
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    last = max(int(path.parent.name) for path in tmp_path.glob("*/.metadata"))
    table = shoal.HashTable(64, name="t", optimizer="adagrad")
    into(HashEmbeddingBag(table), tmp_path / str(last))
    assert table.lookup(T([0, 99_999])).unique().tolist() == [float(last)]
    if (tmp_path / str(last + 1)).exists():
        with pytest.raises(dcp.api.CheckpointException):
            into(HashEmbeddingBag(table), tmp_path / str(last + 1))
        assert table.lookup(T([0])).unique().tolist() == [float(last)]


# --- ranks ------------------------------------------------------------------------------------------------------------


@cache
def one_process(world):
    """What W ranks hold after three steps, each with a batch of its own."""
    model = Model()
    for step in range(3):
        outs = [model(ranks.batch(rank, step)) for rank in range(world)]
        for out in outs:
            out.square().sum().backward()
    return model


def check(results, path_rows, weight):
    judge = None
    for found, own_weight, _, then in results:
        for name in DIMS:
            assert torch.equal(found[name], path_rows[name]), name
        assert torch.equal(own_weight, weight)
        judge = then if judge is None else judge
        torch.testing.assert_close(then, judge, rtol=0, atol=0)
    return judge


@pytest.mark.parametrize("how", ["state", "async", "writer"])
def test_all_ways_are_saved_on_two_ranks_and_loaded_on_others(tmp_path, how):
    saved = run_ranks(2, ranks.save, MIXED, tmp_path, how)
    before, weight = saved[0]
    torch.testing.assert_close(before, rows(one_process(2)), rtol=1e-4, atol=1e-5)
    then = check(run_ranks(3, ranks.load, OTHER, tmp_path, "stateful"), before, weight)
    if how != "state":
        return
    for world, ways, helper in ((2, MIXED, "state"), (3, MIXED, "helper"), (1, OTHER, "helper")):
        again = check(run_ranks(world, ranks.load, ways, tmp_path, helper), before, weight)
        torch.testing.assert_close(again, then, rtol=1e-5, atol=1e-6)
    local = Model()
    into_local = {"model": local.state_dict()}
    dcp.load(into_local, checkpoint_id=tmp_path)
    local.load_state_dict(into_local["model"])
    assert all(torch.equal(rows(local)[name], before[name]) for name in DIMS)
    # torch's own tool converts it to plain tensors, which every kind of model loads
    dcp_to_torch_save(tmp_path, tmp_path / "all.pt")
    plain = torch.load(tmp_path / "all.pt", weights_only=True)["model"]
    assert type(plain["bags.tables.c.rows"]) is torch.Tensor
    other = Model()
    other.load_state_dict(plain)
    torch.testing.assert_close(ranks.after(other, 0), then, rtol=1e-5, atol=1e-6)
    check(run_ranks(2, plain_load, OTHER, tmp_path / "all.pt"), before, weight)


def plain_load(rank, world, ways, file):
    model = Model(ways)
    model.load_state_dict(torch.load(file, weights_only=True)["model"])
    return rows(model), model.top.weight.detach(), ranks.times(model), ranks.after(model, rank)


def own_states(rank, world, path):
    """What a rank's state_dict says, to whom it is no use, and that it is of use to itself."""
    model = Model(MIXED)
    learn(model, rank, range(2))
    state, told = model.state_dict(), []
    told.append(repr(state["bags.tables.c.rows"]))
    torch.save(state, path / f"{rank}.pt")
    learn(model, rank, [5])
    want = rows(model)
    model.load_state_dict(state)
    learn(model, rank, [5])
    assert all(torch.equal(rows(model)[name], want[name]) for name in DIMS)
    try:
        Model(OTHER).load_state_dict(model.state_dict())
    except RuntimeError as error:
        told.append(str(error))
    return told


def test_a_rank_says_what_it_holds(tmp_path):
    for rank, (text, refusal) in enumerate(run_ranks(2, own_states, tmp_path)):
        assert text.startswith("TableTensor(rows of table 'c', [")
        assert text.endswith(f", 4], float32, rank {rank} of 2)")
        assert "which has other rows; use torch.distributed.checkpoint" in refusal


def shares(rank, world, path, ways):
    """Bytes that a rank reads of a checkpoint with `load_dcp`, and the rows it has then."""
    read = [0]
    inner = torch.load

    def counted(file, *args, **kwargs):
        tensor = inner(file, *args, **kwargs)
        read[0] += tensor.numel() * tensor.element_size()
        return tensor

    model = Model(ways)
    torch.load = counted
    try:
        load_dcp(model, path)
    finally:
        torch.load = inner
    return read[0], rows(model, 3000)


def save_many(rank, world, path):
    from shoal.nn.state import saved

    saved._PART_BYTES = 8000
    model = Model(dict.fromkeys(DIMS, "row"))
    for table in model.bags.tables.values():
        ids = torch.arange(3000) if rank == 0 else torch.arange(0)
        table.apply_gradients(ids, torch.ones(ids.numel(), table.dim_size))
    dcp.save(model.state_dict(), checkpoint_id=path)
    return rows(model, 3000)


def test_a_rank_reads_the_blocks_of_its_share(tmp_path):
    want = run_ranks(2, save_many, tmp_path)[0]
    ((whole, _),) = run_ranks(1, shares, tmp_path, dict.fromkeys(DIMS, "row"))
    for read, found in run_ranks(3, shares, tmp_path, dict.fromkeys(DIMS, "row")):
        assert all(torch.equal(found[name], want[name]) for name in DIMS)
        assert read < 0.5 * whole  # a third of the rows, and all ids


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(("written", "read"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_ranks_with_rows_on_a_card(tmp_path, written, read):
    before, weight = run_ranks(2, ranks.save, MIXED, tmp_path, "async" if read == "cuda" else "state", written)[0]
    torch.testing.assert_close(before, rows(one_process(2)), rtol=1e-4, atol=1e-5)
    check(run_ranks(3, ranks.load, OTHER, tmp_path, "helper", read), before, weight)
