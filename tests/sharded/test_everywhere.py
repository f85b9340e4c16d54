"""The same model on a local, a parameter-server and an all-to-all table; exports; packing."""

import pytest
import torch

from shoal import nn as snn
from shoal.sharded import (
    AllToAllHashTable,
    DistributedHashTable,
    DistributedMultiTypeHashTable,
    ExportContext,
    ExportMode,
    enter_export_mode,
    is_exporting,
    pack_tensors,
    pack_typed_keyed_tensors,
    ps_table,
    set_lookup_metrics,
    set_remote_predict,
    unpack_packed_tensors,
    unpack_tensors,
)
from shoal.table import HashTable
from tests.sharded.helpers import config, local, multi_type, native, run_ranks

pytestmark = pytest.mark.timeout(900)

T = torch.tensor
SETTINGS = {"optimizer": "sgd", "lr": 0.1, "initializer": "uniform"}


def batch(step, rank=0, world=1):
    g = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(0, 50, (16, 3), generator=g), torch.rand(16, generator=g)
    return ids[rank::world], labels[rank::world]


def train(table, rank=0, world=1, steps=8):
    torch.manual_seed(0)
    bag = snn.HashEmbeddingBag(table, combiner="sum")
    dense = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        ids, labels = batch(step, rank, world)
        out = dense(bag(ids)).squeeze(-1)
        loss = torch.nn.functional.mse_loss(out, labels, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        if world > 1:
            for p in dense.parameters():
                torch.distributed.all_reduce(p.grad)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, table.lookup(torch.arange(50)), dense.weight.detach()


def in_ranks(rank, world):
    table = AllToAllHashTable(4, seed=7, **SETTINGS)
    losses, rows, weight = train(table, rank, world)
    return losses, rows, weight


def test_the_same_model_trains_everywhere(ps):
    expected = train(HashTable(4, seed=7, name="local", **SETTINGS))
    assert expected[0][0] > expected[0][-1] > 0
    parts = DistributedHashTable(
        3, HashTable(4, **SETTINGS).config, lambda i, c: HashTable.from_config(c, name=str(i), seed=7)
    )
    servers = ps_table(ps(2), 4, name="t", seed=7, **SETTINGS)
    for found in (train(parts), train(servers), train(AllToAllHashTable(4, seed=7, **SETTINGS))):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)
    results = run_ranks(2, in_ranks)
    torch.testing.assert_close(
        [a + b for a, b in zip(results[0][0], results[1][0], strict=True)], expected[0], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(results[0][1], expected[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[0][2], expected[2], rtol=1e-4, atol=1e-5)


# --- export -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["multi_type", "native"])
def kind(request):
    return {"multi_type": multi_type, "native": native}[request.param]


def slots():
    return {"1": config(1), "2": config(2)}


def test_a_distributed_export_has_a_graph_per_server(kind):
    ctx = ExportContext()
    with enter_export_mode(ExportMode.DISTRIBUTED, ctx):
        table = DistributedMultiTypeHashTable(2, slots(), kind)
        assert table.lookup({"1": T([1, 2])})["1"].shape == (2, 1)
        with pytest.raises(RuntimeError, match="exporting"):
            table.assign({"1": (T([1]), T([[1.0]]))})
        with pytest.raises(AssertionError), enter_export_mode(ExportMode.STANDALONE):
            pass
    assert ctx.sub_graph_num == 2
    names = {"lookup"} | ({"raw_lookup"} if kind is native else set())
    for i in range(2):
        signatures = ctx.signatures(f"ps_{i}")
        assert set(signatures) == names
        assert set(signatures["lookup"].inputs) == {"1", "2"}
    assert not is_exporting()


def test_a_standalone_export_is_local(kind):
    with enter_export_mode(ExportMode.STANDALONE) as ctx:
        table = DistributedMultiTypeHashTable(2, slots(), kind)
        assert table.lookup({"1": T([1, 2])})["1"].tolist() == [[0], [0]]
        assert all(t.serving for part in table.tables for t in part.tables.values())
    assert ctx.sub_graph_num == 0
    with pytest.raises(RuntimeError):
        table.apply_gradients({"1": (T([1]), T([[1.0]]))}, 0)


def test_a_lookup_during_an_export_inserts_nothing():
    table = DistributedHashTable(2, config(1), local)
    with enter_export_mode(ExportMode.STANDALONE):
        with pytest.raises(RuntimeError, match="exporting"):
            table.lookup(T([1]), insert_missing=True)
        assert table.lookup(T([1])).tolist() == [[0.0]]
    assert table.size() == 0


def test_exported_lookups_go_to_the_servers_of_the_parts(kind):
    calls = []

    def predict(inputs, tensors, outputs, **call):
        calls.append((inputs, [t.tolist() for t in tensors], outputs, call))
        if call["signature_name"] == "raw_lookup":
            return [tensors[0].float()]
        return [t.float().view(-1, 1) for t in tensors]

    set_remote_predict(predict)
    try:
        with enter_export_mode(ExportMode.DISTRIBUTED):
            table = DistributedMultiTypeHashTable(2, {"1": config(1)}, kind, max_rpc_deadline_millis=77)
            assert table.lookup({"1": T([5, 4, 5])})["1"].tolist() == [[5], [4], [5]]
    finally:
        set_remote_predict(None)
    assert [c[3]["model_name"] for c in calls] == [":ps_0", ":ps_1"]
    assert [c[3]["task"] for c in calls] == [0, 1]
    assert calls[0][3]["old_model_name"] == "ps_0"
    assert calls[0][3]["max_rpc_deadline_millis"] == 77
    assert calls[0][3]["model_version"] == -1
    assert calls[1][1][0] == [5]
    assert calls[0][3]["signature_name"] == ("raw_lookup" if kind is native else "lookup")


def test_lookups_are_timed_per_server():
    seen = []

    class Sink:
        def emit_timer(self, name, value, tags):
            seen.append((name, tags))

    table = DistributedMultiTypeHashTable(2, slots(), native)
    set_lookup_metrics(Sink(), "ranker")
    try:
        table.lookup({"1": T([1, 2])})
    finally:
        set_lookup_metrics(None)
    table.lookup({"1": T([1, 2])})
    assert seen == [("embedding_lookup", "model_name=ranker|ps=0"), ("embedding_lookup", "model_name=ranker|ps=1")]


# --- packing ----------------------------------------------------------------------------------------------------------


def test_packing_goes_back():
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.empty(0, 2), "c": T([7.0])}
    packed = pack_tensors(tensors)
    assert packed[0].tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert packed[1].tolist() == [0, 6, 1]
    back = unpack_tensors({"a": [-1, 2], "b": [2, 3], "c": [1]}, packed)
    assert {k: v.tolist() for k, v in back.items()} == {k: v.tolist() for k, v in tensors.items()}
    typed = [{"x": T([1, 2])}, {"y": T([0.5]), "z": T([[1.5]])}]
    packed = pack_typed_keyed_tensors(typed)
    assert packed[-1].tolist() == [1, 2, 2, 1, 1]
    back = unpack_packed_tensors([{"x": [2]}, {"y": [1], "z": [1, 1]}], packed)
    assert [{k: v.tolist() for k, v in d.items()} for d in back] == [
        {k: v.tolist() for k, v in d.items()} for d in typed
    ]
    with pytest.raises(ValueError, match="at least 2"):
        unpack_packed_tensors([{}], packed[:1])


def test_what_cannot_be_packed_or_unpacked_whole_is_refused():
    with pytest.raises(ValueError, match=r"must have one dtype, got torch\.float32, torch\.int64"):
        pack_tensors({"ids": T([2**40 + 1]), "rows": T([1.5])})  # float32 has no such id
    for sizes in ([-1, 4], [1, 1], [3]):
        with pytest.raises(ValueError, match="sizes must be 2 numbers >= 0 that add up to the 3 elements, got"):
            unpack_tensors({"a": [-1], "b": [-1]}, (T([1, 2, 3]), T(sizes)))
    assert local(0, config(1)).dim_size == 1
    assert len(multi_type(0, slots()).tables) == 2
