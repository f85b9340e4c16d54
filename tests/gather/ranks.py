"""``shoal.testing.run_ranks``, from a fork server that has imported the modules that every gather needs."""

from multiprocessing import forkserver

from shoal import testing


def run_ranks(world, fn, *, may_die=(), timeout_s=300, **kwargs):
    """``fn(rank, world, **kwargs)`` in ``world`` processes on gloo; ranks in ``may_die`` may end without a result."""
    # torch.optim imports torch._dynamo on first use, which takes seconds: do it once, not once per process.
    forkserver.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "shoal.gather"])
    forkserver.ensure_running()
    return testing.run_ranks(world, fn, lost=tuple(may_die), timeout_s=timeout_s, **kwargs)
