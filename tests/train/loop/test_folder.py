"""One run per folder: a run waits for one that is ending, and is refused beside another; then with servers."""

import shutil
import threading
from contextlib import ExitStack

import pytest

from shoal.errors import ConfigError
from shoal.train.loop.guard.rollback import running
from shoal.train.loop.reading import Reading
from shoal.train.loop.rows.rows import Rows
from shoal.train.loop.saving import Saver
from tests.train.loop.helpers import folders, open_run, run, settings


@pytest.fixture
def does_not_wait(monkeypatch):
    monkeypatch.setattr("shoal.train.loop.saving._ENDING_S", 0.0)


def test_a_run_resumes_from_the_last_checkpoint_of_one_that_was_still_ending(data, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.train.loop.saving._ENDING_S", 200.0)
    run(settings(data, tmp_path / "other", train_dot_max_steps=4))
    out = tmp_path / "out"
    out.mkdir()
    with ExitStack() as lock:
        lock.enter_context(running(str(out)))

        def end():
            shutil.copytree(tmp_path / "other" / "ckpt-00000004", out / "ckpt-00000004")
            lock.close()

        ending = threading.Timer(0.5, end)
        ending.start()
        try:
            with open_run(settings(data, out, train_dot_max_steps=6))[0] as one:
                assert one.at.step == 4
                one.run()
        finally:
            ending.join()
    assert folders(out) == ["ckpt-00000004", "ckpt-00000006"]


def test_a_run_does_not_begin_behind_the_checkpoints_of_another(data, tmp_path, does_not_wait):
    first = settings(data, tmp_path, train_dot_max_steps=4)
    with open_run(first)[0] as one, open_run(settings(data, tmp_path, train_dot_max_steps=6))[0] as other:
        with pytest.raises(ConfigError, match="another run uses"):
            other.run()
        one.run()
        for _ in range(2):
            with pytest.raises(ConfigError, match="another run has changed the checkpoints"):
                other.run()
        assert one.run()["step"] == 4  # the folder is as it left it
    assert folders(tmp_path) == ["ckpt-00000004"]
    assert run(settings(data, tmp_path, train_dot_max_steps=6)).ended["step"] == 6


@pytest.mark.parametrize("runs", [True, False])
def test_the_folder_is_released_when_nothing_writes_to_it_any_more(data, tmp_path, monkeypatch, runs):
    calls = []
    for kind, name in ((Reading, "close"), (Rows, "close"), (Saver, "release")):
        made = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda self, made=made, kind=kind: (calls.append(kind), made(self)))
    with open_run(settings(data, tmp_path, train_dot_max_steps=1))[0] as one:
        if runs:
            one.run()
            assert calls == [Reading, Saver]
            calls.clear()
    assert calls == [Reading, Rows, Saver]


# --- parameter servers ------------------------------------------------------------------------------------------------


def test_rows_on_servers_are_not_restored_while_another_run_trains_them(data, tmp_path, does_not_wait):
    pytest.importorskip("zmq")
    from shoal.sharded.ps import Engine, ParameterServer, Shard

    with ParameterServer(Engine(Shard(0, 1), "checkpoint", tmp_path / "ps")) as server:
        out = tmp_path / "out"
        config = settings(data, out, train_dot_ps=[server.address], train_dot_max_steps=4)
        run(config)
        with open_run(settings(data, out, train_dot_ps=[server.address], train_dot_max_steps=8))[0] as one:

            def stop():
                if one.at.step == 6:
                    before = one.rows.size()
                    with pytest.raises(ConfigError, match="another run uses"):
                        open_run(config)[0].__enter__()
                    assert one.rows.size() == before
                return False

            one.stop = stop
            assert one.run()["step"] == 8
