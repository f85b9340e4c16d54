"""Hooks that coordinate workers and ranks: one process first, then ranks."""

import copy
import os
import subprocess
import sys
import threading
import time
import types
from datetime import datetime

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shoal.comm import RunContext
from shoal.errors import DeadlineError
from shoal.table.export_mode import ExportMode, enter_export_mode
from shoal.testing import run_ranks
from shoal.train import (
    ChiefSyncHook,
    EofAwareTask,
    ReqTimeControlDumpHook,
    SyncHelper,
    SyncTrainingBarrierSaverListener,
    SyncTrainingForceDumpHook,
    SyncTrainingInfoHook,
    SyncTrainingSaverControlHook,
    TrainingHooksHelper,
    WorkerSyncHook,
)
from shoal.train.hooks import sync_hooks, sync_training_hooks


def test_helper_keeps_the_booleans_in_the_store():
    store = dist.HashStore()
    helper = SyncHelper(4, True, store)
    other = SyncHelper(4, False, store)
    assert not other.get_restore_status()
    helper.mark_restore_done()
    assert other.get_restore_status()
    assert store.get("monolith_sync_helper/0") == b"1"
    other.start_worker(1)
    other.start_worker(3)
    assert helper.get_alive_workers() == [1, 3]
    assert helper.get_num_alive_workers() == 2
    other.finish_worker(1)
    assert helper.get_alive_workers() == [3]
    for bad in (0, 4, -1):
        with pytest.raises(AssertionError):
            helper.start_worker(bad)
        with pytest.raises(AssertionError):
            helper.finish_worker(bad)


def test_workers_wait_for_the_restore_and_the_chief_for_the_workers(monkeypatch):
    monkeypatch.setattr(sync_hooks, "POLL_S", 0.02)
    store = dist.HashStore()
    chief = ChiefSyncHook(SyncHelper(3, True, store), timeout_seconds=60)
    events = []

    def worker(i):
        hook = WorkerSyncHook(i, SyncHelper(3, False, store))
        hook.after_create_session(None)
        events.append(("restored", i))
        time.sleep(0.2)
        events.append(("done", i))
        hook.end(None)

    threads = [threading.Thread(target=worker, args=(i,)) for i in (1, 2)]
    [t.start() for t in threads]
    end = time.monotonic() + 60
    while chief.helper.get_num_alive_workers() < 2 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)
    assert events == []
    chief.after_create_session(None)
    chief.end(None)
    assert sorted(events[-2:]) == [("done", 1), ("done", 2)]
    [t.join() for t in threads]


def test_nobody_waits_for_ever(monkeypatch):
    monkeypatch.setattr(sync_hooks, "POLL_S", 0.02)
    store = dist.HashStore()
    helper = SyncHelper(2, True, store)
    helper.start_worker(1)
    began = time.monotonic()
    ChiefSyncHook(helper, timeout_seconds=0.1).end(None)
    with pytest.raises(DeadlineError):
        WorkerSyncHook(1, helper, timeout_seconds=0.1).after_create_session(None)
    WorkerSyncHook(0, helper).after_create_session(None)
    WorkerSyncHook(0, helper).end(None)
    assert time.monotonic() - began < 30


def test_hooks_of_a_worker():
    off = TrainingHooksHelper(False, 3, 1)
    assert (off.training_chief_hooks, off.training_hooks) == ((), ())
    chief, worker = TrainingHooksHelper(True, 3, 0, chief_timeout_seconds=5), TrainingHooksHelper(True, 3, 1)
    assert chief.training_chief_hooks[0].timeout_seconds == 5
    assert worker.training_hooks[0].index == 1
    chief.training_chief_hooks[0].after_create_session(None)
    worker.training_hooks[0].after_create_session(None)  # they share this process's store
    assert chief.training_chief_hooks[0].helper.get_alive_workers() == [1]


def test_helpers_of_one_process_share_whatever_their_order(monkeypatch):
    monkeypatch.setattr(sync_hooks, "_local_store", None)
    monkeypatch.setattr(sync_hooks, "_has_chief", False)
    early, chief, late = SyncHelper(3, False), SyncHelper(3, True), SyncHelper(3, False)
    early.start_worker(1)
    late.start_worker(2)
    chief.mark_restore_done()
    assert chief.get_alive_workers() == [1, 2]
    assert early.get_restore_status()
    assert not SyncHelper(3, True).get_restore_status()  # of the next job


def test_the_parameter_sync_hook_comes_from_here_too():
    from shoal import serving, train

    assert train.ParameterSyncHook is serving.ParameterSyncHook
    with pytest.raises(AttributeError, match="Nothing"):
        train.Nothing  # noqa: B018


class Timer:
    def __init__(self):
        self.log = []

    def __getattr__(self, name):
        return lambda: self.log.append(name)


def at_hour(monkeypatch, hour):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2026, 1, 1, hour, tzinfo=tz)

    monkeypatch.setattr(sync_training_hooks, "datetime", Clock)


@pytest.mark.parametrize(("hour", "switch"), [(17, "disable"), (18, "enable"), (20, "enable"), (21, "disable")])
@pytest.mark.parametrize("file", [None, "dump_10", "stop_10", "dump_3"])
def test_force_dump_by_hour_and_by_file(tmp_path, monkeypatch, hour, switch, file):
    at_hour(monkeypatch, hour)
    if file:
        (tmp_path / file).touch()
    timer, ctx = Timer(), RunContext()
    hook = SyncTrainingForceDumpHook(str(tmp_path), timer, step_interval=10)
    for step in range(1, 16):
        ctx.global_step = step
        hook.after_run(ctx, None)
    forced = ["enable", "reset"] if file else []
    assert timer.log == [switch, *forced]
    assert ctx.stop_requested is (file == "stop_10")


def test_saver_control_follows_the_online_file(tmp_path):
    timer, ctx = Timer(), RunContext()
    hook = SyncTrainingSaverControlHook(str(tmp_path), timer, step_interval=5)
    for step in range(1, 11):
        ctx.global_step = step
        if step == 7:
            (tmp_path / "ONLINE").touch()
        hook.after_run(ctx, None)
    assert timer.log == ["disable", "enable"]


def test_info_is_logged_at_most_every_interval(caplog):
    import logging

    hook = SyncTrainingInfoHook({"items": [1, 2, 3]})
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            hook.after_run(RunContext(), None)
    assert [r.getMessage() for r in caplog.records] == ["table items has 3 rows"]


def test_request_time_ends_training(tmp_path):
    timer, ctx = Timer(), RunContext()
    hook = ReqTimeControlDumpHook(str(tmp_path), timer, step_interval=2)
    for step, req_time in ((2, np.array([80, 90])), (3, []), (4, torch.tensor([99, 5])), (6, 100)):
        (tmp_path / "limit_req_time").write_text("100\n")
        ctx.global_step = step
        hook.after_run(ctx, {"req_time": req_time})
        assert ctx.stop_requested is (step == 6)
    assert timer.log == ["enable", "reset"]
    (tmp_path / "limit_req_time").write_text("soon")
    ctx.global_step = 8
    hook.after_run(ctx, None)


class Task:
    name = "t"

    def __init__(self, batches):
        self.batches = batches

    def create_input_fn(self, mode):
        return lambda: iter(self.batches)

    def create_model_fn(self):
        return lambda features, mode, config: (features, mode, config)


def test_one_rank_keeps_its_input_and_the_task_its_attributes():
    task = EofAwareTask(Task([1, 2, 3]))
    assert list(task.create_input_fn("train")()) == [1, 2, 3]
    assert task.name == "t"
    assert task.create_model_fn()(1, 2, 3) == (1, 2, 3)
    assert copy.copy(task).name == "t"
    with pytest.raises(AttributeError):
        task.nothing  # noqa: B018


def ranks_case(rank, world, folder):
    sync_training_hooks.BROADCAST_LIMIT_S = 150.0
    results = {}
    for name, counts in (("uneven", [5, 3, 4]), ("even", [2, 2, 2]), ("empty", [1, 0, 2]), ("ones", [1, 1, 1])):
        task = EofAwareTask(Task(list(range(counts[rank]))))
        results[name] = list(task.create_input_fn("train")())
    results["export"] = list(EofAwareTask(Task(list(range(rank + 1)))).create_input_fn("export")())
    with enter_export_mode(ExportMode.STANDALONE):
        results["exporting"] = list(EofAwareTask(Task(list(range(rank + 1)))).create_input_fn("predict")())
    timer, ctx = Timer(), RunContext(global_step=100)
    SyncTrainingForceDumpHook(folder if rank == 0 else "/nowhere", timer).after_run(ctx, None)
    results["stop"] = (ctx.stop_requested, timer.log[1:])
    ctx = RunContext(global_step=1000)
    ReqTimeControlDumpHook(folder if rank == 0 else "/nowhere", Timer()).after_run(
        ctx, {"req_time": 55 if rank == world - 1 else 1}
    )
    results["time"] = ctx.stop_requested
    SyncTrainingSaverControlHook(folder if rank == 0 else "/nowhere", timer).after_run(
        RunContext(global_step=100), None
    )
    results["online"] = timer.log[-1]
    if rank == 0:
        time.sleep(0.3)
        open(f"{folder}/checkpoint", "w").close()
    SyncTrainingBarrierSaverListener().after_save(None, 7)
    assert os.path.exists(f"{folder}/checkpoint")
    helper = SyncHelper(world, rank == 0)
    if rank:
        helper.start_worker(rank)
    end = time.monotonic() + 60
    while helper.get_num_alive_workers() < world - 1 and time.monotonic() < end:
        time.sleep(0.05)
    results["alive"] = helper.get_alive_workers()
    dist.barrier()
    return results


def test_all_ranks_stop_in_the_same_step(tmp_path):
    (tmp_path / "stop_100").touch()
    (tmp_path / "ONLINE").touch()
    (tmp_path / "limit_req_time").write_text("50")
    for rank, got in enumerate(run_ranks(3, ranks_case, str(tmp_path), timeout_s=200)):
        assert got == {
            "uneven": [0, 1, 2],
            "even": [0, 1],
            "empty": [],
            "ones": [0],
            "export": list(range(rank + 1)),
            "exporting": list(range(rank + 1)),
            "stop": (True, ["enable", "reset"]),
            "time": True,
            "online": "enable",
            "alive": [1, 2],
        }


def test_the_barrier_listener_only_logs_errors(monkeypatch, caplog):
    monkeypatch.setattr(sync_training_hooks.control, "broadcast_ints", lambda v: 1 / 0)
    SyncTrainingBarrierSaverListener().after_save(None, 3)
    assert "step 3" in caplog.text


def test_an_uncaught_exception_ends_the_job_under_mpirun():
    code = "from shoal.train import add_mpi_exception_hook as a; a(); raise KeyError('lost')"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMPI_COMM_WORLD_RANK": "4"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1
    assert "rank 4" in done.stderr
    assert "KeyError" in done.stderr


def test_plain_namespaces_work_as_contexts():
    hook = SyncTrainingForceDumpHook("/nowhere", Timer(), step_interval=1)
    hook.after_run(types.SimpleNamespace(global_step=1, request_stop=lambda: None), None)
