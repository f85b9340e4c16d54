"""Modules and all-to-all tables over rows in GPU memory are those over rows in host memory."""

import torch

import shoal
from shoal.nn import HashEmbedding, HashEmbeddingBag, SparseOptimizer
from shoal.sharded import AllToAllHashTable


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


def test_an_all_to_all_table_of_one_rank_trains_alike(device):
    results = []
    for table, place in zip(tables(), ("cpu", device), strict=True):
        results.append(trained(HashEmbeddingBag(AllToAllHashTable(factory=lambda rank, t=table: t)).to(place), place))
    assert_all_close(*results)
