"""examples/ray_train.py on a local Ray: two workers, one of which dies; the result equals that of a run without Ray."""

import os
from pathlib import Path

import pytest

from examples.ray_train import learn, run, train_loop
from shoal.data import CriteoLike, write_criteo
from shoal.testing import run_ranks
from tests.ray_cluster import start_ray

ROWS = 1100
CONFIG = {"every": 4, "batch_size": 64}


def on_rank(rank, world, *, folder):
    reported = []
    metrics = learn({"folder": str(folder), **CONFIG}, lambda values, path: reported.append((values["step"], path)))
    return metrics, [step for step, _ in reported]


def loop_that_dies_once(config):
    """Worker 1 is gone after the second checkpoint, in the first attempt."""
    import ray.train

    report, died = ray.train.report, Path(config["folder"]) / "died"

    def reported(metrics, **options):
        report(metrics, **options)
        if metrics["step"] == 8 and ray.train.get_context().get_world_rank() == 1 and not died.exists():
            died.touch()
            os._exit(1)

    ray.train.report = reported
    train_loop(config)


def data(folder):
    folder.mkdir()
    write_criteo(folder / "train.tsv", CriteoLike(rows=ROWS, seed=1))
    return folder


def test_without_ray_every_sample_is_learnt_once(tmp_path):
    (metrics, steps), other = run_ranks(2, on_rank, folder=data(tmp_path / "plain"), timeout_s=250)
    assert (metrics, steps) == other
    assert metrics["samples"] == ROWS
    assert steps == [4, 8, metrics["step"]]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_a_lost_worker_is_replaced_and_the_end_is_that_of_a_run_without_ray(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.train.torch")
    expected = run_ranks(2, on_rank, folder=data(tmp_path / "plain"), timeout_s=400)[0][0]
    monkeypatch.setenv("RAY_worker_niceness", "0")  # with Ray's default of 15 workers starve on a busy machine
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    start_ray()
    try:
        folder = data(tmp_path / "ray")
        result = run(folder, 2, loop_that_dies_once, **CONFIG)
        assert (folder / "died").exists()
        assert {name: result.metrics[name] for name in expected} == expected
        assert (Path(result.checkpoint.path) / "manifest.json").exists()
    finally:
        ray.shutdown()
