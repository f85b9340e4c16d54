"""The same tests on CUDA tensors; those that need two GPUs are skipped if there is one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.comm import DistributedConfig, ProcessGroupTransport, deserialize_tensors, serialize_tensors
from shoal.testing import run_ranks, run_threads
from shoal.train import (
    AllReduceAggregator,
    CompressedAggregator,
    ParameterServer,
    PipelineParallelConfig,
    PipelineRunner,
    TopKCompressor,
    compress_gradients,
    decompress_gradients,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU per rank, and there are not two")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_top_k_on_the_gpu_equals_the_cpu(dtype):
    for n, ratio in ((1, 1.0), (1000, 0.1), (100_003, 0.01)):
        x = (torch.randint(-50, 50, (n,)) / 7).to(dtype)
        for order in ("magnitude", "index"):
            (a,) = compress_gradients([x], ratio, order=order)
            (b,) = compress_gradients([x.cuda()], ratio, order=order)
            assert torch.equal(a.indices, b.indices.cpu())
            assert torch.equal(a.values, b.values.cpu())
            assert b.values.is_cuda
        (back,) = decompress_gradients([b], [(n,)])
        assert back.is_cuda


@pytest.mark.parametrize("kind", ["ring", "ordered", "server", "compressed"])
def test_aggregates_of_gpu_gradients_stay_on_the_gpu(kind):
    def work(t):
        config = DistributedConfig(t.world_size, t.rank)
        agg = {
            "server": lambda: ParameterServer(config, t),
            "compressed": lambda: CompressedAggregator(config, t, TopKCompressor(1.0, error_feedback=True)),
        }.get(kind, lambda: AllReduceAggregator(config, t, algorithm=kind))()
        grads = [torch.full((7, 3), float(t.rank), device="cuda"), torch.ones(5, device="cuda").half()]
        got = agg.aggregate(grads)
        assert all(g.is_cuda and g.dtype == x.dtype for g, x in zip(got, grads, strict=True))
        return got[0][0, 0].item(), got[1][0].item()

    assert run_threads(3, work) == [(1.0, 1.0)] * 3


def test_the_local_pipeline_moves_between_devices():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)]
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    nn.MSELoss()(nn.Sequential(*layers)(x), y).backward()
    want = [p.grad.clone() for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    runner = PipelineRunner(layers, PipelineParallelConfig(2, 4), loss_fn=nn.MSELoss(), devices=["cuda:0", "cpu"])
    runner.step(x, y)
    for p, g in zip([p for layer in layers for p in layer.parameters()], want, strict=True):
        torch.testing.assert_close(p.grad.cpu(), g, rtol=1e-4, atol=1e-6)


def test_gpu_tensors_serialise_to_the_cpu():
    (back,) = deserialize_tensors(serialize_tensors([torch.arange(5, device="cuda")]))
    assert back.tolist() == [0, 1, 2, 3, 4]
    assert back.device.type == "cpu"


def nccl(rank, world):
    torch.cuda.set_device(rank)
    t = ProcessGroupTransport(default_timeout_s=60)
    config = DistributedConfig(world, rank)
    t.send(1 - rank, bytes([rank]) * 1000)
    assert t.recv(1 - rank) == bytes([1 - rank]) * 1000
    t.barrier()
    for algorithm in ("native", "ordered"):
        got = AllReduceAggregator(config, t, algorithm=algorithm).aggregate([torch.full((9,), float(rank)).cuda()])
        assert got[0].tolist() == [0.5] * 9
    dist.barrier()


@two_gpus
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_two_ranks_on_nccl(backend):
    run_ranks(2, nccl, timeout_s=100, backend=backend)
