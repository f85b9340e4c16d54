"""A checkpoint that cannot be written: the run continues and tries again; only the last one ends it. Two ranks."""

import errno
import time
from types import SimpleNamespace

import pytest

from shoal.testing import run_ranks
from shoal.train.loop.trainer import trainer
from tests.cli.train_helpers import rows_of
from tests.train.loop.helpers import Told, file_limit, folders, open_run, run, settings

EVERY = {"out_dot_every_steps": 8}


def at_steps(limit, sizes):
    """Sets the limit at some steps."""
    return lambda step: limit(sizes[step]) if step in sizes else None


def test_a_checkpoint_that_fails_is_told_and_tried_again_at_the_next(data, tmp_path):
    run(settings(data, tmp_path / "whole", **EVERY))
    with file_limit() as limit:
        told = run(settings(data, tmp_path / "full", **EVERY), Told(at_steps(limit, {10: 5000, 20: None})))
    assert told.saves == [8, 24, 32]
    assert len(told.notes) == 1
    assert "the checkpoint of step 16 could not be written" in told.notes[0]
    assert f"The newest is {tmp_path / 'full' / 'ckpt-00000008'}" in told.notes[0]
    assert folders(tmp_path / "full") == ["ckpt-00000024", "ckpt-00000032"]
    a, b = (tmp_path / one / "ckpt-00000032" for one in ("whole", "full"))
    assert (a / "dense.safetensors").read_bytes() == (b / "dense.safetensors").read_bytes()


def test_the_last_checkpoint_that_fails_ends_the_run_and_the_one_before_is_whole(data, tmp_path):
    whole = run(settings(data, tmp_path / "whole", **EVERY)).ended
    with file_limit() as limit, pytest.raises(OSError, match=r"step 32 could not be written .* newest .*ckpt-00000024"):
        run(settings(data, tmp_path / "full", **EVERY), Told(at_steps(limit, {30: 5000})))
    assert folders(tmp_path / "full") == ["ckpt-00000016", "ckpt-00000024"]
    told = run(settings(data, tmp_path / "full", **EVERY))
    assert told.ended["logloss"] == whole["logloss"]
    a, b = (tmp_path / one / "ckpt-00000032" for one in ("whole", "full"))
    assert (a / "dense.safetensors").read_bytes() == (b / "dense.safetensors").read_bytes()


def test_by_time_it_is_tried_again_after_the_time_and_not_after_every_step(data, tmp_path, monkeypatch):
    now = [1000.0]
    clock = SimpleNamespace(**vars(time) | {"monotonic": lambda: now[0]})
    monkeypatch.setattr("shoal.train.loop.saving.time", clock)
    with open_run(settings(data, tmp_path, out_dot_every_s=60.0))[0] as one, file_limit() as limit:
        assert not one.saver.wants(1)
        now[0] += 61
        assert one.saver.wants(1)
        limit(5000)
        assert one._save() is None
        assert not one.saver.wants(2)
        now[0] += 61
        assert one.saver.wants(3)
        limit(None)
        assert one._save() == str(tmp_path / "ckpt-00000000")


def test_a_best_model_that_cannot_be_kept_does_not_count_as_kept(data, tmp_path):
    config = settings(
        data, tmp_path, data_dot_eval=[str(data / "eval.tsv")], eval_dot_patience=100, eval_dot_every_steps=8
    )
    with file_limit() as limit:
        told = run(config, Told(at_steps(limit, {15: 5000, 17: None})))
    assert [one["is_best"] for one in told.evaluations[:2]] == [True, True]
    assert any("step 16 could not be written" in note for note in told.notes)
    assert (tmp_path / f"ckpt-{told.ended['kept_step']:08d}").is_dir()
    assert 16 not in told.saves


# --- two ranks --------------------------------------------------------------------------------------------------------


def train_beside_a_full_disk(rank, world, *, data, out):
    """The disk of rank 1 is full in the middle of the run and at its end."""
    with file_limit() as limit:
        told, failure = Told(at_steps(limit, {6: 5000, 10: None, 15: 5000} if rank == 1 else {})), None
        with trainer(settings(data, out, out_dot_every_steps=4), reporter=told) as one:
            one.reporter = one.saver.reporter = told  # also on the rank that prints nothing
            try:
                one.run()
            except OSError as error:
                failure = str(error), getattr(error.__cause__, "errno", None)
    return told.notes, told.saves, failure


@pytest.mark.timeout(600)
def test_what_one_rank_cannot_write_no_rank_counts_as_written(data, tmp_path):
    first, second = run_ranks(2, train_beside_a_full_disk, data=data, out=tmp_path, timeout_s=300)
    assert first[1] == second[1] == [4, 12]
    assert "step 8 could not be written (rank 1: " in first[0][0]
    assert "step 8 could not be written" in second[0][0]
    assert "at the end of the run" in first[2][0]
    assert second[2][1] == errno.EFBIG
    assert folders(tmp_path) == ["ckpt-00000004", "ckpt-00000012"]
    assert rows_of(tmp_path / "ckpt-00000012")
