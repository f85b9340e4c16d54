"""`[train] pipeline` and `staleness`: bit-identical to runs without, for all kinds of tables and interruptions.

In this process first, then parameter servers, then ranks as processes.
"""

import json
import threading
import time

import pytest

from shoal.background.ahead import ReadAheadIfSlow
from shoal.errors import ConfigError
from shoal.testing import run_ranks
from shoal.train import SessionRunHook
from shoal.train.loop.trainer import trainer
from shoal.trainer import load_config
from tests.cli.train_helpers import newest, rows_of, same_checkpoint
from tests.train.loop.helpers import SMALL, Told
from tests.train.loop.helpers import run as run_config

BASE = SMALL | {
    "data.format": "json", "data.label": "click", "data.dense": ["age"], "data.sparse": ["user", "item"],
    "data.time": "at", "data.shuffle_rows": 256, "train.batch_size": 64, "train.epochs": 2,
}  # fmt: skip
KINDS = {
    "plain": {},
    "read ahead": {"data.prefetch": 3},
    "several batches per step": {"data.prefetch": 2, "train.accumulate": 3},
    "schedule": {"data.prefetch": 2, "train.schedule": "linear", "train.schedule_steps": 20},
    "tables of their own": {"data.prefetch": 2, "table.features.user.lr": 0.1, "table.features.item.combiner": "mean"},
    "evaluations": {"data.prefetch": 2, "eval.every_steps": 5},
    "checkpoints": {"data.prefetch": 2, "out.every_steps": 3},
}


def record(i):
    user, item = i * 7919 % 97, i * 104729 % 61
    return {"click": int((user * 7 + item) % 5 == 0), "age": i % 80, "user": f"u{user}", "item": f"i{item}",
            "at": 1_000_000 + i}  # fmt: skip


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    for name, first, last in (("a", 0, 700), ("b", 700, 1000), ("c", 1000, 1900), ("eval", 1900, 2100)):
        (folder / f"{name}.json").write_text("".join(json.dumps(record(i)) + "\n" for i in range(first, last)))
    return folder


def config_of(clicks, out, **settings):
    given = {"data.train": [str(clicks / f"{name}.json") for name in "abc"], "data.eval": [str(clicks / "eval.json")]}
    return load_config(None, BASE | given | {"out.dir": str(out)} | settings)


def checkpoint(clicks, out, **settings):
    """That of a whole run."""
    run_config(config_of(clicks, out, **settings))
    return newest(out)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_ends_in_the_same_bits(clicks, tmp_path, kind):
    expected = checkpoint(clicks, tmp_path / "plain", **KINDS[kind] | {"train.pipeline": False})
    same_checkpoint(checkpoint(clicks, tmp_path / "piped", **KINDS[kind]), expected)


def test_with_staleness_runs_are_equal_to_each_other_and_not_to_an_exact_one(clicks, tmp_path):
    options = {"data.prefetch": 2, "train.staleness": 1, "eval.every_steps": 7}
    first = checkpoint(clicks, tmp_path / "first", **options)
    same_checkpoint(checkpoint(clicks, tmp_path / "second", **options), first)
    assert rows_of(checkpoint(clicks, tmp_path / "exact")) != rows_of(first)
    told = Told()
    with trainer(config_of(clicks, tmp_path / "first", **options | {"train.epochs": 3}), reporter=told) as one:
        assert one.run()["samples"] == 3 * 1900  # resumed, and run to the end


class Crash(SessionRunHook):
    def __init__(self, step):
        self._step = step

    def after_run(self, ctx, values):
        if ctx.global_step == self._step:
            raise RuntimeError("killed")


@pytest.mark.parametrize("kind", ["read ahead", "several batches per step"])
def test_a_run_that_is_killed_resumes_exactly_though_more_was_read(clicks, tmp_path, kind):
    options = KINDS[kind] | {"out.every_steps": 4}
    before = set(threading.enumerate())
    expected = checkpoint(clicks, tmp_path / "whole", **options)
    for step in (6, 11):
        with pytest.raises(RuntimeError, match="killed"):
            run_config(config_of(clicks, tmp_path / "killed", **options), hooks=[Crash(step)])
    same_checkpoint(checkpoint(clicks, tmp_path / "killed", **options), expected)
    assert not [one.name for one in set(threading.enumerate()) - before if one.name.startswith("shoal-")]


def test_settings_that_do_not_fit_are_refused(clicks, tmp_path):
    with pytest.raises(ConfigError, match="staleness = 1 needs pipeline = true"):
        config_of(clicks, tmp_path, **{"train.staleness": 1, "train.pipeline": False})
    with pytest.raises(ConfigError, match="staleness"):
        config_of(clicks, tmp_path, **{"train.staleness": -1})


def test_reading_that_waits_moves_to_a_thread_and_reading_that_does_not_stays():
    def waits():
        for n in range(100):
            time.sleep(0.02)
            yield n

    def works():
        for n in range(100):
            end = time.process_time() + 0.003
            while time.process_time() < end:
                pass
            yield n

    slow, quick = ReadAheadIfSlow(waits(), 2), ReadAheadIfSlow(works(), 2)
    assert list(slow) == list(range(100))
    assert slow.is_ahead
    assert [next(quick) for _ in range(20)] == list(range(20))
    slow.close(), quick.close()


# --- parameter servers ------------------------------------------------------------------------------------------------


def rows_on_servers(clicks, out, **settings):
    pytest.importorskip("zmq")
    from shoal.sharded import PsClient
    from shoal.sharded.ps import Engine, ParameterServer, Shard

    with ParameterServer(Engine(Shard(0, 1), "log", out / "ps")) as server:
        run_config(config_of(clicks, out / "run", **{"train.ps": [server.address]} | settings))
        with PsClient([server.address]) as client:
            pages = [page[:2] for page in client.scan("features")]
            return sorted((int(i), row.tolist()) for ids, rows in pages for i, row in zip(ids, rows, strict=True))


def test_rows_on_servers_end_in_the_same_bits(clicks, tmp_path):
    expected = rows_on_servers(clicks, tmp_path / "plain", **{"train.pipeline": False})
    assert rows_on_servers(clicks, tmp_path / "piped", **{"data.prefetch": 2}) == expected
    stale = [rows_on_servers(clicks, tmp_path / name, **{"train.staleness": 2}) for name in ("one", "two")]
    assert stale[0] == stale[1] != expected


# --- ranks ------------------------------------------------------------------------------------------------------------


def on_rank(rank, world, *, clicks, out, settings):
    with trainer(config_of(clicks, out, **settings), reporter=Told()) as one:
        ended = one.run()
    return ended["samples"], ended["why"]


RANKED = {
    "by row": {},
    "all ways": {"table.features.user.shard": "table", "table.features.item.shard": "data", "eval.every_steps": 4},
    "several batches per step": {"train.accumulate": 3, "train.max_steps": 9},
}


@pytest.mark.parametrize("kind", RANKED)
def test_ranks_with_uneven_data_end_in_the_same_bits(clicks, tmp_path, kind):
    """Three files of 700, 300 and 900 samples over two ranks: one of them joins the other without samples."""
    for name, pipeline in (("plain", False), ("piped", True)):
        settings = RANKED[kind] | {"train.pipeline": pipeline, "data.prefetch": 2}
        ended = run_ranks(2, on_rank, clicks=clicks, out=tmp_path / name, settings=settings, timeout_s=200)
        assert ended[0] == ended[1]
    same_checkpoint(newest(tmp_path / "piped"), newest(tmp_path / "plain"))


def test_stale_ranks_are_equal_to_each_other(clicks, tmp_path):
    settings = {"train.staleness": 1, "eval.every_steps": 6, "out.every_steps": 5}
    for name in ("one", "two"):
        run_ranks(2, on_rank, clicks=clicks, out=tmp_path / name, settings=settings, timeout_s=200)
    same_checkpoint(newest(tmp_path / "one"), newest(tmp_path / "two"))
