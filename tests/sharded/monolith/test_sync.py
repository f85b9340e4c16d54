"""Synchronous tables: one rank in this process, then real ranks on gloo."""

from types import SimpleNamespace

import pytest
import torch

from shoal.errors import PeerError
from shoal.sharded import (
    AllToAllHashTable,
    DistributedMultiTypeHashTableMpi,
    ExportMode,
    SingleRank,
    SyncEnvironment,
    create_in_worker_multi_type_hash_table,
    create_in_worker_native_multi_hash_table,
    create_multi_type_hash_table,
    create_native_multi_hash_table,
    early_reorder_pack,
    enter_export_mode,
)
from shoal.sharded.all_to_all.exchange import FIND, Call, Exchange
from shoal.table import PolynomialDecay, reset_registry
from tests.sharded.helpers import adagrad, config, local, multi_type, native, run_ranks

pytestmark = pytest.mark.timeout(900)

T = torch.tensor


@pytest.fixture(params=["multi_type", "native"])
def kind(request):
    return {"multi_type": multi_type, "native": native}[request.param]


def test_one_rank_needs_no_process_group(kind):
    configs = {"1": config(1), "2": config(2, PolynomialDecay(1.0, 10, 2.0))}
    table = DistributedMultiTypeHashTableMpi(1, lambda rank: kind(rank, configs))
    ids = {"1": T([4, 4, 9]), "2": T([5])}
    bundle = {"mine": "kept"}
    rows, bundle = table.lookup(ids, bundle, table.reorder(ids))
    assert rows["1"].tolist() == [[0], [0], [0]]
    assert sorted(bundle) == sorted(
        [
            "mine", "shard_sizes", "fused_embedding_offsets", "emb_offset_sz", "id_flat_t", "id_size_flat_t",
            "embedding_splits", "id_offsets", "emb_offsets", "indices", "recv_emb_splits", "recv_embeddings_size",
        ]
    )  # fmt: skip
    table.apply_gradients({"1": T([[1.0], [2], [3]]), "2": T([[1.0, 2]])}, bundle, T(1), req_time=7)
    assert sorted(bundle) == ["emb_offset_sz", "mine"]
    rows, _ = table.lookup(ids, {}, table.reorder(ids))
    torch.testing.assert_close(rows["1"], T([[-3.0], [-3], [-3]]))
    torch.testing.assert_close(rows["2"], T([[-1.1, -2.2]]))
    assert table.get_table_dim_sizes() == [1, 2]


def test_what_synchronous_tables_do_not_do(kind):
    table = DistributedMultiTypeHashTableMpi(1, lambda rank: kind(rank, {"a": config(1)}))
    for call in (table.assign, table.assign_add, table.reinitialize):
        with pytest.raises(NotImplementedError):
            call({})
    with pytest.raises(AssertionError, match="outside the data pipeline"):
        table.lookup({"a": T([1])}, {})
    with pytest.raises(AssertionError, match="number of ranks"):
        DistributedMultiTypeHashTableMpi(2, lambda rank: kind(rank, {"a": config(1)}))


def test_scale_multiplies_gradients_and_time_reaches_the_rows():
    part = []

    def build(rank):
        part.append(native(rank, {"a": config(1)}))
        return part[0]

    table = DistributedMultiTypeHashTableMpi(1, build)
    _rows, bundle = table.lookup({"a": None}, {}, early_reorder_pack({"a": T([3])}, 1, [1]))
    table.apply_gradients({"a": T([[4.0]])}, bundle, 0, req_time=99, scale=0.25)
    assert part[0].lookup({"a": T([3])})["a"].item() == -1
    assert part[0].tables["a"].max_update_time == 99


def test_async_updates_come_one_call_later(kind):
    table = DistributedMultiTypeHashTableMpi(
        1,
        lambda rank: kind(rank, {"a": config(1)}),
        {"enable_async_optimize": 1, "enable_pipelined_fwda2a": 1, "embedding_prefetch_capacity": 2,
         "enable_pipelined_bwda2a": 1},
    )  # fmt: skip
    [hook] = table.get_queue_hooks()
    seen = []
    ids = {"a": T([1])}
    hook.begin()
    for step in range(3):
        hook.before_run()
        rows, bundle = table.lookup(ids, {}, table.reorder(ids))
        seen.append(rows["a"].item())
        table.apply_gradients({"a": T([[1.0]])}, bundle, step)
        hook.after_run()
    hook.end()
    assert seen == [0, -1, -2]
    assert table.lookup(ids, {}, table.reorder(ids))[0]["a"].item() == -3


def test_merged_slots_stand_in_front():
    reset_registry()
    table = create_in_worker_multi_type_hash_table(1, {"x": config(2, 0.1), "y": config(2, 0.1)}, None)
    merged = table.slot_mapping["x"]
    ids = {"x": T([1, 2]), "y": T([2])}
    pack = early_reorder_pack({merged: torch.cat([ids["x"], ids["y"]])}, 1, table.get_table_dim_sizes())
    rows, bundle = table.lookup(ids, {}, ({merged: [2, 1]}, pack))
    assert rows["x"].shape == (2, 2)
    assert "merged_slot_to_sizes" not in bundle
    table.apply_gradients({"x": torch.ones(2, 2), "y": torch.ones(1, 2)}, bundle, 0, skip_merge_id=True)
    rows, _ = table.lookup(ids, {}, ({merged: [2, 1]}, pack))
    torch.testing.assert_close(rows["y"], T([[-0.2, -0.2]]))
    reset_registry()


@pytest.mark.parametrize("num_ps", [0, 2])
def test_factories_build(num_ps):
    slots = {"a": config(4, 0.1), "b": config(4, 0.1)}
    for make, more in [
        (create_multi_type_hash_table, {}),
        (create_multi_type_hash_table, {"reduce_network_packets": True}),
        (create_native_multi_hash_table, {}),
    ]:
        reset_registry()
        table = make(num_ps, slots, [None] * max(1, num_ps), **more)
        table.assign({"a": (T([1, 2]), torch.ones(2, 4)), "b": (T([7]), torch.full((1, 4), 2.0))})
        rows = table.lookup({"a": T([2, 1, 9]), "b": T([7])})
        assert rows["a"].tolist() == [[1] * 4, [1] * 4, [0] * 4]
        table.apply_gradients({"a": (T([1, 1]), torch.ones(2, 4))}, 0)
        torch.testing.assert_close(table.lookup({"a": T([1])})["a"], torch.full((1, 4), 0.8))
        if num_ps:
            with pytest.raises(AssertionError, match="one sync client per server"):
                make(num_ps, slots, None, sync_clients=[None])
    reset_registry()
    assert create_in_worker_native_multi_hash_table(1, slots, None).get_table_dim_sizes() == [4, 4]
    reset_registry()


def test_hooks_of_users_reach_the_loop_and_are_not_ended_by_a_flush(kind):
    ended = []
    hook = SimpleNamespace(begin=None, before_run=None, after_run=None, end=lambda: ended.append(1))
    table = DistributedMultiTypeHashTableMpi(1, lambda r: kind(r, {"a": config(1)}), {"enable_async_optimize": 1})
    table.add_queue_hook(hook)
    assert table.get_queue_hooks()[1:] == [hook]
    _, bundle = table.lookup({"a": T([3])}, {}, table.reorder({"a": T([3])}))
    table.apply_gradients({"a": torch.ones(1, 1)}, bundle)
    table.flush()
    assert table.table.lookup({"a": T([3])})["a"].tolist() == [[-1]]
    assert ended == []
    assert table.as_op("name") is table.as_op(name="name") is table


def test_a_queue_that_does_not_exist_is_refused(kind):
    with pytest.raises(ValueError, match="queue_configs has no setting 'enable_prefetch'; settings are"):
        DistributedMultiTypeHashTableMpi(1, lambda r: kind(r, {"a": config(1)}), {"enable_prefetch": 1})


def test_a_negative_capacity_is_refused(kind):
    with pytest.raises(ValueError, match="queue_configs: enable_pipelined_fwda2a must be >= 0, got -1"):
        DistributedMultiTypeHashTableMpi(1, lambda r: kind(r, {"a": config(1)}), {"enable_pipelined_fwda2a": -1})


@pytest.mark.parametrize("capacity", ["1", None, 1.5])
def test_a_capacity_that_is_no_integer_is_refused(kind, capacity):
    with pytest.raises(ValueError, match="queue_configs: enable_pipelined_fwda2a must be an integer, got"):
        DistributedMultiTypeHashTableMpi(1, lambda r: kind(r, {"a": config(1)}), {"enable_pipelined_fwda2a": capacity})


def test_an_exchange_of_the_wrong_size_is_told_in_words():
    exchange = Exchange(SingleRank(), torch.float32)
    with pytest.raises(PeerError, match=r"rank 0, ids of find 7 of table\(s\) 'a': expected \[3\] elements"):
        exchange.send("ids", Call(FIND, 7, ("a",)), torch.ones(2), [2], [3])
    with pytest.raises(PeerError, match=r"rank 0, ids: expected \[3\] elements"):
        exchange.send("ids", None, torch.ones(2), [2], [3])


def test_an_update_that_is_refused_leaves_its_bundle_whole(kind):
    table = DistributedMultiTypeHashTableMpi(1, lambda rank: kind(rank, {"a": config(1), "b": config(2)}))
    ids = {"a": T([1, 2]), "b": T([3])}
    _, bundle = table.lookup(ids, {}, table.reorder(ids))
    keys = set(bundle)
    a, b = torch.ones(2, 1), torch.ones(1, 2)
    for bad in ({}, {"a": a}, {"a": torch.ones(3, 1), "b": b}, {"a": a, "c": b}, {"a": a, "b": None}):
        with pytest.raises(ValueError):
            table.apply_gradients(bad, bundle)
        assert set(bundle) == keys
    with enter_export_mode(ExportMode.STANDALONE), pytest.raises(RuntimeError, match="exporting"):
        table.apply_gradients({"a": a, "b": b}, bundle)
    assert set(bundle) == keys
    table.apply_gradients({"a": torch.ones(2, 1), "b": torch.ones(1, 2)}, bundle)
    with pytest.raises(ValueError, match="has no lookup"):
        table.apply_gradients({"a": torch.ones(2, 1), "b": torch.ones(1, 2)}, bundle)
    assert table.table.lookup(ids)["b"].tolist() == [[-1, -1]]


# --- ranks ------------------------------------------------------------------------------------------------------------


def worked_example(rank, world):
    configs = {"A": config(1), "B": config(2)}
    table = DistributedMultiTypeHashTableMpi(world, lambda r: multi_type(r, configs))
    stored = {0: {"A": ([2], [[0.2]]), "B": ([4], [[4.0, 40]])}, 1: {"A": ([3], [[0.3]]), "B": ([5], [[5.0, 50]])}}
    table.table.assign({slot: (T(ids), T(values)) for slot, (ids, values) in stored[rank].items()})
    ids = [{"A": T([2, 3, 2]), "B": T([5])}, {"A": T([3]), "B": T([4, 5, 4])}][rank]
    rows, bundle = table.lookup(ids, {}, table.reorder(ids))
    sent = {
        k: bundle[k].tolist()
        for k in ("id_flat_t", "id_size_flat_t", "embedding_splits", "id_offsets", "emb_offsets", "recv_emb_splits")
    }
    grads = [{"A": T([[1.0], [2], [3]]), "B": T([[0.5, 0.25]])},
             {"A": T([[4.0]]), "B": T([[1.0, 1], [2, 2], [3, 3]])}][rank]  # fmt: skip
    table.apply_gradients(grads, bundle, 0)
    after = table.table.lookup({"A": T([2, 3]), "B": T([4, 5])})
    return {k: v.tolist() for k, v in rows.items()}, sent, {k: v.tolist() for k, v in after.items()}


def test_worked_example_on_two_ranks():
    (rows0, sent0, after0), (rows1, sent1, after1) = run_ranks(2, worked_example)
    approx = pytest.approx
    assert rows0 == {"A": [approx([0.2]), approx([0.3]), approx([0.2])], "B": [[5, 50]]}
    assert rows1 == {"A": [approx([0.3])], "B": [[4, 40], [5, 50], [4, 40]]}
    assert sent0["id_flat_t"] == [2, 4]
    assert sent0["id_size_flat_t"] == [1, 0, 0, 1]
    assert (sent0["embedding_splits"], sent0["recv_emb_splits"]) == ([1, 2], [1, 3])
    assert (sent0["id_offsets"], sent0["emb_offsets"]) == ([0, 1, 1, 1, 2], [0, 1, 1, 1, 3])
    assert sent1["id_flat_t"] == [3, 5, 3, 5]
    assert (sent1["embedding_splits"], sent1["recv_emb_splits"]) == ([3, 3], [2, 3])
    assert after0 == {"A": [approx([-3.8]), [0]], "B": [[0, 36], [0, 0]]}
    assert after1 == {"A": [[0], approx([-5.7])], "B": [[0, 0], approx([2.5, 47.75])]}


def random_steps(rank, world, kind_name, dtype):
    from shoal.sharded import environment as env

    env.environment = SyncEnvironment(backward_dtype=dtype)
    build = {"multi_type": multi_type, "native": native}[kind_name]
    configs = {"b": config(3), "a": config(1, PolynomialDecay(1.0, 10, 2.0)), "c": adagrad(8)}
    table = DistributedMultiTypeHashTableMpi(world, lambda r: build(r, configs))
    judges = {name: local(0, c) for name, c in configs.items()}
    for step in range(3):
        every = []
        for r in range(world):
            g = torch.Generator().manual_seed(100 * step + r)
            ids = {
                n: torch.randint(-20, 20, (int(torch.randint(0, 30, (1,), generator=g)),), generator=g) for n in "abc"
            }
            grads = {n: torch.randn(ids[n].numel(), d, generator=g) for n, d in [("a", 1), ("b", 3), ("c", 8)]}
            if dtype == torch.float16:
                grads = {n: v.mul(4).round() / 4 for n, v in grads.items()}
            every.append((ids, grads))
        ids, grads = every[rank]
        rows, bundle = table.lookup(ids, {}, table.reorder(ids))
        for n, judge in judges.items():
            torch.testing.assert_close(rows[n], judge.lookup(ids[n]), atol=1e-5, rtol=1e-5)
        table.apply_gradients(grads, bundle, step)
        for their_ids, their_grads in every:
            for n, judge in judges.items():
                judge.apply_gradients(their_ids[n], their_grads[n], step, enable_dedup=True)
    return True


@pytest.mark.parametrize(
    ("world", "kind_name", "dtype"), [(2, "native", torch.float32), (3, "multi_type", torch.float16)]
)
def test_ranks_give_what_one_table_would(world, kind_name, dtype):
    assert all(run_ranks(world, random_steps, kind_name, dtype))


def one_table(rank, world):
    table = AllToAllHashTable(4, optimizer="sgd", lr=0.5, initializer="zeros")
    judge = local(0, config(4, 0.5))
    for step in range(3):
        every = []
        for r in range(world):
            g = torch.Generator().manual_seed(10 * step + r)
            ids = torch.randint(-9, 30, (25 if r else 0,), generator=g)
            every.append((ids, torch.randn(ids.numel(), 4, generator=g)))
        ids, values = every[rank]
        torch.testing.assert_close(table.lookup(ids), judge.lookup(ids), atol=1e-5, rtol=1e-5)
        table.apply_gradients(ids, values, step)
        table.assign_add(ids, values)
        for their_ids, their_values in every:
            judge.apply_gradients(their_ids, their_values, step)
        for their_ids, their_values in every:
            judge.assign_add(their_ids, their_values)
    owned = table.table.size()
    return owned, table.size(), judge.size()


def save_rows(rank, world, folder):
    table = AllToAllHashTable(2, optimizer="sgd", lr=0.5, initializer="zeros")
    ids = torch.arange(-20, 40)[rank::world]
    table.assign(ids, torch.stack([ids, 2 * ids], 1).float())
    table.save(folder)
    return table.table.size()


def load_rows(rank, world, folder):
    table = AllToAllHashTable(2, optimizer="sgd", lr=0.5, initializer="zeros")
    table.restore(folder)
    ids = torch.arange(-20, 40)
    torch.testing.assert_close(table.lookup(ids), torch.stack([ids, 2 * ids], 1).float())
    assert bool((table.owner(ids)[table.table.contains(ids)] == rank).all())
    return table.table.size()


def test_ranks_load_what_another_number_of_ranks_saved(tmp_path):
    assert sum(run_ranks(2, save_rows, str(tmp_path))) == 60
    assert sum(run_ranks(3, load_rows, str(tmp_path))) == 60
    table = AllToAllHashTable(2, optimizer="sgd", lr=0.5, initializer="zeros")
    assert table.restore(tmp_path).size() == 60
    with pytest.raises(ValueError, match="not a checkpoint of a table over ranks"):
        table.restore(tmp_path / "nothing")


def kept_rows(rank, world, folder, kind_name, saved_by):
    """Save the rows of a synchronous table, or restore what ``saved_by`` ranks saved; then the ids of this rank."""
    kind = {"native": native, "multi_type": multi_type}[kind_name]
    configs = {"a": config(1), "b": config(2)}
    table = DistributedMultiTypeHashTableMpi(world, lambda r: kind(r, configs))

    def each(call, bases):
        if kind is native:
            call(table.table, bases("rows"))
        else:
            for name, part in table.table.tables.items():
                call(part, bases(name))

    ids = torch.arange(-10, 30)
    if saved_by is None:
        slots = {"a": ids, "b": ids}
        _, bundle = table.lookup(slots, {}, table.reorder(slots))
        grads = {"a": -ids.view(-1, 1).float(), "b": torch.ones(40, 2)}
        table.apply_gradients(grads, bundle)
        each(lambda part, base: part.save(base), lambda name: f"{folder}/{rank}/{name}")
    else:
        one = f"{folder}/{min(rank, saved_by - 1)}"
        with pytest.raises(ValueError, match=f"of {saved_by}, but this table is for rank {rank} of {world}"):
            each(lambda part, base: part.restore(base), lambda name: f"{one}/{name}")
        assert all(not part.size() for part in table.table.tables.values())
        each(lambda part, bases: part.restore(bases), lambda name: [f"{folder}/{r}/{name}" for r in range(saved_by)])
    found = table.table.tables["a"].contains(ids)
    slots = {"a": ids, "b": ids}
    rows, _ = table.lookup(slots, {}, table.reorder(slots))
    return ids[found].tolist(), rows["a"].view(-1).tolist()


@pytest.mark.parametrize("kind_name", ["native", "multi_type"])
def test_a_shard_takes_its_own_ids_from_the_saves_of_other_numbers_of_ranks(tmp_path, kind_name):
    saved = run_ranks(5, kept_rows, str(tmp_path), kind_name, None)
    assert saved[0][0] == []  # rank 0 of more than four has no rows
    loaded = run_ranks(2, kept_rows, str(tmp_path), kind_name, 5)
    for rank, (ids, rows) in enumerate(loaded):
        assert ids == [i for i in range(-10, 30) if i % 2 == rank]
        assert rows == [5.0 * i for i in range(-10, 30)]  # a step per rank


def test_one_table_over_ranks_is_one_table():
    for owned, size, expected in run_ranks(2, one_table):
        assert size == expected
        assert owned < size


def ids_again_on_one_rank(rank, world):
    """Rank 0 asks with one tensor all the time, the others with a new one each time, and in the end nobody has news."""
    table = AllToAllHashTable(1, optimizer="sgd", lr=1.0, initializer="zeros")
    ids = torch.arange(10)
    table.assign(ids[:0] if rank else ids, torch.empty(0, 1) if rank else torch.arange(10.0).view(10, 1))
    seen = []
    for step in range(4):
        mine = ids if rank == 0 else torch.arange(step, step + 3)
        seen.append(table.lookup(mine).view(-1).tolist())
        table.apply_gradients(mine if rank == 0 else mine.clone(), torch.zeros(mine.numel(), 1))
    for _ in range(2):
        seen.append(table.lookup(ids).view(-1).tolist())
    table.apply_gradients(ids, torch.ones(10, 1))
    buffer = ids.numpy()
    buffer[:] = buffer[::-1].copy()  # without torch noticing
    return seen, table.lookup(ids).view(-1).tolist()


def test_ranks_may_differ_in_whether_their_ids_are_new():
    rows = [float(i) for i in range(10)]
    for rank, (seen, last) in enumerate(run_ranks(2, ids_again_on_one_rank)):
        news = [rows] * 4 if rank == 0 else [rows[step : step + 3] for step in range(4)]
        assert seen == [*news, rows, rows]
        assert last == [row - 2 for row in reversed(rows)]
