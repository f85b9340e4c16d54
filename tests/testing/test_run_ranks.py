"""The helpers that our users' tests import."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from shoal.comm import InProcessTransport
from shoal.errors import ConfigError, DeadlineError
from shoal.testing import RankFailed, faults, mpi_unavailable, run_mpi, run_ranks, run_threads


def add_ranks(rank, world, *, bias=0):
    t = torch.tensor([rank + bias])
    dist.all_reduce(t)
    return t, os.environ["RANK"], os.environ.get("MINE")


def test_results_come_back_by_rank():
    results = run_ranks(3, add_ranks, bias=1, env={"MINE": "yes"}, timeout_s=100)
    assert [r[0].item() for r in results] == [6, 6, 6]
    assert [r[1:] for r in results] == [("0", "yes"), ("1", "yes"), ("2", "yes")]


def fails(rank, world):
    if rank == 1:
        raise KeyError("the reason")
    dist.barrier()


def test_the_failing_ranks_traceback_is_raised_and_the_others_are_ended():
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of 3(?s:.*)the reason") as caught:
        run_ranks(3, fails, timeout_s=100)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert time.monotonic() - began < 30


def dies(rank, world):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    return rank


def test_a_rank_that_dies_is_named_unless_that_was_expected():
    with pytest.raises(RankFailed, match="SIGKILL"):
        run_ranks(2, dies, timeout_s=100, backend=None)
    assert run_ranks(2, dies, timeout_s=100, backend=None, lost=(0,)) == [None, 1]


def hangs(rank, world):
    if rank == 1:
        stand_still()


def stand_still():
    time.sleep(100)


def test_a_rank_that_hangs_meets_the_deadline_and_shows_where_it_stood():
    with pytest.raises(DeadlineError, match=r"\[1\](?s:.*)stand_still"):
        run_ranks(2, hangs, timeout_s=15, backend=None)


def test_what_cannot_travel_is_refused_here():
    with pytest.raises(ConfigError, match="local"):
        run_ranks(1, lambda rank, world: None)
    with pytest.raises(ConfigError):
        run_ranks(0, hangs)


def test_threads_raise_or_return_their_errors():
    assert run_threads(3, lambda t: t.rank) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        run_threads(2, lambda t: 1 // t.rank)
    assert isinstance(run_threads(2, lambda t: 1 // t.rank, return_errors=True)[0], ZeroDivisionError)
    with pytest.raises(DeadlineError, match=r"\[1\]"):
        run_threads(2, lambda t: time.sleep(2 * t.rank), timeout_s=0.2)


def test_scripted_faults_act_on_their_rank_and_step():
    a, b = InProcessTransport.create_group(2)
    a = faults.wrap(
        a,
        faults.corrupt(rank=0, step=1),
        faults.truncate(rank=0, step=2),
        faults.drop(rank=0, step=3),
        faults.duplicate(rank=0, step=4),
        faults.fail(rank=0, step=5),
        faults.fail(rank=1, step=6),
        faults.delay(rank=0, step=6, seconds=0.1),
    )
    for _ in range(5):
        a.send(1, b"\0\0\0\0")
    assert [b.recv(0) for _ in range(5)] == [b"\0\0\0\0", b"\0\0\x10\0", b"\0\0", b"\0\0\0\0", b"\0\0\0\0"]
    with pytest.raises(faults.InjectedFault):
        a.send(1, b"")
    began = time.monotonic()
    a.send(1, b"")
    assert time.monotonic() - began >= 0.1
    assert a.step == 7
    with pytest.raises(ConfigError):
        faults.Fault("explode", 0, 0)


def test_a_script_runs_in_a_training_loop():
    script = faults.Script(faults.fail(rank=1, step=2, error=OSError("disk")))
    assert script.at(0, 2) is None
    assert script.at(1, 1) is None
    with pytest.raises(OSError, match="disk"):
        script.at(1, 2)


def mpi_ranks(rank, world, fail):
    if fail and rank == 1:
        raise KeyError("mpi reason")
    return rank, world, os.environ["OMPI_COMM_WORLD_RANK"]


@pytest.mark.skipif(mpi_unavailable() is not None, reason=str(mpi_unavailable()))
def test_mpirun_runs_the_same_functions():
    assert run_mpi(2, mpi_ranks, False, timeout_s=100) == [(0, 2, "0"), (1, 2, "1")]
    with pytest.raises(RankFailed, match="mpi reason"):
        run_mpi(2, mpi_ranks, True, timeout_s=100)
