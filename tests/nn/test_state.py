"""Modules are saved, loaded and copied like any other; tables are not pickled."""

import copy
import io
import json
import pickle
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import UnsupportedError
from shoal.nn import HashEmbedding, HashEmbeddingBag, SparseOptimizer, load_dcp
from shoal.table import (
    HashTable,
    MultiHashTable,
    SgdOptimizer,
    SlotOccurrenceThresholdConfig,
    StochasticRoundingFloat16OptimizerWrapper,
    create_hash_filter,
    fused_apply_gradient,
)

OPTIMIZERS = [shoal.Sgd(), shoal.Adagrad(), shoal.Adam(), shoal.Ftrl(), shoal.RowwiseAdagrad(), shoal.Amsgrad()]


def trained(optimizer="adagrad", steps=3, ids=range(20), seed=0):
    torch.manual_seed(seed)
    table = shoal.HashTable(4, optimizer=optimizer, seed=5)
    model = nn.Sequential(HashEmbeddingBag(table, combiner="sum"), nn.Linear(4, 1))
    model[0].clock = lambda: 1_700_000_000
    for _ in range(steps):
        step(model, ids)
    return model


def step(model, ids):
    (model([[i, i + 1] for i in ids]) * torch.arange(1.0, 1 + len(ids)).unsqueeze(1)).sum().backward()


def test_a_state_dict_without_the_rows_of_servers_says_so():
    from shoal.sharded import DistributedHashTable

    config = shoal.HashTable(4).config
    parts = DistributedHashTable(2, config, lambda i, c: shoal.HashTable.from_config(c, name=f"part_{i}"))
    with pytest.warns(UserWarning, match="not hold the rows of table 'part_0'.* the save of each of table.tables"):
        assert HashEmbeddingBag(parts).state_dict() == {}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_fills_fresh_tables(tmp_path):
    import torch.distributed.checkpoint as dcp

    model = nn.ModuleDict(
        {"net": trained(), "keyed": HashEmbedding({"u": shoal.HashTable(2), "i": shoal.HashTable(3)})}
    )
    model["keyed"].tables["u"].assign(torch.arange(7), torch.ones(7, 2))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "there", no_dist=True)
    fresh = nn.ModuleDict(
        {
            "net": trained(steps=1, ids=[77], seed=9),
            "keyed": HashEmbedding({"u": shoal.HashTable(2), "i": shoal.HashTable(3)}),
        }
    )
    assert load_dcp(fresh, tmp_path / "there", prefix="model.") is fresh
    assert torch.equal(rows(fresh["net"]), rows(model["net"]))
    assert torch.equal(fresh["net"][1].weight, model["net"][1].weight)
    assert len(fresh["net"][0].table) == 21
    assert fresh["keyed"].tables["u"].lookup(torch.arange(8)).sum() == 14
    before = rows(fresh["net"])
    with pytest.raises(ValueError, match=r"has no 'net\.0\.table\.ids'; its keys begin with 'model\.keyed"):
        load_dcp(fresh, tmp_path / "there")
    assert torch.equal(rows(fresh["net"]), before)


def rows(model, ids=range(40)):
    return model[0].table.lookup(torch.tensor(list(ids)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_a_loaded_model_goes_on_as_the_saved_one(optimizer):
    model = trained(optimizer)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = trained(optimizer, steps=1, ids=range(100, 130), seed=1)
    assert str(other.load_state_dict(torch.load(file, weights_only=True))) == "<All keys matched successfully>"
    assert len(other[0].table) == len(model[0].table) == 21
    for _ in range(3):  # optimizer state was copied, and new ids start equally
        assert torch.equal(rows(model), rows(other))
        step(model, range(10, 30))
        step(other, range(10, 30))
    assert torch.equal(model.state_dict()["0.table.times"].max(), other.state_dict()["0.table.times"].max())


def test_names_and_shapes_are_stable():
    state = trained("adagrad").state_dict()
    assert {name: (tuple(t.shape), t.dtype) for name, t in state.items() if "config" not in name} == {
        "0.table.ids": ((21,), torch.int64),
        "0.table.rows": ((21, 4), torch.float32),
        "0.table.state": ((21, 16), torch.uint8),
        "0.table.times": ((21,), torch.int64),
        "0.table.scales": ((1,), torch.float32),
        "0.table.global_step": ((), torch.int64),
        "1.weight": ((1, 4), torch.float32),
        "1.bias": ((1,), torch.float32),
    }
    assert sorted(state["0.table.ids"].tolist()) == list(range(21))
    keyed = HashEmbedding({"u": shoal.HashTable(2), "i": shoal.HashTable(2)}).state_dict()
    assert "tables.u.ids" in keyed
    assert "tables.i.rows" in keyed


def test_safetensors_can_hold_the_state(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = trained()
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = trained(steps=0)
    other.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    assert torch.equal(rows(model), rows(other))


def test_an_empty_table_can_be_saved_and_loaded():
    model, other = trained(steps=0), trained()
    other.load_state_dict(model.state_dict())
    assert len(other[0].table) == 0


def test_what_waits_is_not_part_of_the_state_and_is_dropped_by_loading():
    model = trained()
    optimizer = SparseOptimizer(model)
    state = model.state_dict()
    step(model, range(3))
    model.load_state_dict(state)
    assert optimizer.gradients() == {}


def test_modules_on_one_table_share_its_tensors():
    table = shoal.HashTable(2)
    model = nn.ModuleList([HashEmbedding(table), HashEmbeddingBag(table)])
    model[0](torch.arange(5)).sum().backward()
    state = model.state_dict()
    assert state["0.table.rows"].data_ptr() == state["1.table.rows"].data_ptr()
    table.clear()
    model.load_state_dict(state)
    assert len(table) == 5


def break_state(state, name, change):
    return {key: change(value) if key.endswith(name) else value for key, value in state.items()}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ids", lambda t: t[:-1], "times"),
        ("ids", lambda t: t.int(), "ids of a state dict must be torch.int64"),
        ("ids", lambda t: torch.zeros_like(t), "distinct"),
        ("rows", lambda t: t[:, :2], r"\[21, 4\]"),
        ("state", lambda t: t[:, :4], r"\[21, 16\]"),
        ("times", lambda t: t - 2**40, "times must be 0"),
        ("config", lambda t: t[:-3], "config|rows of"),
        ("scales", lambda t: t[:0], "scales"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_no_row(name, change, message):
    model = trained()
    before = rows(model)
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(break_state(trained(seed=3).state_dict(), name, change))
    assert torch.equal(rows(model), before)


@pytest.mark.parametrize(
    "break_filter",
    [
        lambda state: with_filter(7).state_dict()["table.filter"].tensor(),
        lambda state: state[:-50],
        lambda state: state[:20],
        lambda state: torch.zeros(0, dtype=torch.uint8),
        lambda state: changed_json(state, head=[9, 0, 0]),
        lambda state: changed_json(state, head=[]),
        lambda state: changed_json(state, blocks=[]),
        lambda state: changed_json(state, blocks=[[0, 5, 9999, 1.2, 69]] * 5),
        lambda state: changed_json(state, blocks=[[0, 5, 1, 1.2, 68]] * 5),
    ],
)
def test_a_filter_that_does_not_fit_is_refused_and_changes_no_row_or_count(break_filter):
    model, other = with_filter(5), with_filter(5)
    for ids in ([[1, 2]], [[1, 2]], [[3]]):
        model(ids).sum().backward()
        other([[id + 10 for id in ids[0]]]).sum().backward()
    state = {name: getattr(value, "tensor", lambda v=value: v)() for name, value in other.state_dict().items()}
    before = rows([model]), [model.table.hash_filter.get(id) for id in range(20)]
    with pytest.raises(RuntimeError, match="filter in the checkpoint cannot be used"):
        model.load_state_dict(state | {"table.filter": break_filter(state["table.filter"])})
    assert torch.equal(rows([model]), before[0])
    assert [model.table.hash_filter.get(id) for id in range(20)] == before[1]
    model.load_state_dict(state)
    assert [model.table.hash_filter.get(id) for id in (1, 11, 13)] == [0, 2, 1]


def with_filter(split_num):
    counts = create_hash_filter(300, split_num, SlotOccurrenceThresholdConfig(default_occurrence_threshold=1))
    return HashEmbeddingBag(shoal.HashTable(2, hash_filter=counts))


def changed_json(state, **changes):
    """The bytes of a filter with other fields in their JSON head, of the same length."""
    raw = state.numpy().tobytes()
    length = int.from_bytes(raw[:8], "little")
    head = json.dumps(json.loads(raw[8 : 8 + length]) | changes).encode()
    return torch.frombuffer(
        bytearray(len(head).to_bytes(8, "little") + head.ljust(4096) + raw[8 + 4096 :]), dtype=torch.uint8
    )


def test_a_state_of_another_optimizer_is_refused():
    model = trained("momentum")
    before = rows(model)
    with pytest.raises(RuntimeError, match=r"4 x momentum.*4 x adagrad"):
        model.load_state_dict(trained("adagrad").state_dict())
    assert torch.equal(rows(model), before)


def test_missing_and_unexpected_names_are_told():
    model = trained()
    state = model.state_dict()
    del state["0.table.times"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.table\.times"):
        model.load_state_dict(state)
    found = model.load_state_dict({"0.table.other": torch.zeros(1)}, strict=False)
    assert "0.table.other" in found.unexpected_keys
    assert "0.table.ids" in found.missing_keys


@pytest.mark.parametrize("several", [False, True], ids=["fused_apply_gradient", "MultiHashTable"])
def test_a_state_shows_the_rows_before_a_fused_update(several):
    ids, grads = torch.tensor([1]), torch.ones(1, 2)
    config = shoal.HashTable(2, optimizer=shoal.Sgd(lr=1.0), initializer="zeros").config
    multi = MultiHashTable.from_configs({"t": config}, name_suffix=f"state {several}")
    table = multi.tables["t"].assign(ids, grads)
    state = HashEmbeddingBag(table).state_dict()
    if several:
        multi.apply_gradients({"t": (ids, grads)})
    else:
        fused_apply_gradient([table], ids, None, [1], grads, None, None, [1.0], 0, 0, 1)
    assert table.lookup(ids).tolist() == [[0, 0]]
    assert state["table.rows"].tensor().tolist() == [[1, 1]]


def test_a_deep_copy_is_a_table_of_its_own():
    model = trained("adam")
    twin = copy.deepcopy(model)
    assert twin[0].table is not model[0].table
    assert torch.equal(rows(model), rows(twin))
    step(model, range(30, 35))
    step(twin, range(30, 35))
    assert torch.equal(rows(model), rows(twin))
    before = rows(twin)
    step(model, range(5))
    assert torch.equal(rows(twin), before)


def test_a_deep_copy_continues_as_the_original_would():
    rounded = StochasticRoundingFloat16OptimizerWrapper(SgdOptimizer())
    ids, grads = torch.tensor([1, 2]), torch.full((2, 4), 0.123)
    table = shoal.HashTable(4, optimizer=rounded, expire_after="1d", max_rows=2)
    now = int(time.time())
    for number in range(5):
        table.apply_gradients(ids, grads, number, req_time=now - 100_000)
    table.assign(torch.tensor([3]), torch.ones(1, 4), req_time=now).erase(torch.tensor([3]))
    table.apply_gradients(ids[:1], grads[:1], 5, req_time=now - 100_000)
    table.pin(ids[:1])
    twin = copy.deepcopy(table)
    assert twin.max_update_time == table.max_update_time == now
    assert twin.pinned().tolist() == [1]
    assert twin.eviction_stats() == table.eviction_stats()
    for each in (table, twin):
        each.apply_gradients(ids[:1], grads[:1], 6, req_time=now - 100_000)
    assert torch.equal(twin.lookup(ids), table.lookup(ids))
    assert twin.evict() == table.evict() > 0

    part = HashTable.from_config(table.config, name="columns 4 to 7", seed=1, first_column=4)
    assert torch.equal(copy.deepcopy(part).initial_rows(ids), part.initial_rows(ids))


def test_a_deep_copy_keeps_what_is_shared_shared():
    table = shoal.HashTable(2, name="shared")
    twin = copy.deepcopy(nn.ModuleList([HashEmbedding(table), HashEmbeddingBag(table, fused=True)]))
    assert twin[0].table is twin[1].table
    assert twin[0].table.name == "shared"
    with pytest.raises(ValueError, match="must have a table"):
        SparseOptimizer(twin)  # fused=True was copied


def test_nothing_is_pickled():
    model = trained()
    for dump in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(UnsupportedError, match="state_dict"):
            dump(model)


def test_modules_print_their_table():
    text = repr(HashEmbeddingBag(shoal.HashTable(4, name="item"), combiner="mean"))
    assert "'item'" in text
    assert "mean" in text


PROGRAM = """
import shoal
from shoal.table import *
from shoal.nn import *

def make():
    return HashEmbeddingBag(shoal.HashTable(2))

bag = make()
state = bag.state_dict()
"""


def test_a_program_that_ends_with_a_state_dict_ends_in_silence():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
