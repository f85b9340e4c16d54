"""Corners of the distributed tables: any number of parts, empty, repeated and negative ids, mixed widths, float16."""

import random

import pytest
import torch

from shoal import nn as snn
from shoal.sharded import (
    AsyncFunctionMgr,
    DistributedHashTable,
    DistributedMultiTypeHashTable,
    ExportContext,
    ExportMode,
    OutConfig,
    OutType,
    ParserCtx,
    PartitionedHashTable,
    RemoteMultiHashTable,
    RemoteMultiTypeHashTable,
    SliceConfig,
    enqueue_dicts_with_queue_return,
    enter_export_mode,
    gen_feature_configs,
    set_remote_predict,
)
from shoal.sharded.monolith.clip import GradClipType, clip_gradients, sparse_limit
from shoal.sharded.monolith.prefetch_queue import AsyncPushHook, EndOfInput, EnqueueHook, StructureQueue
from shoal.table import HashTable, PolynomialDecay
from tests.sharded.helpers import adagrad, config, local, multi_type, native

T = torch.tensor


# --- one table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [0, 1, 3, 7])
def test_any_number_of_parts_is_one_table(parts):
    torch.manual_seed(parts)
    judge = HashTable.from_config(adagrad(5), name=f"judge_{parts}")
    table = DistributedHashTable(parts, adagrad(5), local)
    for step in range(8):
        ids = torch.randint(-40, 40, (random.Random(step).choice([0, 1, 50]),))
        if step == 3:
            ids = ids * 7  # all in one of 7 parts
        rows = torch.randn(ids.numel(), 5)
        if step % 3 == 0:
            table.assign_add(ids, rows)
            judge.assign_add(ids, rows)
        else:
            table.apply_gradients(ids, rows, step, 100 + step)  # the time is the fourth argument
            judge.apply_gradients(ids, rows, step, enable_dedup=True, req_time=100 + step)
        every = torch.arange(-280, 280)
        assert torch.equal(table.lookup(every), judge.lookup(every))
    assert all(part.max_update_time == judge.max_update_time == 107 for part in table.tables)
    assert table.lookup(T([], dtype=torch.int64)).shape == (0, 5)


def test_reference_numbers():
    table = DistributedHashTable(2, config(2), local)
    table.assign_add(T([1, 2, 3]), T([[1.0, 1], [2, 2], [3, 3]]))
    assert table.lookup(T([1, 1, 3])).tolist() == [[1, 1], [1, 1], [3, 3]]
    table.assign(T([2, 3, 4]), T([[1.0, 1], [2, 2], [3, 3]]))
    assert table.lookup(T([1, 2, 3, 4])).tolist() == [[1, 1], [1, 1], [2, 2], [3, 3]]
    decayed = DistributedHashTable(2, config(1, PolynomialDecay(1.0, 10, 2.0)), local)
    decayed.apply_gradients(T([0, 1]), T([[2.0], [2.0]]), 0)
    assert decayed.lookup(T([0, 1])).tolist() == [[-2], [-2]]
    decayed.apply_gradients(T([0, 1]), T([[2.0], [2.0]]), 1)
    torch.testing.assert_close(decayed.lookup(T([0, 1])), T([[-4.2], [-4.2]]))


def test_the_last_assign_wins_and_every_addition_counts():
    table = DistributedHashTable(3, config(1), local)
    table.assign(T([4, 7, 4, 4]), T([[1.0], [2], [3], [9]]))
    assert table.lookup(T([4, 7])).tolist() == [[9], [2]]
    table.assign_add(T([4, 4, 7, 4]), T([[1.0], [1], [5], [1]]))
    assert table.lookup(T([4, 7])).tolist() == [[12], [7]]


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["local", "native", "remote", "remote native"])
def build(request, ps):
    def make(parts, configs, **options):
        if request.param == "local":
            factory = multi_type
        elif request.param == "native":
            factory = native
        else:
            client = ps(max(1, parts))
            kind = RemoteMultiHashTable if "native" in request.param else RemoteMultiTypeHashTable
            factory = lambda i, c: kind(client, i, c)  # noqa: E731
        return DistributedMultiTypeHashTable(parts, configs, factory, **options)

    make.native = "native" in request.param
    return make


@pytest.mark.parametrize("parts", [1, 3])
def test_slots_of_many_widths_over_any_number_of_parts(build, parts):
    torch.manual_seed(parts)
    dims = {"a": 1, "b": 16, "c": 3, "d": 64}
    judges = {slot: HashTable.from_config(adagrad(dim), name=f"{slot}_{parts}") for slot, dim in dims.items()}
    table = build(parts, {slot: adagrad(dim) for slot, dim in dims.items()})
    for step in range(4):
        ids = {slot: torch.randint(-20, 20, (n,)) for slot, n in zip(dims, (0, 5, 40, 7), strict=True)}
        if step == 2:
            ids = {"c": ids["c"]}  # only one slot
        grads = {slot: torch.randn(i.numel(), dims[slot]) for slot, i in ids.items()}
        table.apply_gradients({slot: (ids[slot], grads[slot]) for slot in ids}, step, step)
        for slot in ids:
            judges[slot].apply_gradients(ids[slot], grads[slot], step, enable_dedup=True, req_time=step)
        table.as_op()
        found = table.lookup(ids)
        assert list(found) == list(ids)
        for slot in ids:
            assert torch.equal(found[slot], judges[slot].lookup(ids[slot]))
    assert table.lookup({}) == {}
    assert table.get_table_dim_sizes() == [1, 16, 3, 64]


def test_float16_rounds_to_even_and_overflows(build):
    table = build(2, {"s": config(4)}, transfer_float16=True)
    row = T([[2049.0, 2051.0, 65520.0, -1e6]])  # ties round to even; beyond 65504 is infinity
    table.assign({"s": (T([5]), row)})
    assert table.lookup({"s": T([5, 5])})["s"].tolist() == [[2048, 2052, float("inf"), float("-inf")]] * 2
    table.assign({"s": (T([6]), torch.zeros(1, 4))})
    table.apply_gradients({"s": (T([6, 6]), T([[1.0, 1024.5, 0, 0], [0, 1024.5, 0, 1e-9]]))}, 0)
    table.as_op()
    assert table.lookup({"s": T([6])})["s"].tolist() == [[-1, -2048, 0, 0]]  # summed first, then rounded
    with pytest.raises(KeyError):
        table.lookup({"other": T([1])})


def test_reinitialize_tells_in_input_order(build):
    table = build(3, {"1": config(1), "2": config(2)})
    table.assign({"1": (T([1, 2, -4]), T([[1.0], [2], [3]]))})
    if not build.native:
        with pytest.raises(NotImplementedError):
            table.reinitialize("1", T([1]))
        return
    same, status = table.reinitialize("1", T([9, 1, 9, -4, 2, 9, 0]))
    assert same is table
    assert status.dtype == torch.int32
    assert status.tolist() == [0, 1, 1, 1, 1, 1, 0]
    assert table.lookup({"1": T([1, 2, -4])})["1"].tolist() == [[0], [0], [0]]
    assert table.reinitialize("3", T([1, 2, 3]))[1].tolist() == [-1, -1, -1]
    assert table.reinitialize("1", T([], dtype=torch.int64))[1].tolist() == []
    assert set(table.lookup({"1": T([1]), "3": T([1])})) == {"1"}


# --- layouts ----------------------------------------------------------------------------------------------------------


def layouts(parts, is_native, unique=None, dim=3):
    configs = {"f": config(dim, 0.5), "g": config(dim, 0.5)}
    outs = {
        "b": OutConfig([SliceConfig("f", 0, 1), SliceConfig("g", 0, 1)], OutType.ADDN, [[-1, 1]]),
        "a": OutConfig([SliceConfig("g", 1, 3), SliceConfig("f", 1, 3)], OutType.STACK, [[-1, 2, 2]]),
    }
    ctx = ParserCtx()
    ctx.sharding_sparse_fids_op_params = gen_feature_configs(
        parts, configs, outs, {"f": [1, 2], "g": [1, 2]}, {"f": snn.ReduceSum(), "g": snn.ReduceMean()}, is_native,
        unique=unique,
    )  # fmt: skip
    return ctx


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("parts", [0, 1, 7])
def test_layouts_over_any_number_of_parts(parts, is_native):
    ctx = layouts(parts, is_native)
    table = PartitionedHashTable(parts, native if is_native else multi_type, is_native, parser_ctx=ctx)
    batch = {"f": [[1, 8, 1], [], [15]], "g": [[], [8, 1], [1, 1]]}
    rows = {i: torch.arange(3.0) + 10 * i for i in (1, 8, 15)}
    for ps in range(max(1, parts)):
        names = set(table.slot_mapping.values())
        mine = [i for i in rows if i % max(1, parts) == ps]
        if mine:
            table.assign({ps: {n: (T(mine), torch.stack([rows[i] for i in mine])) for n in names}})
    bundle = {}
    found = table.lookup({"__sharding_sparse_fids__sparse_features": batch}, bundle)
    total = {"f": [rows[1] * 2 + rows[8], torch.zeros(3), rows[15]],
             "g": [torch.zeros(3), (rows[8] + rows[1]) / 2, rows[1]]}  # fmt: skip
    for sample in range(3):
        f, g = total["f"][sample], total["g"][sample]
        torch.testing.assert_close(found["b"][sample], (f + g)[:1])
        torch.testing.assert_close(found["a"][sample], torch.stack([g[1:], f[1:]]))
    flat = table.flatten_layout(found)
    table.apply_gradients([(torch.ones_like(t), t) for t in flat], 0, T([3, 9]), bundle)
    after = table.lookup({"__sharding_sparse_fids__sparse_features": {"f": [[1], [8], [15]]}}, {})["b"].view(-1)
    shared = not is_native  # one sub-table for both features
    moved = {1: 2 + (1.5 if shared else 0), 8: 1 + (0.5 if shared else 0), 15: 1}
    torch.testing.assert_close(after, T([10 * i - 0.5 * moved[i] for i in (1, 8, 15)]))
    empty = table.lookup({"__sharding_sparse_fids__sparse_features": {"f": [], "g": []}}, {})
    assert [t.shape[0] for t in table.flatten_layout(empty)] == [0, 0]


@pytest.mark.parametrize("is_native", [False, True])
def test_exported_layouts_ask_the_servers_of_the_parts(is_native):
    calls = []

    def predict(inputs, tensors, outputs, **call):
        calls.append((inputs, [t.tolist() for t in tensors], outputs, call))
        if call["signature_name"] == "raw_lookup":
            return [tensors[0].float().repeat_interleave(3)]
        return [t.float().repeat_interleave(3).view(-1, 3) for t in tensors]

    ctx, export = layouts(2, is_native), ExportContext()
    set_remote_predict(predict)
    try:
        with enter_export_mode(ExportMode.DISTRIBUTED, export):
            factory = native if is_native else multi_type
            table = PartitionedHashTable(2, factory, is_native, max_rpc_deadline_millis=55, parser_ctx=ctx)
            bundle = {}
            features = {"__sharding_sparse_fids__sparse_features": {"f": [[4, 5, 4]], "g": [[7]]}}
            found = table.lookup(features, bundle)
            assert found["b"].tolist() == [[13 + 7]]
            assert found["a"].tolist() == [[[7, 7], [13, 13]]]
            assert not [key for key in bundle if key.endswith((":fids", ":fids_row_split"))]
            with pytest.raises(RuntimeError, match="exporting"):
                table.apply_gradients([], 0, auxiliary_bundle=bundle)
            with pytest.raises(RuntimeError, match="exporting"):
                table.assign({0: {}})
    finally:
        set_remote_predict(None)
    assert export.sub_graph_num == 2
    assert [c[3]["model_name"] for c in calls] == [":ps_0", ":ps_1"]
    assert calls[0][3]["max_rpc_deadline_millis"] == 55
    assert calls[0][1][0] == [4, 4]  # repeated ids are kept while exporting
    assert calls[0][0] == (["id", "id_split"] if is_native else [next(iter(set(table.slot_mapping.values())))])


# --- queues -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, 1, 2])
def test_queues_of_every_length_give_the_structure_back(capacity):
    given = {"a": [T(1), None, "x"], "b": (T([[1.0]]), {"c": True, "d": 3})}
    found, queue = enqueue_dicts_with_queue_return(given, capacity)
    assert (queue is None) == (capacity == 0)
    assert (found is given) == (capacity == 0)
    assert found["a"][1:] == [None, "x"]
    assert found["b"][1] == {"c": True, "d": 3}
    assert torch.equal(found["b"][0], T([[1.0]]))
    if queue is not None:
        found["a"].append("mine")
        assert len(given["a"]) == 3
        assert queue.size() == 0
        for k in range(capacity):
            queue.enqueue([T(k)])
        with pytest.raises(TimeoutError):
            queue.enqueue([T(9)], timeout=0.01)
        queue.close()
        assert [int(queue.dequeue()[0]) for _ in range(capacity)] == list(range(capacity))
        with pytest.raises(StopIteration):
            queue.dequeue()
    with pytest.raises(ValueError, match="float"):
        enqueue_dicts_with_queue_return({"a": 1.5}, 1)


def test_twenty_elements_through_queues_of_length_one_and_two():
    for capacity in (1, 2):
        numbers = iter(range(20))
        queue = StructureQueue(capacity)
        hook = EnqueueHook(queue, lambda numbers=numbers: [T(next(numbers))])
        hook.begin()
        assert [int(queue.dequeue(5)[0]) for _ in range(20)] == list(range(20))
        with pytest.raises(EndOfInput):
            queue.dequeue(5)
        hook.end()


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_pushes_are_applied_once_and_in_order_whatever_the_length(capacity):
    queue, applied = StructureQueue(capacity), []
    hook = AsyncPushHook(queue, lambda: applied.append(queue.dequeue()[0]))
    hook.begin()
    for step in range(6):
        hook.before_run()
        assert applied == list(range(max(0, step)))
        queue.enqueue([step])
        hook.after_run()
    hook.end()
    assert applied == list(range(6))


def test_functions_of_one_queue_share_a_hook():
    manager, seen = AsyncFunctionMgr(), []
    manager.add_async_function(seen.append, (1,), queue_name="q")
    manager.add_async_function(seen.append, (2,), queue_name="q")
    manager.add_async_function(seen.append, (3,), queue_name="r")
    assert len(manager.hooks) == 2
    assert seen == [1]
    assert manager.add_async_function(lambda: 7, is_async=False) == 7
    for hook in manager.hooks:
        hook.end()
    assert sorted(seen) == [1, 2, 3]


# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "norm", "sparse_norm", "warmup", "step", "dense", "sparse"),
    [
        (GradClipType.NoClip, 1.0, 1.0, None, 0, 3.0, 4.0),
        (GradClipType.ClipByGlobalNorm, None, 1.0, None, 0, 3.0, 4.0),
        (GradClipType.ClipByGlobalNorm, 2.5, None, None, 0, 1.5, 2.0),
        (GradClipType.ClipByGlobalNorm, 10.0, 2.5, None, 0, 3.0, 2.0),
        (GradClipType.ClipByGlobalNorm, 5.0, None, 4, 1, 3.0, 1.0),
        (GradClipType.ClipByGlobalNorm, 5.0, None, 4, 0, 3.0, 0.0),
        (GradClipType.ClipByGlobalNorm, 5.0, None, 4, 4, 3.0, 4.0),
        (GradClipType.ClipByDenseAndSparse, 1.5, None, None, 0, 1.5, 4.0),
        (GradClipType.ClipByDenseAndSparse, 1.5, 2.0, None, 0, 1.5, 2.0),
        (GradClipType.ClipByDenseAndSparse, None, 2.0, None, 0, 3.0, 2.0),
        (GradClipType.ClipByValue, 3.5, None, None, 0, 3.0, 3.5),
        (GradClipType.ClipByNorm, 3.5, None, None, 0, 3.0, 3.5),
    ],
)
def test_what_each_kind_of_clipping_leaves(kind, norm, sparse_norm, warmup, step, dense, sparse):
    limit = sparse_limit(kind, norm, sparse_norm, warmup, step)
    [d], [s] = clip_gradients([T([3.0])], [T([4.0])], kind, norm, limit)
    torch.testing.assert_close((d.item(), s.item()), (dense, sparse))
