"""Tables that span processes, with ids and rows of a batch on a GPU: equal to the CPU over several steps."""

import itertools

import pytest
import torch

from shoal.sharded import AllToAllHashTable, PartitionedHashTable
from shoal.sharded.monolith.distributed_ps_sync import DistributedMultiTypeHashTableMpi
from shoal.table import MultiHashTable
from tests.sharded.helpers import adagrad, multi_type, native, run_ranks
from tests.sharded.monolith.test_partitioned import PRE, settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

STEPS = 4
_suffixes = itertools.count()


def batch(step):
    torch.manual_seed(step)
    return {
        name: [torch.randint(0, 30, (int(n),)).tolist() for n in torch.randint(0, 4, (6,))]
        for name in ("user", "price", "shop")
    }


@pytest.mark.parametrize("gpu_emb", [False, True])
@pytest.mark.parametrize("is_native", [False, True])
def test_a_partitioned_table_is_the_same_with_its_layouts_on_the_gpu(is_native, gpu_emb):
    shards = 1 if gpu_emb else 2
    tables = []
    for use_gpu in (False, True):
        ctx = settings(shards, is_native, make=adagrad, enable_gpu_emb=gpu_emb, use_gpu=use_gpu)
        tables.append(PartitionedHashTable(shards, native if is_native else multi_type, is_native, parser_ctx=ctx))
    for step in range(STEPS):
        grads, results = None, []
        for table in tables:
            bundle = {}
            flat = table.flatten_layout(table.lookup({f"{PRE}sparse_features": batch(step)}, bundle))
            grads = grads or [torch.randn_like(t) for t in flat]
            pairs = [(g.to(t.device), t) for g, t in zip(grads, flat, strict=True)]
            table.apply_gradients(pairs, step, auxiliary_bundle=bundle)
            results.append(flat)
        assert all(t.is_cuda for t in results[1])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b.cpu(), atol=1e-6, rtol=1e-6)
    assert results[0][0].abs().sum() > 0


def on_gpu(shard, configs):
    return MultiHashTable.from_configs(configs, name_suffix=f"gpu{next(_suffixes)}", device="cuda")


@pytest.mark.parametrize("gpu_emb", [False, True])
def test_a_partitioned_table_may_have_its_rows_on_the_gpu(gpu_emb):
    shards = 1 if gpu_emb else 2
    tables = []
    for make in (native, on_gpu):
        ctx = settings(shards, True, make=adagrad, enable_gpu_emb=gpu_emb, use_gpu=make is on_gpu)
        tables.append(PartitionedHashTable(shards, make, True, parser_ctx=ctx))
    for step in range(STEPS):
        grads, results = None, []
        for table in tables:
            bundle = {}
            flat = table.flatten_layout(table.lookup({f"{PRE}sparse_features": batch(step)}, bundle))
            grads = grads or [torch.randn_like(t) for t in flat]
            pairs = [(g.to(t.device), t) for g, t in zip(grads, flat, strict=True)]
            table.apply_gradients(pairs, step, auxiliary_bundle=bundle)
            results.append(flat)
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b.cpu(), atol=1e-6, rtol=1e-6)
    assert results[0][0].abs().sum() > 0


def train(rank, world, device, backend=None):
    """Rows and losses of a few steps with ids on a device."""
    table = AllToAllHashTable(6, optimizer="adagrad", initializer="zeros", lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for step in range(STEPS):
        ids = torch.randint(-50, 50, (40,), generator=generator).to(device)
        rows = table.lookup(ids)
        assert rows.device == ids.device
        grads = torch.randn(40, 6, generator=generator).to(device)
        table.apply_gradients(ids, grads, step)
        seen.append(rows.cpu())
    seen.append(table.lookup(torch.arange(-50, 50, device=device)).cpu())
    return [s.tolist() for s in seen]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_an_all_to_all_table_with_ids_on_the_gpu_is_that_of_the_cpu(world):
    """Over gloo: rows go through the host."""
    for a, b in zip(run_ranks(world, train, "cpu"), run_ranks(world, train, "cuda"), strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(torch.tensor(x), torch.tensor(y), atol=1e-6, rtol=1e-6)


def test_an_all_to_all_table_on_nccl():
    (a,) = run_ranks(1, train, "cpu")
    (b,) = run_ranks(1, train, "cuda", backend="nccl")
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(torch.tensor(x), torch.tensor(y), atol=1e-6, rtol=1e-6)


def backend_sends(rank, world):
    from shoal.sharded.all_to_all.backend import ProcessGroup

    group = ProcessGroup()
    here, there = torch.arange(5), torch.arange(5.0, device="cuda")
    out = group.all_to_all(here, [5]), group.all_to_all(there, [5], [5]), group.gather_totals(7)
    return out[0].tolist(), out[0].is_cpu, out[1].tolist(), out[1].is_cuda, out[2]


@pytest.mark.parametrize("backend", ["nccl", "gloo", "cpu:gloo,cuda:nccl"])
def test_a_process_group_sends_tensors_of_either_device(backend):
    (got,) = run_ranks(1, backend_sends, backend=backend)
    assert got == (list(range(5)), True, list(range(5)), True, [7])


def mpi_steps(rank, world, device):
    table = DistributedMultiTypeHashTableMpi(
        world, lambda rank: multi_type(rank, {"a": adagrad(3), "b": adagrad(5)}), None
    )
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for step in range(STEPS):
        ids = {slot: torch.randint(0, 40, (25,), generator=generator).to(device) for slot in ("a", "b")}
        rows, bundle = table.lookup(ids, {}, table.reorder(ids))
        assert all(r.device.type == device for r in rows.values())
        grads = {slot: torch.randn(r.shape, generator=generator).to(device) for slot, r in sorted(rows.items())}
        table.apply_gradients(grads, bundle, step)
        seen += [r.cpu().tolist() for r in rows.values()]
    return seen


@pytest.mark.parametrize("world", [1, 2])
def test_synchronous_tables_take_packs_of_gpu_ids(world):
    for a, b in zip(run_ranks(world, mpi_steps, "cpu"), run_ranks(world, mpi_steps, "cuda"), strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(torch.tensor(x), torch.tensor(y), atol=1e-6, rtol=1e-6)
