"""Hooks of a run: when they are called, what they get, how they stop and save; then the library's own, then ranks."""

import math
import os
import sys

import pytest

from shoal.errors import ConfigError
from shoal.sharded import AsyncPushHook, EnqueueHook
from shoal.sharded.monolith.prefetch_queue import StructureQueue
from shoal.table import HashFilterCheckpointSaverListener, HashTableCheckpointRestorerListener, create_hash_filter
from shoal.testing import run_ranks
from shoal.train import (
    BroadcastGlobalVariablesHook,
    ReqTimeControlDumpHook,
    SessionRunHook,
    SyncTrainingBarrierSaverListener,
    SyncTrainingForceDumpHook,
    SyncTrainingInfoHook,
    SyncTrainingSaverControlHook,
    TrainingHooksHelper,
)
from shoal.train.loop.trainer import trainer
from shoal.trainer import load_config
from tests.train.loop.helpers import SMALL, Told, folders, open_run, run, settings


class Calls(SessionRunHook):
    """Remembers what is called; ``at`` are what to do after which step."""

    def __init__(self, at=None):
        self.calls, self.at = [], at or {}

    def begin(self):
        self.calls.append("begin")

    def after_create_session(self, ctx):
        self.calls.append(("session", ctx.global_step))

    def before_run(self, ctx):
        self.calls.append(("before", ctx.global_step))

    def after_run(self, ctx, values):
        self.calls.append(("after", ctx.global_step))
        self.values, self.ctx = values, ctx
        self.at.get(ctx.global_step, lambda ctx: None)(ctx)

    def before_save(self, ctx, global_step):
        self.calls.append(("before_save", global_step))

    def after_save(self, ctx, global_step):
        self.calls.append(("after_save", global_step))

    def end(self, ctx):
        self.calls.append("end")


def test_hooks_are_called_around_steps_and_checkpoints(data, tmp_path):
    hook = Calls()
    config = settings(data, tmp_path, train_dot_max_steps=3, out_dot_every_steps=2)
    run(config, hooks=[hook])
    assert hook.calls == [
        "begin", ("session", 0), ("before", 0), ("after", 1), ("before", 1), ("after", 2), ("before_save", 2),
        ("after_save", 2), ("before", 2), ("after", 3), ("before_save", 3), ("after_save", 3), "end",
    ]  # fmt: skip
    assert hook.values["samples"] == 128
    assert math.isfinite(hook.values["loss"])
    assert list(hook.ctx.tables) == ["features"]
    assert hook.ctx.tables["features"].size() > 0
    assert [p.shape for p in hook.ctx.model.parameters()]
    again = Calls()
    run(settings(data, tmp_path, train_dot_max_steps=4), hooks=[again])
    assert again.calls[:3] == ["begin", ("session", 3), ("before", 3)]


def test_hooks_do_not_change_what_is_learnt(data, tmp_path):
    for name, hooks in (("with", [Calls()]), ("without", [])):
        run(settings(data, tmp_path / name), hooks=hooks)
    one, other = (tmp_path / name / "ckpt-00000032" / "dense.safetensors" for name in ("with", "without"))
    assert one.read_bytes() == other.read_bytes()


def test_a_hook_stops_the_run_after_its_step(data, tmp_path):
    told = run(settings(data, tmp_path), hooks=[Calls({5: lambda ctx: ctx.request_stop()}), Calls()])
    assert (told.ended["why"], told.ended["step"], told.saves) == ("stopped", 5, [5])


def test_a_hook_asks_for_checkpoints_and_switches_them_off(data, tmp_path):
    config = settings(data, tmp_path, out_dot_every_steps=2, train_dot_max_steps=9, out_dot_keep=9)
    told = Told()
    timers = {}
    at = {
        1: lambda ctx: timers["own"].reset(),
        2: lambda ctx: timers["own"].disable(),
        5: lambda ctx: timers["own"].reset(),  # also while saving is disabled
        7: lambda ctx: timers["own"].enable(),
    }
    with trainer(config, reporter=told, hooks=[Calls(at)]) as one:
        timers["own"] = one.save_timer
        one.run()
    assert told.saves == [1, 2, 5, 8, 9]


# --- by name ----------------------------------------------------------------------------------------------------------


made = []


class Named(Calls):
    def __init__(self):
        super().__init__()
        made.append(self)


class Needy(SessionRunHook):
    def __init__(self, folder):
        self.folder = folder


def needy(run):
    made.append(Needy(run.config.out.dir))
    return made[-1]


def nothing(run):
    return 7


class Alike:
    """A hook without its base class."""

    def begin(self):
        made.append(self)

    def after_create_session(self, ctx): ...

    def before_run(self, ctx): ...

    def after_run(self, ctx, values): ...

    def end(self, ctx): ...


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setitem(sys.modules, "my_hooks", sys.modules[__name__])
    made.clear()


def test_hooks_of_the_configuration_are_found_by_name(data, tmp_path, module):
    names = ["my_hooks:Named", "my_hooks:needy", "my_hooks:Alike"]
    run(settings(data, tmp_path, train_dot_hooks=names, train_dot_max_steps=1))
    assert [type(one).__name__ for one in made] == ["Named", "Needy", "Alike"]
    assert made[0].calls[0] == "begin"
    assert made[0].calls[-1] == "end"
    assert made[1].folder == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Hook", r"\[train\] hooks: name must be package.module:Hook, got 'Hook'"),
        ("no_such_module:Hook", r"\[train\] hooks: there is no module 'no_such_module'"),
        ("my_hooks:Naemd", r"module 'my_hooks' has no 'Naemd' \(did you mean 'Named'\?\)"),
        ("my_hooks:Needy", "must not need arguments .* name a function that takes the Trainer"),
        ("my_hooks:nothing", "7 is not a hook, it has no begin, after_create_session, .*SessionRunHook"),
        ("my_hooks:Told", "Told object at .* is not a hook"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_refused_before_the_first_step(data, module, name, message):
    with pytest.raises(ConfigError, match=message):
        open_run(settings(data, train_dot_hooks=[name]))[0].__enter__()


def test_a_class_in_place_of_an_object_is_refused(data):
    with pytest.raises(ConfigError, match=r"must be objects, got the class Calls; pass Calls\(\)"):
        open_run(settings(data), hooks=[Calls])[0].__enter__()


# --- the library's own ------------------------------------------------------------------------------------------------


def test_files_dump_and_stop_the_run(data, tmp_path, caplog):
    out, control = tmp_path / "run", tmp_path / "control"
    control.mkdir()
    (control / "dump_3").touch()
    (control / "stop_6").touch()
    hooks = [
        lambda run: SyncTrainingForceDumpHook(str(control), run.save_timer, step_interval=1),
        SyncTrainingInfoHook(interval_s=0),
        SyncTrainingBarrierSaverListener(),
        BroadcastGlobalVariablesHook(),
        *TrainingHooksHelper(True, 1, 0).training_chief_hooks,
        *TrainingHooksHelper(True, 1, 0).training_hooks,
    ]
    with caplog.at_level("INFO"):
        told = run(settings(data, out, out_dot_keep=9), hooks=hooks)
    assert told.ended["why"] == "stopped"
    assert told.saves[0] == 3
    assert folders(out)[-1] == "ckpt-00000006"
    assert "table features has" in caplog.text


def test_listeners_of_tables_and_hooks_of_queues_run_in_a_loop(data, tmp_path):
    queue, applied = StructureQueue(4), []
    for element in range(3):
        queue.put(element)
    hooks = [
        HashTableCheckpointRestorerListener(tmp_path / "model"),  # there is no checkpoint yet
        HashFilterCheckpointSaverListener(tmp_path / "model", [create_hash_filter(60, 3)], True),
        EnqueueHook(queue),
        AsyncPushHook(queue, lambda: applied.append(queue.dequeue(10))),
    ]
    run(settings(data, tmp_path / "run"), hooks=hooks)
    assert applied == [0, 1, 2]
    assert list(tmp_path.glob("model-*.assets"))


def test_request_times_of_the_data_stop_the_run(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("y,user,ts\n" + "".join(f"{i % 2},u{i % 9},{1_700_000_000 + i}\n" for i in range(500)))
    (tmp_path / "limit_req_time").write_text(str(1_700_000_000 + 250))
    config = load_config(None, {
        "data.train": [str(path)], "data.format": "csv", "data.label": "y", "data.sparse": ["user"], "data.time": "ts",
        "train.batch_size": 50, "data.shuffle_rows": 0, "model.hidden": [4], "train.threads": 1, "table.dim": 2,
    })  # fmt: skip
    hook = lambda run: ReqTimeControlDumpHook(str(tmp_path), run.save_timer, step_interval=1)  # noqa: E731
    ended = run(config, hooks=[hook]).ended
    assert (ended["why"], ended["samples"]) == ("stopped", 300)


def test_saving_is_off_while_the_run_is_not_online(data, tmp_path):
    control = tmp_path / "control"
    control.mkdir()
    told = Told(lambda step: (control / "ONLINE").touch() if step == 5 else None)
    config = settings(data, tmp_path / "run", out_dot_every_steps=2, train_dot_max_steps=9, out_dot_keep=9)
    hook = lambda run: SyncTrainingSaverControlHook(str(control), run.save_timer, step_interval=1)  # noqa: E731
    run(config, told, hooks=[hook])
    assert told.saves == [8, 9]


# --- ranks ------------------------------------------------------------------------------------------------------------


def stop_on_one_rank(rank, world, *, settings):
    hooks = [Calls({4: lambda ctx: ctx.request_stop()})] if rank == 1 else [Calls()]
    with trainer(load_config(None, settings), hooks=hooks) as one:
        result = one.run()
        return result["why"], result["step"], hooks[0].calls[-1]


@pytest.mark.timeout(300)
def test_a_hook_on_one_rank_stops_all(data, tmp_path):
    given = SMALL | {"data.train": [str(data / "train.tsv")], "out.dir": str(tmp_path)}
    ended = run_ranks(2, stop_on_one_rank, settings=given, timeout_s=200)
    assert ended == [("stopped", 4, "end")] * 2
    assert os.listdir(tmp_path) == ["ckpt-00000004"]
