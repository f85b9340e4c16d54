"""The effect of ``queue_configs``: early lookups and late updates, in one order. Threads, then ranks."""

import itertools
import threading

import pytest
import torch

from shoal.errors import ConfigError, PeerError
from shoal.nn.combiners import ReduceSum
from shoal.sharded import (
    DistributedMultiTypeHashTableMpi,
    OutConfig,
    OutType,
    ParserCtx,
    SliceConfig,
    create_in_worker_multi_type_hash_table,
    create_partitioned_hash_table,
    early_reorder_pack,
    gen_feature_configs,
)
from shoal.table import reset_registry
from tests.sharded.helpers import config, multi_type, native
from tests.sharded.ranks import in_ranks, raised

T = torch.tensor
DEADLINE_S = 60
KEYS = ("enable_pipelined_fwda2a", "embedding_prefetch_capacity", "enable_pipelined_bwda2a", "enable_async_optimize")


@pytest.fixture(params=["multi_type", "native"])
def kind(request):
    return {"multi_type": multi_type, "native": native}[request.param]


def make(kind=multi_type, backend=None, **queues):
    shards = 1 if backend is None else backend.world_size
    return DistributedMultiTypeHashTableMpi(shards, lambda rank: kind(rank, {"a": config(1)}), queues, backend=backend)


class Log:
    """What the thread of a pipeline did: ``looked``, ``exchanged`` and ``applied``, how often."""

    def __init__(self, table):
        self._changed = threading.Condition()
        self.events = []
        self._count(table._shard.exchange, "rows", "looked")
        self._count(table._shard.exchange, "gradients", "exchanged")
        self._count(table.table, "fused_apply_gradient", "applied")

    def _count(self, owner, method, event):
        inner = getattr(owner, method)

        def call(*args, **kwargs):
            result = inner(*args, **kwargs)
            with self._changed:
                self.events.append(event)
                self._changed.notify_all()
            return result

        setattr(owner, method, call)

    def wait(self, event, times):
        with self._changed:
            assert self._changed.wait_for(lambda: self.events.count(event) >= times, DEADLINE_S), (event, times)


def run(table, batches, during=lambda step: None, grad=1.0):
    """The values that each batch saw; ``during(step)`` is called while it computes."""
    seen = []
    pipeline = table.pipeline(batches)
    for step, looked in enumerate(pipeline):
        seen.append(-looked.embeddings["a"].item())
        during(step)
        pipeline.update({"a": T([[grad]])}, global_step=step)
    return seen, -table.table.lookup({"a": T([7])})["a"].item()


def test_without_keys_it_is_the_loop_of_lookup_and_apply_gradients(kind):
    assert run(make(kind), [{"a": T([7])}] * 5) == ([0, 1, 2, 3, 4], 5)


@pytest.mark.parametrize("amount", [1, 2])
@pytest.mark.parametrize("key", KEYS)
def test_each_key_makes_rows_as_stale_as_it_says_and_every_update_once(kind, key, amount):
    table = make(kind, **{key: amount})
    pipeline = table.pipeline([])
    assert pipeline.staleness == amount
    assert run(table, [{"a": T([7])}] * 8) == ([max(0, n - amount) for n in range(8)], 8)


def test_keys_add_up():
    table = make(**dict.fromkeys(KEYS, 1))
    assert run(table, [{"a": T([7])}] * 8) == ([max(0, n - 4) for n in range(8)], 8)


def test_the_rows_of_the_next_batch_are_exchanged_while_one_computes():
    table = make(enable_pipelined_fwda2a=1)
    log = Log(table)
    run(table, [{"a": T([7])}] * 5, lambda step: log.wait("looked", min(step + 2, 5)))


def test_a_whole_capacity_of_batches_is_looked_up_while_one_computes():
    table = make(embedding_prefetch_capacity=3)
    log = Log(table)
    run(table, [{"a": T([7])}] * 6, lambda step: log.wait("looked", min(step + 4, 6)))


def test_gradients_are_exchanged_and_applied_while_the_next_batch_computes():
    for key in ("enable_pipelined_bwda2a", "enable_async_optimize"):
        table = make(**{key: 1})
        log = Log(table)

        def during(step, log=log):
            assert log.events.count("exchanged") <= step  # not that of this batch, and maybe not the last one
            log.wait("exchanged", step)
            log.wait("applied", step)

        run(table, [{"a": T([7])}] * 5, during)


def test_with_both_keys_an_update_is_applied_a_step_after_its_exchange():
    table = make(enable_pipelined_bwda2a=1, enable_async_optimize=1)
    log = Log(table)

    def during(step):
        log.wait("exchanged", step)
        log.wait("applied", max(0, step - 1))
        assert log.events.count("applied") <= max(0, step - 1)

    run(table, [{"a": T([7])}] * 5, during)


def test_an_update_that_is_not_late_is_in_the_rows_when_the_call_returns():
    table = make(enable_pipelined_fwda2a=1)
    pipeline = table.pipeline([{"a": T([7])}] * 4)
    for step, _ in enumerate(pipeline):
        pipeline.update({"a": T([[1.0]])}, step)
        assert table.table.lookup({"a": T([7])})["a"].item() == -1 - step


def test_other_ids_end_in_the_same_rows_whatever_the_keys():
    expected = None
    for queues in ({}, *({key: 2} for key in KEYS), dict.fromkeys(KEYS, 1)):
        table = make(**queues)
        pipeline = table.pipeline([{"a": T([n, n + 10])} for n in range(8)])
        for step, _ in enumerate(pipeline):
            pipeline.update({"a": T([[1.0], [2.0]]) * (step + 1)}, step)
        rows = table.table.lookup({"a": torch.arange(20)})["a"]
        expected = rows if expected is None else expected
        assert torch.equal(rows, expected)


def test_batches_of_any_form_with_packs_and_times():
    table = make(native)
    batches = [{"x": T([n]), "time": 10 + n} for n in range(3)]
    pipeline = table.pipeline(batches, ids=lambda batch: {"a": batch["x"]}, req_time=lambda batch: T(batch["time"]))
    for looked in pipeline:
        pipeline.update({"a": T([[1.0]])}, 0, req_time=looked.batch["time"], scale=0.5)
    assert table.table.lookup({"a": torch.arange(3)})["a"].flatten().tolist() == [-0.5] * 3
    assert table.table.tables["a"].max_update_time == 12
    packed = table.pipeline([1, 2], ids=lambda n: ({"a": None}, early_reorder_pack({"a": T([n])}, 1, [1])))
    assert [looked.embeddings["a"].item() for looked in packed] == [-0.5, -0.5]


def test_steps_without_gradients_and_loops_that_call_hooks():
    table = make(enable_async_optimize=1)
    pipeline = table.pipeline([{"a": T([7])}] * 6)
    hooks = table.get_queue_hooks()
    assert pipeline.hooks[0] in hooks
    for hook in hooks:
        hook.begin()
    seen = []
    for step in range(4):
        for hook in hooks:
            hook.before_run(None)
        looked = pipeline.next()
        seen.append(-looked.embeddings["a"].item())
        if step != 1:
            pipeline.update({"a": T([[1.0]])}, step)
        for hook in hooks:
            hook.after_run(None, None)
    for hook in hooks:
        hook.end(None)
    assert seen == [0, 0, 1, 1]
    assert table.table.lookup({"a": T([7])})["a"].item() == -3
    assert pipeline.next() is None
    with pytest.raises(ConfigError, match="no batch waits"):
        pipeline.update({"a": T([[1.0]])}, 0)


@pytest.mark.parametrize("queues", [{}, {"enable_pipelined_fwda2a": 2}, {"enable_async_optimize": 1}], ids=str)
def test_errors_come_with_their_batch_and_leaving_early_applies_what_there_is(queues):
    table, others = make(**queues), set(threading.enumerate())

    def broken():
        yield from [{"a": T([7])}] * 2
        raise OSError("the disk burns")

    with pytest.raises(OSError, match="burns"):
        run(table, broken())
    table = make(**queues)
    pipeline = table.pipeline(itertools.repeat({"a": T([7])}))
    for step, _ in enumerate(pipeline):
        pipeline.update({"a": T([[1.0]])}, step)
        if step == 3:
            break
    pipeline.close()
    assert table.table.lookup({"a": T([7])})["a"].item() == -4
    assert not any(thread.name.startswith("shoal-table") for thread in set(threading.enumerate()) - others)


@pytest.mark.parametrize("late", [0, 1])
def test_gradients_that_are_refused_may_be_given_again(kind, late):
    table = make(kind, enable_async_optimize=late)
    for step, _ in enumerate(pipeline := table.pipeline([{"a": T([7])}] * 3)):
        for bad in ({}, {"a": torch.ones(2, 1)}, {"b": T([[1.0]])}):
            with pytest.raises(ConfigError):
                pipeline.update(bad, step)
        pipeline.update({"a": T([[1.0]])}, step)
        with pytest.raises(ConfigError, match="no batch waits for gradients"):
            pipeline.update({"a": T([[1.0]])}, step)
    assert table.table.lookup({"a": T([7])})["a"].item() == -3


def test_merged_slots_have_it_too():
    reset_registry()
    table = create_in_worker_multi_type_hash_table(
        1, {"x": config(2, 0.1), "y": config(2, 0.1)}, None, queue_configs={"enable_async_optimize": 1}
    )
    pipeline = table.pipeline([{"x": T([1, 2]), "y": T([2])}] * 3)
    shapes = []
    for looked in pipeline:
        shapes.append({slot: list(rows.shape) for slot, rows in looked.embeddings.items()})
        pipeline.update({"x": torch.ones(2, 2), "y": torch.ones(1, 2)}, 0)
    assert shapes == [{"x": [2, 2], "y": [1, 2]}] * 3
    (last,) = list(table.pipeline([{"x": T([1, 2]), "y": T([2])}]))
    torch.testing.assert_close(last.embeddings["y"], T([[-0.6, -0.6]]))


# --- ranks ------------------------------------------------------------------------------------------------------------


def on_ranks(ranks, queues, counts):
    table = make(native, ranks, **queues)
    seen, _ = run(table, [{"a": T([7])}] * counts[ranks.rank])
    return seen


@pytest.mark.parametrize(
    "queues", [{}, *({key: 1} for key in KEYS), {"embedding_prefetch_capacity": 2, "enable_async_optimize": 1}], ids=str
)
def test_ranks_see_the_same_and_end_with_the_one_that_ends_first(queues):
    late = sum(queues.values())
    for seen in raised(in_ranks(2, on_ranks, queues, (6, 5))):
        assert seen == [2 * max(0, n - late) for n in range(5)]


def fails_on_one(ranks, queues):
    table = make(native, ranks, **queues)
    batches = [{"a": T([7])} if ranks.rank == 0 or n != 2 else {"a": T([0.5])} for n in range(5)]
    return run(table, batches)


@pytest.mark.parametrize("queues", [{}, {"enable_pipelined_fwda2a": 1}], ids=str)
def test_a_batch_that_one_rank_cannot_take_ends_all(queues):
    first, second = in_ranks(2, fails_on_one, queues)
    assert isinstance(first, PeerError)
    assert "[1] could not prepare" in str(first)
    assert isinstance(second, (TypeError, ValueError))


# --- the fused layout -------------------------------------------------------------------------------------------------


def partitioned(num_ps, gpu_emb=False, **queues):
    reset_registry()
    ctx = ParserCtx(enable_fused_layout=True)
    slices = [SliceConfig(feature_name="user", start=0, end=2)]
    layout = {"all": OutConfig(slice_configs=slices, out_type=OutType.CONCAT, shape=[[-1, 2]])}
    ctx.sharding_sparse_fids_op_params = gen_feature_configs(
        num_ps, {"user": config(2)}, layout, {"user": [2]}, {"user": ReduceSum()}, True, enable_gpu_emb=gpu_emb
    )
    with ctx:
        return create_partitioned_hash_table(num_ps, True, queue_configs=queues, enable_gpu_emb=gpu_emb)


def run_partitioned(table, during=lambda step: None, **options):
    seen = []
    batch = {"__sharding_sparse_fids__sparse_features": {"user": [[4], [7]]}}
    pipeline = table.pipeline([batch] * 6, **options)
    for step, looked in enumerate(pipeline):
        seen.append(-looked.embeddings["all"][0, 0].item())
        during(step)
        pipeline.update([(torch.ones(2, 2), looked.embeddings["all"])], step)
    last = table.lookup(dict(batch))["all"]
    assert last.tolist() == [[-6.0, -6.0]] * 2
    return seen, pipeline.staleness


def test_the_queues_of_the_fused_layout():
    assert run_partitioned(partitioned(2)) == ([0, 1, 2, 3, 4, 5], 0)
    for key in KEYS:
        assert run_partitioned(partitioned(2, **{key: 2})) == ([0, 0, 0, 1, 2, 3], 2)
    assert run_partitioned(partitioned(2), embedding_prefetch_capacity=1) == ([0, 0, 1, 2, 3, 4], 1)


def test_the_queues_of_shards_that_ranks_own():
    assert run_partitioned(partitioned(1, gpu_emb=True)) == ([0, 1, 2, 3, 4, 5], 0)
    for key in KEYS:
        late = 0 if key == "embedding_prefetch_capacity" else 1  # a lookup ahead does not count there
        found = run_partitioned(partitioned(1, gpu_emb=True, **{key: 1}))
        assert found == ([max(0, n - late) for n in range(6)], late)


def test_lookups_of_the_fused_layout_run_while_a_batch_computes():
    table = partitioned(2, embedding_prefetch_capacity=2, enable_async_optimize=1)
    changed, counted = threading.Condition(), {"lookup": 0, "apply": 0}

    def count(name):
        inner = getattr(table._parts, name)

        def call(*args, **kwargs):
            result = inner(*args, **kwargs)
            with changed:
                counted[name] += 1
                changed.notify_all()
            return result

        setattr(table._parts, name, call)

    count("lookup"), count("apply")

    def during(step):
        with changed:
            assert changed.wait_for(
                lambda: counted["lookup"] >= min(step + 3, 6) and counted["apply"] >= step, DEADLINE_S
            )

    assert run_partitioned(table, during) == ([0, 0, 0, 0, 1, 2], 3)
