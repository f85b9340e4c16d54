"""MLflow and Weights & Biases as hooks, with the real packages if they are installed; and a user's hook."""

import importlib.util
import json

import pytest

from shoal.errors import MissingExtraError
from shoal.train import SessionRunHook
from tests.train.loop.helpers import run, settings


def tracked(data, out, **more):
    return settings(
        data, out, data_dot_eval=[str(data / "eval.tsv")], out_dot_log_steps=10, eval_dot_every_steps=16, **more
    )


def test_hooks_get_the_numbers_of_reports_and_evaluations(data):
    class Mine(SessionRunHook):
        def __init__(self):
            self.seen = []

        def on_progress(self, ctx, values):
            self.seen.append(("progress", ctx.global_step, values["samples"]))

        def on_evaluated(self, ctx, values):
            self.seen.append(("eval", ctx.global_step, round(values["auc"], 3)))

    mine = Mine()
    told = run(tracked(data, None), hooks=[mine])
    assert [each[:2] for each in mine.seen] == [
        ("progress", 10), ("eval", 16), ("progress", 20), ("progress", 30), ("eval", 32)
    ]  # fmt: skip
    assert mine.seen[1][2] == round(told.evaluations[0]["auc"], 3)


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_package_that_is_missing_is_told(data, name):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(MissingExtraError, match=rf"pip install \"shoal\[{name}\]\""):
        run(tracked(data, None, train_dot_hooks=[name]))


def test_mlflow_has_settings_and_metrics(data, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason='pip install "shoal[mlflow]"')
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlflow")
    path = "shoal.train.loop.measure.trackers:MlflowHook"
    for number, hook in enumerate(("mlflow", path)):
        told = run(tracked(data, tmp_path / f"run{number}", train_dot_hooks=[hook]))
        (kept,) = mlflow.MlflowClient().search_runs(["0"], f"attributes.run_name = 'run{number}'")
        assert kept.data.params["train.batch_size"] == "128"
        assert kept.data.metrics["eval/auc"] == pytest.approx(told.evaluations[-1]["auc"])
        assert len(mlflow.MlflowClient().get_metric_history(kept.info.run_id, "train/logloss")) == 3
        assert kept.info.status == "FINISHED"


def test_wandb_has_settings_and_metrics(data, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason='pip install "shoal[wandb]"')
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run(tracked(data, tmp_path / "run", train_dot_hooks=["wandb"]))
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (binary,) = folder.glob("run-*.wandb")
    content = binary.read_bytes()
    for name in (b"train.batch_size", b"eval/auc", b"train/logloss"):
        assert name in content, json.dumps(name.decode())
