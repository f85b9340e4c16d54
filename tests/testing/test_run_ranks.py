"""The helpers of `shoal.testing` that users' tests import."""

import os
import signal
import threading
import time
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist

from shoal.comm import InProcessTransport
from shoal.errors import ConfigError, DeadlineError
from shoal.testing import RankFailed, faults, mpi_unavailable, ranks, run_mpi, run_ranks, run_threads

pytestmark = pytest.mark.timeout(900)


def add_ranks(rank, world, *, bias=0):
    t = torch.tensor([rank + bias])
    dist.all_reduce(t)
    return t, os.environ["RANK"], os.environ.get("MINE")


def test_results_come_back_by_rank():
    results = run_ranks(3, add_ranks, bias=1, env={"MINE": "yes"}, timeout_s=300)
    assert [r[0].item() for r in results] == [6, 6, 6]
    assert [r[1:] for r in results] == [("0", "yes"), ("1", "yes"), ("2", "yes")]


def fails(rank, world):
    if rank == 1:
        raise KeyError("the reason")
    dist.barrier()


def test_the_failing_ranks_traceback_is_raised_and_the_others_are_ended():
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of 3(?s:.*)the reason") as caught:
        run_ranks(3, fails, timeout_s=300)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert time.monotonic() - began < 200


def dies(rank, world):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    return rank


def test_a_rank_that_dies_is_named_unless_that_was_expected():
    with pytest.raises(RankFailed, match="SIGKILL"):
        run_ranks(2, dies, timeout_s=300, backend=None)
    assert run_ranks(2, dies, timeout_s=300, backend=None, lost=(0,)) == [None, 1]


class Told(Exception):
    """Leaves a file when it is sent, which is after it was raised."""

    def __reduce__(self):
        open(self.args[1], "w").close()
        return Told, self.args


def fails_by_turns(rank, world, folder):
    """Every rank fails, the last one first."""
    end = time.monotonic() + 100
    while rank + 1 < world and not os.path.exists(f"{folder}/{rank + 1}") and time.monotonic() < end:
        time.sleep(0.01)
    raise Told(f"reason of {rank}", f"{folder}/{rank}")


def test_of_several_failures_the_first_is_raised_however_late_anybody_looks(tmp_path, monkeypatch):
    looks = []

    def late(pipes, timeout):
        if not looks:  # all have failed by now
            looks.extend(wait([pipe], 200) for pipe in pipes)
        return wait(pipes, timeout)

    monkeypatch.setattr(ranks, "wait", late)
    with pytest.raises(RankFailed, match="reason of 2") as caught:
        run_ranks(3, fails_by_turns, str(tmp_path), timeout_s=300, backend=None)
    assert caught.value.rank == 2
    assert all(looks)


def hangs(rank, world, folder):
    if rank == 1:
        stand_still(folder)


def stand_still(folder):
    open(f"{folder}/standing", "w").close()
    time.sleep(1000)


def test_a_rank_that_hangs_meets_the_deadline_and_shows_where_it_stood(tmp_path, monkeypatch):
    def when_all_stand(pipes, timeout):
        """The deadline is looked at once rank 0 has ended and rank 1 hangs, however long they took to start."""
        end = time.monotonic() + 200
        while not (tmp_path / "standing").exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert len(pipes) == 1 or wait(pipes[:1], 200)
        return wait(pipes, timeout)

    monkeypatch.setattr(ranks, "wait", when_all_stand)
    with pytest.raises(DeadlineError, match=r"\[1\](?s:.*)stand_still"):
        run_ranks(2, hangs, str(tmp_path), timeout_s=0.5, backend=None)


def test_what_cannot_travel_is_refused_here():
    with pytest.raises(ConfigError, match="local"):
        run_ranks(1, lambda rank, world: None)
    with pytest.raises(ConfigError):
        run_ranks(0, hangs, "")


def test_threads_raise_or_return_their_errors():
    assert run_threads(3, lambda t: t.rank) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        run_threads(2, lambda t: 1 // t.rank)
    assert isinstance(run_threads(2, lambda t: 1 // t.rank, return_errors=True)[0], ZeroDivisionError)
    end = threading.Event()
    try:
        with pytest.raises(DeadlineError, match=r"\[(0, )?1\] were still running"):  # 0 too if it had not run yet
            run_threads(2, lambda t: t.rank and end.wait(200), timeout_s=0.2)
    finally:
        end.set()


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
    if fail:
        time.sleep(1000)  # mpirun ends it, so it leaves no result
    return rank, world, os.environ["OMPI_COMM_WORLD_RANK"]


@pytest.mark.skipif(mpi_unavailable() is not None, reason=str(mpi_unavailable()))
def test_mpirun_runs_the_same_functions():
    assert run_mpi(2, mpi_ranks, False, timeout_s=300) == [(0, 2, "0"), (1, 2, "1")]
    with pytest.raises(RankFailed, match="mpi reason"):
        run_mpi(2, mpi_ranks, True, timeout_s=300)
