"""Modules and all-to-all tables over rows in GPU memory behave like those over rows in host memory."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shoal
from shoal.nn import HashEmbedding, HashEmbeddingBag, SparseOptimizer
from shoal.sharded import (
    AllToAllHashTable,
    DistributedMultiTypeHashTableMpi,
    create_in_worker_multi_type_hash_table,
    create_in_worker_native_multi_hash_table,
    create_multi_type_hash_table,
    create_native_multi_hash_table,
    create_partitioned_hash_table,
)
from shoal.table import reset_registry
from tests.sharded.helpers import adagrad
from tests.sharded.monolith.test_partitioned import BATCH, PRE, settings


def tables(**more):
    kinds = {"optimizer": shoal.Adagrad(lr=0.5), "seed": 3, **more}
    return shoal.HashTable(4, name="cpu", **kinds), shoal.HashTable(4, name="gpu", device="cuda", **kinds)


def batches(steps, device):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        lengths = torch.randint(0, 4, (6,), generator=generator)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        ids = torch.randint(-20, 20, (int(offsets[-1]),), generator=generator)
        yield ids.to(device), offsets.to(device), torch.randn(6, 4, generator=generator).to(device)


def trained(module, device, step=lambda: None):
    seen = []
    for ids, offsets, grad in batches(3, device):
        out = module(ids, offsets)
        out.backward(grad.to(out.device))
        step()
        seen.append(out.detach().cpu())
    return seen


def assert_all_close(want, got):
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)


def test_a_bag_trains_alike(device):
    cpu, gpu = tables()
    assert_all_close(
        trained(HashEmbeddingBag(cpu), "cpu"), trained(HashEmbeddingBag(gpu, combiner="sum").to(device), device)
    )
    assert len(gpu) == len(cpu)


def test_an_optimizer_that_the_user_steps_trains_alike(device):
    results = []
    for table, place in zip(tables(), ("cpu", device), strict=True):
        bag = HashEmbeddingBag(table, combiner="mean").to(place)
        optimizer = SparseOptimizer(bag)

        def step(optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        results.append(trained(bag, place, step))
    assert_all_close(*results)


def test_rows_of_an_embedding_and_their_state_dict_move_between_devices(device):
    cpu, gpu = tables()
    ids = torch.tensor([5, -7, 5, 1 << 40])
    one, two = HashEmbedding(cpu), HashEmbedding(gpu).to(device)
    for module, place in ((one, "cpu"), (two, device)):
        module(ids.to(place)).sum().backward()
    two.load_state_dict(one.state_dict())
    torch.testing.assert_close(gpu.lookup(ids.to(device)).cpu(), cpu.lookup(ids))
    two(ids.to(device)).sum().backward()
    one.load_state_dict(two.state_dict())
    torch.testing.assert_close(cpu.lookup(ids), gpu.lookup(ids.to(device)).cpu())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_torch_are_read_on_either_device(device, tmp_path):
    cpu, gpu = tables()
    ids = torch.tensor([5, -7, 5, 1 << 40, 0, -(1 << 63)])
    one, two = HashEmbedding(cpu), HashEmbedding(gpu).to(device)
    for number, (ours, theirs, place, there) in enumerate([(two, one, device, "cpu"), (one, two, "cpu", device)]):
        ours(ids.to(place)).sum().backward()
        state = ours.state_dict()
        dcp.save(state, checkpoint_id=tmp_path / str(number))
        ours(ids[:2].to(place)).sum().backward()  # not in the checkpoint
        assert state["table.rows"].table_state.copied
        landed = theirs.state_dict()
        dcp.load(landed, checkpoint_id=tmp_path / str(number))
        theirs.load_state_dict(landed)
        ours.load_state_dict(state)
        for _ in range(2):
            torch.testing.assert_close(cpu.lookup(ids), gpu.lookup(ids.to(device)).cpu())
            ours(ids.to(place)).sum().backward()
            theirs(ids.to(there)).sum().backward()


def test_an_all_to_all_table_of_one_rank_trains_alike(device):
    results = []
    for table, place in zip(tables(), ("cpu", device), strict=True):
        results.append(trained(HashEmbeddingBag(AllToAllHashTable(factory=lambda rank, t=table: t)).to(place), place))
    assert_all_close(*results)


SLOTS = {"a": (4, 0.1), "b": (4, 0.1), "c": (3, 0.5)}


def through_factories(make, device, place, **more):
    reset_registry()
    table = make(slot_to_config={name: adagrad(*kind) for name, kind in SLOTS.items()}, device=device, **more)
    ids = {"a": [1, 2, 1], "b": [7], "c": [-3, 4]}
    ids = {slot: torch.tensor(given, device=place) for slot, given in ids.items()}
    ones = {slot: (given, torch.ones(given.numel(), SLOTS[slot][0], device=place)) for slot, given in ids.items()}
    table.assign(ones)
    table.assign_add(ones)
    for step in range(2):
        table.apply_gradients(ones, step)
    rows = table.lookup({**ids, "c": torch.tensor([4, 99, -3], device=place)})
    assert all(found.device == place for found in rows.values())
    reset_registry()
    return {slot: found.cpu() for slot, found in rows.items()}


@pytest.mark.parametrize("num_ps", [0, 2])
@pytest.mark.parametrize("kind", ["merged", "packets", "native"])
def test_tables_of_the_factories_may_have_their_rows_on_the_gpu(device, kind, num_ps):
    make = create_native_multi_hash_table if kind == "native" else create_multi_type_hash_table
    more = {"num_ps": num_ps, "hash_filters": None, **({"reduce_network_packets": True} if kind == "packets" else {})}
    on_cpu = through_factories(make, "cpu", torch.device("cpu"), **more)
    on_gpu = through_factories(make, "cuda", device, **more)
    for slot, rows in on_cpu.items():
        torch.testing.assert_close(on_gpu[slot], rows, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("make", [create_in_worker_multi_type_hash_table, create_in_worker_native_multi_hash_table])
def test_synchronous_tables_of_the_factories_may_have_their_rows_on_the_gpu(device, make):
    results = []
    for where, place in (("cpu", torch.device("cpu")), ("cuda", device)):
        reset_registry()
        outer = make(1, {"a": adagrad(3), "b": adagrad(2)}, None, device=where)
        table = outer if isinstance(outer, DistributedMultiTypeHashTableMpi) else outer.table
        slots = sorted(table.table.tables)
        ids = {slot: torch.tensor([4, 5, 4], device=place) for slot in slots}
        for step in range(2):
            rows, bundle = table.lookup(ids, {}, table.reorder(ids))
            table.apply_gradients({slot: torch.ones_like(found) for slot, found in rows.items()}, bundle, step)
        results.append([found.cpu() for found in table.lookup(ids, {}, table.reorder(ids))[0].values()])
        assert table.table.device == place
    reset_registry()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("gpu_emb", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_a_partitioned_table_of_the_factory_may_have_its_rows_on_the_gpu(device, native, gpu_emb):
    results = []
    num_ps = 1 if gpu_emb else 2
    for where in ("cpu", "cuda"):
        reset_registry()
        on_gpu = where == "cuda" and device.type == "cuda"
        with settings(num_ps, native, make=adagrad, enable_gpu_emb=gpu_emb, use_gpu=on_gpu):
            table = create_partitioned_hash_table(num_ps, native, enable_gpu_emb=gpu_emb, device=where)
        for step in range(3):
            bundle = {}
            flat = table.flatten_layout(table.lookup({f"{PRE}sparse_features": BATCH}, bundle))
            grads = [(torch.full_like(t, 0.5 + i), t) for i, t in enumerate(flat)]
            table.apply_gradients(grads, step, auxiliary_bundle=bundle)
        assert all(part.device == (device if where == "cuda" else torch.device("cpu")) for part in table.tables)
        results.append([t.cpu() for t in flat])
    reset_registry()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
