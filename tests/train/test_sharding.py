"""Sharding: sizes and round trips here, DTensor and FSDP2 in processes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.errors import ConfigError, ShapeError
from shoal.testing import run_ranks
from shoal.train import full_tensor, gather_shards, local_shard, shard_module, shard_sizes, shard_tensor


@pytest.mark.parametrize(
    ("n", "parts", "balanced", "dtensor"),
    [
        (10, 4, [3, 3, 2, 2], [3, 3, 3, 1]),
        (5, 4, [2, 1, 1, 1], [2, 2, 1, 0]),
        (8, 3, [3, 3, 2], [3, 3, 2]),
        (0, 2, [0, 0], [0, 0]),
    ],
)
def test_the_table_of_sizes(n, parts, balanced, dtensor):
    assert shard_sizes(n, parts) == balanced
    assert shard_sizes(n, parts, "dtensor") == dtensor


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.data())
def test_round_trip_for_any_shape_dim_and_layout(shape, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    layout = data.draw(st.sampled_from(["balanced", "dtensor"]))
    n = data.draw(st.integers(1, shape[dim] if layout == "balanced" else 9))
    dtype = data.draw(st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16]))
    t = torch.randint(0, 2, shape).to(dtype)
    shards = shard_tensor(t, n, dim, layout)
    assert len(shards) == n
    assert [s.shape[dim] for s in shards] == shard_sizes(shape[dim], n, layout)
    assert all(s.is_contiguous() for s in shards)
    assert torch.equal(gather_shards(shards, dim), t)


def test_what_cannot_be_cut_or_joined():
    t = torch.ones(3, 2)
    with pytest.raises(ConfigError):
        shard_tensor(t, 0)
    with pytest.raises(ConfigError):
        shard_tensor(t, 2, layout="striped")
    with pytest.raises(ShapeError):
        shard_tensor(torch.tensor(1.0), 2)
    assert shard_tensor(torch.tensor(1.0), 1)[0].item() == 1.0
    with pytest.raises(ShapeError):
        shard_tensor(t, 4)
    with pytest.raises(ShapeError):
        shard_tensor(t, 2, dim=2)
    for shards in (
        [],
        [torch.tensor(1.0)],
        [torch.ones(2, 2, 3), torch.ones(1, 3, 2)],
        [torch.ones(2), torch.ones(2).double()],
        [torch.ones(2), torch.ones(2, 1)],
    ):
        with pytest.raises(ShapeError):
            gather_shards(shards)
    shard = shard_tensor(t, 1)[0]
    shard.zero_()
    assert t.sum() == 6  # a copy


def dtensor_shapes(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    for n in (1, 2, 5, 8, 10):
        whole = torch.arange(n * 3.0).reshape(n, 3)
        local = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(local_shard(local), shard_tensor(whole, world, layout="dtensor")[rank])
        assert torch.equal(full_tensor(local), whole)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_dtensor_layout_is_dtensors(world):
    run_ranks(world, dtensor_shapes, timeout_s=200)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(7, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def steps(model, rank, world):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        x = torch.randn(4 * world, 5, generator=generator)
        x = x[rank::world] if world > 1 else x
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()


def fsdp_case(rank, world):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    plain = Net()
    x_world = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(5):
        x = torch.randn(4 * world, 5, generator=x_world)
        optimizer.zero_grad()
        (plain(x) ** 2).mean().backward()
        optimizer.step()
    for policy in (None, lambda name, m: isinstance(m, nn.Linear)):
        model = shard_module(Net(), mesh, policy=policy)
        steps(model, rank, world)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full_tensor(p), q, rtol=1e-5, atol=1e-6, msg=name)
            assert local_shard(p).shape[0] == shard_sizes(q.shape[0], world, "dtensor")[rank]
    assert full_tensor(torch.ones(1)) is not None


@pytest.mark.parametrize("world", [2, 3])
def test_sharded_training_equals_unsharded_training(world):
    run_ranks(world, fsdp_case, timeout_s=200)


def test_plain_tensors_are_returned_as_they_are():
    t = torch.ones(2)
    assert local_shard(t) is t
    assert full_tensor(t) is t
