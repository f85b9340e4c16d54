"""Metrics of the exchanges between ranks: one rank in this process, then real ranks on gloo."""

import pytest
import torch

from shoal.comm import FLAGS, reset_for_testing
from shoal.comm.horovod import hvd_lib
from shoal.nn import ReduceSum
from shoal.sharded import (
    AllToAllHashTable,
    DistributedMultiTypeHashTableMpi,
    OutConfig,
    OutType,
    ParserCtx,
    PartitionedHashTable,
    SliceConfig,
    TensorShape,
    gen_feature_configs,
    set_alltoall_writer,
)
from tests.sharded.helpers import config, native, run_ranks
from tests.sharded.monolith.test_partitioned import PRE

pytestmark = pytest.mark.timeout(600)

T = torch.tensor


class Writer:
    """Keeps what TensorBoard's writer would be given: name -> value, and the steps of all points."""

    def __init__(self):
        self.values, self.steps = {}, []

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.values[tag] = scalar_value
        self.steps.append(global_step)

    def add_histogram(self, tag, values, global_step=None):
        self.add_scalar(tag, values.tolist(), global_step)

    def take(self):
        taken = self.values, sorted(set(self.steps))
        self.values, self.steps = {}, []
        return taken


def measured(slot=None):
    writer = Writer()
    set_alltoall_writer(writer)
    FLAGS.enable_alltoall_metrics, FLAGS.enable_alltoall_metrics_for_slot = True, slot
    return writer


@pytest.fixture(autouse=True)
def _nothing_is_measured_afterwards():
    yield
    set_alltoall_writer(None)
    reset_for_testing()


def test_a_lookup_counts_distinct_ids_and_is_stamped_with_its_step():
    writer = measured("b")
    table = DistributedMultiTypeHashTableMpi(1, lambda r: native(r, {"a": config(1), "b": config(2)}))
    ids = {"a": T([1, 1, 2]), "b": T([5, 6, 7])}
    expected = {
        "b_size": 3, "all_fids_size": 5, "shard_sizes": [5], "sharded_slot_sizes": [2, 3],
        "fused_embedding_splits": [8],
    }  # fmt: skip
    _, bundle = table.lookup(ids, {}, table.reorder(ids))
    assert writer.take() == (expected, [0])
    table.apply_gradients({"a": torch.ones(3, 1), "b": torch.ones(3, 2)}, bundle, global_step=41)
    table.lookup(ids, {}, table.reorder(ids))
    assert writer.take() == (expected, [42])
    table.lookup(ids, {"global_step": 7}, table.reorder(ids))
    assert writer.take() == (expected, [7])


# --- ranks ------------------------------------------------------------------------------------------------------------

# Rank 0 asks rank 0 for 2 and 4, rank 1 for 3; rank 1 asks rank 0 for 2, rank 1 for 1, 3 and 5. Rows have two floats.
IDS = [[2, 4, 3, 2], [3, 2, 1, 5, 1]]
ASKED = [[2, 1], [1, 3]]


def synchronous(rank, world):
    writer = measured("a")
    table = DistributedMultiTypeHashTableMpi(world, lambda r: native(r, {"a": config(2)}))
    ids = {"a": T(IDS[rank])}
    _, bundle = table.lookup(ids, {"global_step": 3}, table.reorder(ids))
    table.apply_gradients({"a": torch.ones(len(IDS[rank]), 2)}, bundle, 3)
    return writer.take()


def all_to_all(rank, world):
    writer = measured("t")
    table = AllToAllHashTable(2, optimizer="sgd", name="t")
    table.apply_gradients(T(IDS[rank]), torch.ones(len(IDS[rank]), 2), 3)
    return writer.take()


def gpu_embedding(rank, world):
    ctx = ParserCtx(enable_fused_layout=True)
    out = OutConfig([SliceConfig("item", 0, 2)], OutType.CONCAT, [TensorShape([-1, 2])])
    ctx.sharding_sparse_fids_op_params = gen_feature_configs(
        world, {"item": config(2)}, {"out": out}, {"item": [2]}, {"item": ReduceSum()}, True, enable_gpu_emb=True
    )
    table = PartitionedHashTable(world, native, True, parser_ctx=ctx)
    writer = measured("item")
    for step in (2, 3):
        writer.take()
        bundle = {}
        layout = table.lookup({f"{PRE}sparse_features": {"item": [[i] for i in IDS[rank]]}}, bundle)["out"]
        table.apply_gradients([(torch.ones_like(layout), layout)], step, auxiliary_bundle=bundle)
    return writer.take()


@pytest.mark.parametrize(
    ("train", "slot"), [(synchronous, "a"), (all_to_all, "t"), (gpu_embedding, "item")], ids=lambda x: str(x)[:20]
)
def test_the_spread_over_ranks_is_written_by_every_synchronous_table(train, slot):
    points = run_ranks(2, train)
    for rank, (values, steps) in enumerate(points):
        assert steps == [3]
        served = [2 * ASKED[r][rank] for r in range(2)]
        assert values.pop(f"{slot}_size") == values.pop("all_fids_size") == sum(ASKED[rank])
        assert values.pop("shard_sizes") == values.pop("sharded_slot_sizes") == ASKED[rank]
        assert values.pop("fused_embedding_splits") == served
        assert values.pop("Alltoall_id_dist") == [ASKED[0][1], ASKED[1][1]]
        assert values.pop("Alltoall_emb_dist") == [2 * ASKED[0][1], 2 * ASKED[1][1]]
    spread = {"splits": [1], "sizes": 1, "min_idx": 0, "max_idx": 0, "min_size": 1, "max_size": 1}
    assert points[1][0] == {}
    assert points[0][0] == {
        **{f"Alltoall_id_{name}": value for name, value in spread.items()},
        **{f"Alltoall_emb_{n}": [2] if n == "splits" else v if n.endswith("idx") else 2 for n, v in spread.items()},
        "Alltoall_grad_splits": [2 * ASKED[1][0]],
        "Alltoall_grad_sizes": 2 * ASKED[1][0],
    }


def timed(rank, world):
    import os

    os.environ["BYTEPS_TELEMETRY_ON"] = "1"
    table = AllToAllHashTable(2, optimizer="sgd")
    table.apply_gradients(T(IDS[rank]), torch.ones(len(IDS[rank]), 2), 3)
    table.lookup(T([1]))
    table.assign(T([1]), torch.ones(1, 2))
    return {name: count for name, _, _, count in hvd_lib.get_telemetry()}


def test_telemetry_sees_the_exchanges_of_tables():
    for counts in run_ranks(2, timed):
        assert counts == {
            "alltoall.id_sizes": 3, "alltoall.ids": 3, "alltoall.gradients": 1, "alltoall.embeddings": 1,
            "alltoall.values": 1,
        }  # fmt: skip
