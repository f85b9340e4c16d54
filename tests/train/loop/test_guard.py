"""Guard rails: decisions as plain values, then runs whose data becomes bad, and their roll-back."""

import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from shoal.cli.main import main
from shoal.errors import ConfigError, DataError
from shoal.serving.export.manifest import Manifest
from shoal.train.loop.guard.config import GuardConfig
from shoal.train.loop.guard.guard import FILE, Guard, Trip, read_trip
from shoal.train.loop.guard.judge import Measures, judge, measure
from shoal.train.loop.guard.rollback import SavedStep, choose, roll_back, running, saved_steps
from shoal.train.loop.measure.metrics import Metrics
from shoal.train.loop.measure.reporter import Reporter
from shoal.train.loop.trainer import trainer
from shoal.trainer import load_config

LIMITS = GuardConfig(min_auc=0.7, calibration=(0.8, 1.25), max_changed_rows=0.5, window=10, min_samples=10)


# --- decisions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Measures(learnt=10, samples=10, auc=0.7, calibration=1.0, changed_rows=0.5), ""),
        (Measures(learnt=9, samples=10, auc=0.1), ""),
        (Measures(learnt=10, samples=9, auc=0.1, calibration=9.0, changed_rows=1.0), ""),
        (Measures(learnt=10, samples=10), ""),
        (
            Measures(learnt=10, samples=10, auc=0.69, calibration=1.0),
            "AUC of the last 10 samples is 0.6900, below min_auc = 0.7",
        ),
        (
            Measures(learnt=10, samples=10, auc=0.9, calibration=0.79),
            r"calibration of the last 10 samples is 0.790, outside",
        ),
        (
            Measures(learnt=10, samples=10, auc=0.9, calibration=float("inf")),
            "is inf, outside of calibration = [0.8, 1.25]",
        ),
        (Measures(learnt=10, samples=10, auc=0.9, calibration=1.0, changed_rows=0.51), "51.0% of all rows changed"),
        (Measures(learnt=10, samples=10, auc=0.1, calibration=2.0), "; the calibration"),
    ],
)
def test_a_value_outside_of_its_band_is_named(found, reason):
    assert (reason in judge(LIMITS, found)) if reason else judge(LIMITS, found) == ""


def test_without_limits_nothing_is_judged():
    assert not GuardConfig().active
    assert (
        judge(GuardConfig(), Measures(learnt=10**6, samples=10**6, auc=0.0, calibration=99.0, changed_rows=1.0)) == ""
    )


def test_measures_of_a_window():
    logits, labels = np.array([-1.0, 0.0, 1.0, 2.0], np.float32), np.array([False, False, True, True])
    found = measure(9, logits, labels, 0.25)
    assert (found.samples, found.auc, found.changed_rows) == (4, 1.0, 0.25)
    assert found.calibration == pytest.approx((1 / (1 + np.exp(-logits))).sum() / 2)
    assert measure(9, logits, np.zeros(4, bool), None).calibration == float("inf")
    assert measure(9, logits[:0], labels[:0], None).samples == 0


def test_the_newest_predictions_are_given_in_their_order():
    metrics = Metrics(window=10)
    for begin in range(0, 12, 3):
        metrics.add(np.arange(begin, begin + 3, dtype=np.float32), np.zeros(3, np.float32))
    assert metrics.recent(4)[0].tolist() == [8, 9, 10, 11]
    assert metrics.recent(100)[0].tolist() == list(range(12))
    assert len(metrics.recent(0)[0]) == len(Metrics().recent(5)[0]) == 0


@pytest.mark.parametrize(
    ("setting", "value", "why"),
    [
        ("min_auc", 1.0, "min_auc must be below 1"),
        ("calibration", [0.8], "must be two numbers"),
        ("calibration", [1.2, 0.8], "two increasing numbers"),
        ("calibration", "wide", "list of numbers"),
        ("window", 200_000, "at most .out. auc_window"),
        ("training", "end", "must be one of 'continue', 'stop'"),
        ("auc", 0.7, "has no setting 'auc'"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, setting, value, why):
    (tmp_path / "x.toml").write_text(
        f'[data]\ntrain = ["x"]\n[serve.guard]\nmax_changed_rows = 0.5\n{setting} = {json.dumps(value)}\n'
    )
    with pytest.raises(ConfigError, match=why):
        load_config(tmp_path / "x.toml")


def test_a_trip_is_remembered_until_the_values_recover_or_somebody_acts(tmp_path):
    told, now = [], [0.5]

    def make(resume):
        limits = GuardConfig(max_changed_rows=0.1, window=1, min_samples=1, resume=resume)
        return Guard(
            limits, learnt=lambda: 1, recent=lambda n: (np.zeros(1), np.ones(1)), changed_rows=lambda: now[0],
            folder=str(tmp_path), checkpoints=lambda: [3, 7], alert=told.append, every_s=0,
        )  # fmt: skip

    guard = make("rollback")
    assert not guard.allows(9)
    assert "stopped at step 9: 50.0% of all rows changed" in told[0]
    assert guard.pinned == [3, 7]
    now[0] = 0.0
    assert not guard.allows(10)
    assert not make("rollback").allows(11)
    assert "still stopped, since step 9" in told[1]
    assert len(told) == 2
    recovers = make("recovered")
    assert recovers.allows(12)
    assert "resume at step 12" in told[-1]
    assert read_trip(str(tmp_path)) is None
    (tmp_path / FILE).write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        make("rollback")


def test_which_step_a_run_goes_back_to():
    saved = [
        SavedStep(step=n, path=f"ckpt-{n}", tripped=n > 20, damage="torn" if n == 20 else "") for n in (5, 10, 20, 30)
    ]
    trip = Trip(reason="bad", step=25, at=0.0)
    assert choose(saved, trip, None) == (10, "it is the newest from before step 25, where the guard tripped")
    assert choose(saved, None, 5)[0] == 5
    with pytest.raises(ConfigError, match="--to STEP, one of 5, 10, 30"):
        choose(saved, None, None)
    with pytest.raises(ConfigError, match="no checkpoint of step 6"):
        choose(saved, trip, 6)
    with pytest.raises(ConfigError, match=r"damaged .torn."):
        choose(saved, trip, 20)
    with pytest.raises(ConfigError, match="there is no complete checkpoint from before"):
        choose(saved[3:], trip, None)


# --- runs -------------------------------------------------------------------------------------------------------------

CONFIG = """
[data]
train = ["log.csv"]
format = "csv"
label = "click"
shuffle_rows = 0
[features.user]
[features.item]
[table]
dim = 4
lr = 0.1
[model]
name = "deepfm"
hidden = [8]
[train]
batch_size = 50
threads = 1
[out]
dir = "run"
every_steps = 10
metrics = "127.0.0.1:0"
log_steps = 10
[serve]
dir = "exports/m"
push_every_s = 1e-6
registry = "dir:registry"
[serve.guard]
min_auc = 0.6
window = 500
min_samples = 2000
"""
GOOD = 60
"""Steps of good samples; those of the 40 after it have the opposite labels."""


class Told(Reporter):
    def __init__(self):
        self.alerts, self.notes, self.exports, self.gauges = [], [], [], []
        self.metrics = None

    def start(self, **values):
        self.metrics = values["metrics"]

    def alert(self, text):
        self.alerts.append(text)
        if self.metrics is None:
            return
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=30) as answer:
            self.gauges += [line for line in answer.read().decode().splitlines() if "guard_tripped" in line]

    def note(self, text):
        self.notes.append(text)

    def exported(self, **values):
        self.exports.append(values["step"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = np.random.default_rng(1)
    users, items = made.integers(0, 40, 5000), made.integers(0, 10, 5000)
    clicks = (users + items) % 2
    clicks[GOOD * 50 :] ^= 1
    lines = [f"{c},u{u},i{i}" for c, u, i in zip(clicks, users, items, strict=True)]
    (tmp_path / "log.csv").write_text("\n".join(["click,user,item", *lines, ""]))
    (tmp_path / "m.toml").write_text(CONFIG)
    return tmp_path


def train(changes=None):
    told = Told()
    with trainer(load_config("m.toml", changes), reporter=told) as one:
        return one.run(), told


def test_bad_samples_stop_pushes_and_exports_and_a_roll_back_begins_again(folder, capsys):
    result, told = train({"out.keep": 9})
    assert result["why"] == "finished"
    (alert,) = told.alerts
    assert "the AUC of the last 500 samples is" in alert
    assert "shoal rollback" in alert
    assert any(line.startswith("shoal_train_guard_tripped{") and line.endswith(" 1.0") for line in told.gauges)
    assert told.exports == []  # not even at the end
    trip = read_trip("run")
    assert GOOD < trip.step <= 100

    assert main(["rollback", "m.toml", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {one["step"]: one["tripped"] for one in listed["checkpoints"]}[100]
    assert main(["rollback", "m.toml", "--to", "50"]) == 0
    assert "rolled back to step 50" in capsys.readouterr().out
    assert [one.step for one in saved_steps("run")][-1] == 50
    assert read_trip("run") is None

    result, told = train()  # continues after the samples of the 100 steps; there are none
    assert (result["step"], told.exports, told.alerts) == (50, [50], [])
    assert any("already trained on are not read again" in note for note in told.notes)
    (version,) = Path("exports/m").iterdir()
    assert Manifest.read(version).global_step == 50


def test_a_replay_learns_the_samples_again_and_a_run_can_end_at_a_trip(folder):
    changes = {"serve.guard.training": "stop", "out.keep": 9, "serve.guard.max_changed_rows": 0.0}
    result, told = train(changes)
    assert (result["why"], read_trip("run").step >= 40) == ("guard", True)
    assert "the run ends" in told.alerts[0]
    assert main(["train", "m.toml", "--set", 'serve.guard.training="stop"']) == 3  # it stays stopped
    roll_back("run", 30, replay=True)
    result, told = train(changes)
    assert (result["why"], told.exports[:1]) == ("guard", [30])


def test_the_checkpoints_of_before_a_trip_stay(folder):
    train({"train.max_steps": 10})
    (folder / "run" / FILE).write_text(json.dumps({"reason": "bad", "step": 15, "at": 1.0, "checkpoints": [10]}))
    _, told = train({"train.max_steps": 50, "out.keep": 1})
    assert [(one.step, one.tripped) for one in saved_steps("run")] == [(10, False), (50, True)]
    assert "still stopped, since step 15: bad" in told.alerts[0]


def test_a_fresh_run_is_not_stopped_by_what_an_earlier_one_did(folder):
    train()
    assert read_trip("run") is not None
    told = Told()
    with trainer(load_config("m.toml", {"train.max_steps": 10}), reporter=told, fresh=True) as one:
        assert one.run()["why"] == "max_steps"
    assert (told.alerts, told.exports, read_trip("run")) == ([], [10], None)


def test_a_run_that_is_running_is_not_rolled_back(folder, capsys):
    train({"train.max_steps": 20})
    with running("run") as alone:
        assert alone
        assert main(["rollback", "m.toml", "--to", "10"]) == 2
    assert "a trainer is running in run; stop it first" in capsys.readouterr().err
    assert main(["rollback", "m.toml"]) == 2
    assert "--to STEP, one of 10, 20" in capsys.readouterr().err
    assert [one.step for one in saved_steps("run")] == [10, 20]


def test_the_first_export_comes_before_the_first_step(folder):
    _, told = train({"serve.at_start": True, "train.max_steps": 3, "serve.guard.min_auc": 0.0})
    assert told.exports == [0, 3]
    _, told = train({"serve.at_start": True, "train.max_steps": 5})
    assert told.exports == [5]
