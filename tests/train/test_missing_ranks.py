"""A missing or dead rank is named by the others, in everything that uses a process group. In processes."""

import re
from datetime import timedelta

import pytest
import torch
from torch import nn

from shoal.comm import DistributedConfig, ProcessGroupTransport, hvd_lib
from shoal.comm.ranks import control
from shoal.comm.ranks.torch_ranks import default_ranks
from shoal.errors import ConfigError, DeadlineError, PeerError, TransportError
from shoal.sharded.monolith.feature_utils import average
from shoal.testing import faults, run_ranks
from shoal.train import (
    AllReduceAggregator,
    HierarchicalAggregator,
    OverlappedReducer,
    PipelineParallelConfig,
    PipelineRunner,
    make_hook,
)

MISSING = 1


def aggregator(rank, world):
    transport = ProcessGroupTransport(default_timeout_s=60)
    return AllReduceAggregator(DistributedConfig(rank=rank, world_size=world), transport).aggregate([torch.ones(8)])


def ordered(rank, world):
    transport = ProcessGroupTransport(default_timeout_s=60)
    config = DistributedConfig(rank=rank, world_size=world)
    return AllReduceAggregator(config, transport, algorithm="ordered", check="never").aggregate([torch.ones(8)])


def hierarchical(rank, world):
    alone = [torch.distributed.new_group([r]) for r in range(world)][rank]
    return HierarchicalAggregator(alone, torch.distributed.group.WORLD).aggregate([torch.ones(8)])


def reducer(rank, world):
    layer = nn.Linear(3, 1)
    reducer = OverlappedReducer(layer)
    layer(torch.ones(2, 3)).sum().backward()
    reducer.finish()


def ddp_hook(rank, world):
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    model.register_comm_hook(*make_hook("topk", ratio=0.5))
    loss = model(torch.ones(2, 3)).sum()
    backend = default_ranks().key._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=1))  # DDP waits for a hook as long as the group does
    loss.backward()


def pipeline(rank, world):
    config = PipelineParallelConfig(num_stages=world, num_micro_batches=world)
    layers = [nn.Linear(2, 2) for _ in range(world)]
    runner = PipelineRunner(layers, config, loss_fn=nn.functional.mse_loss, group=torch.distributed.group.WORLD)
    runner.step(torch.ones(6, 2) if rank == 0 else None, torch.ones(6, 2) if rank == world - 1 else None)


def hvd_all_reduce(rank, world):
    hvd_lib.allreduce(torch.ones(4))


def hvd_all_gather(rank, world):
    hvd_lib.allgather(torch.ones(4))


def hvd_broadcast(rank, world):
    hvd_lib.broadcast(torch.ones(4), MISSING)


def hvd_all_to_all(rank, world):
    hvd_lib.alltoall(torch.ones(world), [1] * world)


def flags(rank, world):
    control.gather_ints([rank])


def dense_gradients(rank, world):
    average([torch.ones(4)])


USERS = [aggregator, ordered, hierarchical, reducer, ddp_hook, pipeline,
         hvd_all_reduce, hvd_all_gather, hvd_broadcast, hvd_all_to_all, flags, dense_gradients]  # fmt: skip
TRANSPORT = [aggregator, ordered, hierarchical, reducer, pipeline]


def one_does_not_come(rank, world, users):
    """Each user on a group of its own, since a failed group stays failed; rank 1 fails before its first call."""
    store = torch.distributed.distributed_c10d._get_default_store()
    raised = {}
    for user in users:
        torch.distributed.destroy_process_group()
        part = torch.distributed.PrefixStore(user.__name__, store)
        torch.distributed.init_process_group("gloo", store=part, rank=rank, world_size=world)
        ranks = default_ranks()
        ranks.barrier()
        ranks.timeout_s = 0.5
        faults.inject(ranks, faults.fail(rank=MISSING, step=0))
        try:
            user(rank, world)
        except Exception as error:
            raised[user.__name__] = (type(error), str(error), getattr(error, "peer", None))
        store.set(f"{user.__name__}/{rank}/over", "1")
        store.wait([f"{user.__name__}/{r}/over" for r in range(world)])
    return raised


def test_a_rank_that_does_not_come_is_named_by_the_other():
    first, second = run_ranks(2, one_does_not_come, USERS, timeout_s=300, group_timeout_s=120)
    for user in USERS:
        kind, text, peer = first[user.__name__]
        assert re.search(r"rank\(s\) \[1\]", text), (user.__name__, text)
        if user in TRANSPORT:
            assert (kind, peer) == (TransportError, MISSING), (user.__name__, kind)
        elif user is not ddp_hook:  # DDP wraps a hook's exception
            assert issubclass(kind, (DeadlineError, PeerError)), (user.__name__, kind)
        assert "scripted: rank 1 fails at step 0" in second[user.__name__][1], (user.__name__, second[user.__name__])


def dies_and_is_named(rank, world):
    ranks = default_ranks()
    ranks.barrier()
    faults.inject(ranks, faults.die(rank=MISSING, step=1))
    hvd_lib.allreduce(torch.ones(4))
    with pytest.raises((DeadlineError, PeerError)) as caught:
        hvd_lib.allreduce(torch.ones(4))
    return caught.value.ranks


def test_a_rank_that_dies_is_named_by_all_others():
    found = run_ranks(3, dies_and_is_named, timeout_s=300, group_timeout_s=60, lost=(MISSING,))
    assert found[0] == found[2] == (MISSING,)


def test_faults_of_messages_are_refused():
    with pytest.raises(ConfigError, match="must be fail, die, hang or delay, got 'drop'"):
        faults.inject(default_ranks(), faults.drop(rank=0, step=0))
