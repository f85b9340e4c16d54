"""Distributed tables over parts in this process and over parameter servers: the same rules and numbers."""

import pytest
import torch

from shoal.sharded import (
    DistributedHashTable,
    DistributedMultiTypeHashTable,
    RemoteHashTable,
    RemoteMultiHashTable,
    RemoteMultiTypeHashTable,
)
from shoal.table import (
    HashTable,
    MultiTypeHashTable,
    PolynomialDecay,
    SgdOptimizer,
    StochasticRoundingFloat16OptimizerWrapper,
)
from tests.sharded.helpers import adagrad, config, local, multi_type, native

T = torch.tensor


@pytest.fixture(params=["local", "remote"])
def single(request, ps):
    """single(ps_num, config) -> a DistributedHashTable."""

    def build(ps_num, table_config):
        if request.param == "local":
            return DistributedHashTable(ps_num, table_config, local)
        client = ps(ps_num)
        return DistributedHashTable(ps_num, table_config, lambda i, c: RemoteHashTable(client, i, "t", c))

    return build


@pytest.fixture(params=["multi_type", "native", "remote multi_type", "remote native"])
def several(request, ps):
    """several(num_ps, configs, **options) -> a DistributedMultiTypeHashTable."""

    def build(num_ps, configs, **options):
        if not request.param.startswith("remote"):
            return DistributedMultiTypeHashTable(
                num_ps, configs, {"multi_type": multi_type, "native": native}[request.param], **options
            )
        client = ps(num_ps)
        kind = RemoteMultiHashTable if request.param.endswith("native") else RemoteMultiTypeHashTable
        return DistributedMultiTypeHashTable(num_ps, configs, lambda i, c: kind(client, i, c), **options)

    build.native = request.param.endswith("native")
    return build


def test_rows_are_found_again(single):
    table = single(2, config(2))
    table = table.assign_add(T([1, 2, 3]), T([[1.0, 1], [2, 2], [3, 3]]))
    assert table.lookup(T([1, 2, 3])).tolist() == [[1, 1], [2, 2], [3, 3]]
    assert table.lookup(T([1, 1, 3])).tolist() == [[1, 1], [1, 1], [3, 3]]
    assert table.lookup(T([9, 2])).tolist() == [[0, 0], [2, 2]]
    assert table.lookup(torch.empty(0, dtype=torch.int64)).shape == (0, 2)
    assert table.dim_size == 2
    assert table.size() == 3


def test_assign_replaces(single):
    table = single(2, config(2))
    table.assign(T([1, 2, 3]), T([[1.0, 1], [2, 2], [3, 3]]))
    assert table.lookup(T([1, 2, 3])).tolist() == [[1, 1], [2, 2], [3, 3]]
    table.assign(T([2, 3, 4]), T([[1.0, 1], [2, 2], [3, 3]]))
    assert table.lookup(T([1, 2, 3, 4])).tolist() == [[1, 1], [1, 1], [2, 2], [3, 3]]
    table.assign(T([5, 5]), T([[7.0, 7], [8, 8]]))
    table.assign_add(T([5, 5]), T([[1.0, 0], [2, 0]]))
    assert table.lookup(T([5])).tolist() == [[11, 8]]


def test_gradients_step_every_id(single):
    table = single(2, config(1))
    table.apply_gradients(T([0, 1]), T([[2.0], [2.0]]), global_step=0)
    assert table.lookup(T([0, 1])).tolist() == [[-2], [-2]]


def test_learning_rate_functions_see_the_callers_step(single):
    table = single(2, config(1, PolynomialDecay(1.0, 10, 2.0)))
    table.apply_gradients(T([0, 1]), T([[2.0], [2.0]]), global_step=0)
    assert table.lookup(T([0, 1])).tolist() == [[-2], [-2]]
    table.apply_gradients(T([0, 1]), T([[2.0], [2.0]]), global_step=1)
    torch.testing.assert_close(table.lookup(T([0, 1])), T([[-4.2], [-4.2]]))


def test_gradients_of_equal_ids_are_summed_into_one_step(single):
    table = single(3, adagrad(1, 0.5))
    ids = T([5, 8, 5])
    table.lookup(ids)
    table.apply_gradients(ids, T([[2.0], [1.0], [1.0]]), 0)
    expected = -0.5 * 3 / (0.1 + 9) ** 0.5
    torch.testing.assert_close(table.lookup(T([5])), T([[expected]]))


def test_changed_ids_are_routed_anew(single):
    table = single(2, config(1))
    ids = T([1, 2])
    table.lookup(ids)
    ids[0] = 6
    table.apply_gradients(ids, T([[1.0], [1.0]]), 0)
    assert table.lookup(T([1, 2, 6])).tolist() == [[0], [-1], [-1]]


def test_ids_that_changed_behind_torchs_back_are_routed_anew(single):
    table = single(2, config(1))
    table.assign(torch.arange(1, 7), torch.arange(1.0, 7).view(6, 1))
    ids = T([1, 2, 3])
    assert table.lookup(ids).view(-1).tolist() == [1, 2, 3]
    ids.numpy()[:] = [4, 5, 6]
    assert table.lookup(ids).view(-1).tolist() == [4, 5, 6]
    with torch.inference_mode():  # whose tensors have no version
        assert table.lookup(T([6, 1])).view(-1).tolist() == [6, 1]


def test_negative_ids_go_to_the_floor_mod(single):
    table = single(3, config(1))
    ids = T([-1, -2, -3, -9, 4])
    table.assign(ids, torch.arange(5.0).view(5, 1))
    assert table.lookup(ids).view(-1).tolist() == [0, 1, 2, 3, 4]
    assert [part.contains(ids).tolist() for part in table.tables] == [
        [i % 3 == shard for i in ids.tolist()] for shard in range(3)
    ]


def test_inserting_lookups_and_reinitialize(single):
    from shoal.table import ConstantsInitializer

    table = single(2, config(1, initializer=ConstantsInitializer(0.5)))
    assert table.lookup(T([4, 7]), insert_missing=True).tolist() == [[0.5], [0.5]]
    assert table.contains(T([4, 5, 7])).tolist() == [True, False, True]
    table.assign(T([4]), T([[3.0]]))
    _, status = table.reinitialize(T([9, 4, 9, 7]))
    assert status.tolist() == [0, 1, 1, 1]
    assert table.lookup(T([4])).item() == 0.5


def test_more_shards_than_ids(single):
    table = single(5, config(2))
    table.assign(T([3]), T([[1.0, 2]]))
    assert table.lookup(T([3, 3, 4])).tolist() == [[1, 2], [1, 2], [0, 0]]


def test_random_work_equals_one_local_table(single):
    torch.manual_seed(1)
    table, judge = single(3, adagrad(4)), local(0, adagrad(4))
    for step in range(5):
        ids = torch.randint(-50, 50, (200,))
        values = torch.randn(200, 4)
        torch.testing.assert_close(table.lookup(ids), judge.lookup(ids))
        table.apply_gradients(ids, values, step)
        judge.apply_gradients(ids, values, step, enable_dedup=True)
        table.assign_add(ids, values)
        judge.assign_add(ids, values)
        torch.testing.assert_close(table.lookup(ids), judge.lookup(ids))


# --- several tables ---------------------------------------------------------------------------------------------------


def two_slots():
    return {"1": config(1), "2": config(2, lambda: 1.0)}


def test_slots_are_kept_apart(several):
    table = several(2, two_slots())
    table.assign_add({"1": (T([1, 2]), T([[-1.0], [-2]])), "2": (T([3]), T([[-3.0, -3]]))})
    rows = table.lookup({"1": T([1, 2]), "2": T([3])})
    assert rows["1"].tolist() == [[-1], [-2]]
    assert rows["2"].tolist() == [[-3, -3]]
    table.apply_gradients({"1": (T([1, 2]), T([[-0.5], [-1]])), "2": (T([3]), T([[-1.5, -1.5]]))}, 0, req_time=0)
    rows = table.lookup({"1": T([1, 2]), "2": T([3])})
    assert rows["1"].tolist() == [[-0.5], [-1]]
    assert rows["2"].tolist() == [[-1.5, -1.5]]
    assert table.get_table_dim_sizes() == [1, 2]
    assert list(table.lookup({"2": T([3, 3])})) == ["2"]
    assert table.get_queue_hooks() == []
    assert table.as_op() is table


def test_assign_and_reinitialize(several):
    table = several(2, two_slots())
    table.assign({"1": (T([1, 2]), T([[-1.0], [-2]])), "2": (T([3]), T([[-3.0, -3]]))})
    assert table.lookup({"1": T([1, 2])})["1"].tolist() == [[-1], [-2]]
    table.assign({"1": (T([1, 2]), T([[-0.5], [-1]])), "2": (T([3]), T([[-1.5, -1.5]]))})
    assert table.lookup({"1": T([1, 2])})["1"].tolist() == [[-0.5], [-1]]
    if not several.native:
        with pytest.raises(NotImplementedError):
            table.reinitialize("1", T([1, 2, 3]))
        with pytest.raises(KeyError):
            table.lookup({"3": T([1])})
        return
    assert table.reinitialize("1", T([1, 2, 3]))[1].tolist() == [1, 1, 0]
    assert table.reinitialize("3", T([1, 2, 3]))[1].tolist() == [-1, -1, -1]
    assert table.reinitialize("1", T([9, 2, 9, 8]))[1].tolist() == [0, 1, 1, 0]
    rows = table.lookup({"1": T([1, 2, 3]), "2": T([3]), "3": T([1])})
    assert rows["1"].tolist() == [[0], [0], [0]]
    assert rows["2"].tolist() == [[-1.5, -1.5]]
    assert "3" not in rows


def test_an_unknown_slot_in_a_write_changes_nothing(several):
    table = several(2, two_slots())
    with pytest.raises(KeyError):
        table.assign({"1": (T([1]), T([[1.0]])), "9": (T([1]), T([[1.0]]))})
    with pytest.raises(KeyError):
        table.apply_gradients({"1": (T([1]), T([[1.0]])), "9": (T([1]), T([[1.0]]))}, 0)
    assert table.lookup({"1": T([1])})["1"].item() == 0


@pytest.mark.parametrize("float16", [False, True])
def test_a_bad_gradient_for_one_part_changes_no_part(several, float16):
    table = several(2, two_slots(), transfer_float16=float16)
    table.assign({"1": (T([4, 5]), T([[1.0], [1.0]]))})
    for bad in (float("nan"), 70000.0 if float16 else float("inf")):  # float16 ends at 65504
        with pytest.raises(ValueError, match="table '1': a gradient holds NaN or infinity; nothing was applied"):
            table.apply_gradients({"1": (T([4, 5]), T([[1.0], [bad]]))}, 0)
        assert table.lookup({"1": T([4, 5])})["1"].tolist() == [[1], [1]]


def test_a_bad_gradient_is_left_to_tables_that_skip_it():
    def build(i, configs):
        return MultiTypeHashTable(
            configs, lambda name, c: HashTable.from_config(c, name=f"{name}_{i}_skips", on_bad_gradient="skip")
        )

    table = DistributedMultiTypeHashTable(2, two_slots(), build)
    table.apply_gradients({"1": (T([4, 5]), T([[1.0], [float("nan")]]))}, 0)
    assert table.lookup({"1": T([4, 5])})["1"].tolist() == [[-1], [0]]


def test_every_slot_follows_its_own_rate(several):
    table = several(2, {"a": config(1, PolynomialDecay(1.0, 10, 2.0)), "b": config(2, 0.5)})
    for step in (0, 1):
        table.apply_gradients({"a": (T([7, 8]), T([[2.0], [2]])), "b": (T([7]), T([[1.0, 2]]))}, step)
    rows = table.lookup({"a": T([7, 8]), "b": T([7])})
    torch.testing.assert_close(rows["a"], T([[-4.2], [-4.2]]))
    torch.testing.assert_close(rows["b"], T([[-1.0, -2.0]]))


def test_float16_on_the_way(several):
    sgd = StochasticRoundingFloat16OptimizerWrapper(SgdOptimizer())
    configs = {"1": config(1, optimizer=sgd), "2": config(2, optimizer=sgd)}
    table = several(2, configs, transfer_float16=True)
    table.apply_gradients({"1": (T([1, 2]), T([[2.0], [2]])), "2": (T([3]), T([[3.0, 3]]))}, 1)
    rows = table.lookup({"1": T([1, 2]), "2": T([3])})
    assert rows["1"].tolist() == [[-2], [-2]]
    assert rows["2"].tolist() == [[-3, -3]]
    table.assign({"1": (T([5, 6]), T([[0.1], [1e6]]))})
    found = table.lookup({"1": T([5, 6])})["1"]
    assert found.tolist() == [[0.0999755859375], [float("inf")]]
    with pytest.raises(KeyError):
        table.lookup({"3": T([1])})


def test_the_time_of_a_write_reaches_every_part(ps):
    parts = []

    def keep(i, configs):
        parts.append(native(i, configs))
        return parts[-1]

    table = DistributedMultiTypeHashTable(3, two_slots(), keep)
    table.assign({"1": (T([3]), T([[1.0]]))}, req_time=50)
    assert [t.max_update_time for part in parts for t in part.tables.values()] == [50] * 6
    table.apply_gradients({"2": (T([3]), T([[1.0, 1.0]]))}, 0, req_time=T(77))
    assert [t.max_update_time for part in parts for t in part.tables.values()] == [77] * 6


def test_random_slots_equal_local_tables(several):
    torch.manual_seed(2)
    configs = {name: adagrad(dim) for name, dim in [("x", 3), ("a", 1), ("m", 8)]}
    table = several(3, configs)
    judges = {name: local(0, c) for name, c in configs.items()}
    for step in range(4):
        ids = {name: torch.randint(0, 40, (100,)) for name in configs}
        rows = table.lookup(ids)
        for name, judge in judges.items():
            torch.testing.assert_close(rows[name], judge.lookup(ids[name]))
        grads = {name: torch.randn_like(rows[name]) for name in configs}
        table.apply_gradients({name: (ids[name], grads[name]) for name in configs}, step)
        for name, judge in judges.items():
            judge.apply_gradients(ids[name], grads[name], step, enable_dedup=True)


def test_nothing_is_a_batch_too(several):
    table = several(2, {"a": config(1), "b": config(2)})
    none = torch.empty(0, dtype=torch.int64)
    assert table.lookup({}) == {}
    assert table.lookup({"b": none})["b"].shape == (0, 2)
    for write in (table.assign, table.assign_add, table.apply_gradients):
        assert write({}) is table
        assert write({"a": (none, torch.empty(0, 1))}) is table
    assert table.size() == 0
    assert table.get_queue_hooks() == []
