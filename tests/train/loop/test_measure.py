"""Metrics of a run against slow references: PR-AUC, GAUC, NDCG, calibration by bucket; the best checkpoint; ETA."""

import math

import numpy as np
import pytest

from shoal.cli.train_console import PlainReporter
from shoal.errors import ConfigError
from shoal.testing import run_ranks
from shoal.train.loop.measure.metrics import Metrics, binned_pr_auc, buckets, exact_auc
from shoal.train.loop.measure.ranking import gauc, ndcg
from shoal.train.loop.trainer import trainer
from tests.train.loop.helpers import Told, folders, run, settings


def predictions(n=3000, groups=40, seed=0):
    random = np.random.default_rng(seed)
    scores = random.normal(size=n).astype(np.float32)
    scores[::7] = np.round(scores[::7])  # ties
    labels = (random.random(n) < 1 / (1 + np.exp(-scores))).astype(np.float32)
    return random.integers(0, groups, n), scores, labels


def slow_gauc(groups, scores, labels):
    total = weight = 0.0
    for group in np.unique(groups):
        mine = groups == group
        value = exact_auc(scores[mine], labels[mine])
        if not math.isnan(value):
            total, weight = total + value * mine.sum(), weight + mine.sum()
    return total / weight


def slow_ndcg(groups, scores, labels, k):
    found = []
    for group in np.unique(groups):
        s, y = scores[groups == group], labels[groups == group]
        order = sorted(range(len(s)), key=lambda i: (-s[i], y[i]))
        gain = sum(y[i] / math.log2(place + 2) for place, i in enumerate(order[:k]))
        best = sum(v / math.log2(place + 2) for place, v in enumerate(sorted(y, reverse=True)[:k]))
        if best:
            found.append(gain / best)
    return sum(found) / len(found)


@pytest.mark.parametrize("groups", [1, 7, 2000])
def test_gauc_and_ndcg_are_those_of_the_groups(groups):
    given = predictions(groups=groups)
    assert gauc(*given) == pytest.approx(slow_gauc(*given))
    for k in (1, 3, 10):
        assert ndcg(*given, k) == pytest.approx(slow_ndcg(*given, k))
    nothing = (np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float32))
    assert math.isnan(gauc(*nothing))
    assert math.isnan(ndcg(*nothing, 3))
    assert math.isnan(gauc(given[0], given[1], np.ones_like(given[2])))


def test_pr_auc_is_the_average_precision():
    _, scores, labels = predictions()
    metrics = Metrics()
    metrics.add(scores, labels)
    order = np.argsort(-scores, kind="stable")
    precision = np.cumsum(labels[order]) / np.arange(1, len(labels) + 1)
    assert binned_pr_auc(metrics.counts) == pytest.approx((precision * labels[order]).sum() / labels.sum(), abs=5e-3)
    assert math.isnan(binned_pr_auc(np.zeros((2, 8), np.int64)))


def test_buckets_hold_all_samples_and_tell_what_happened():
    _, scores, labels = predictions(20_000)
    metrics = Metrics()
    metrics.add(scores, labels)
    found = buckets(metrics.counts)
    assert len(found) == 10
    assert sum(one["samples"] for one in found) == 20_000
    assert all(abs(one["predicted"] - one["happened"]) < 0.05 for one in found)  # labels were drawn so
    assert [one["predicted"] for one in found] == sorted(one["predicted"] for one in found)
    probability = 1 / (1 + np.exp(-scores.astype(np.float64)))
    assert sum(one["predicted"] * one["samples"] for one in found) == pytest.approx(probability.sum(), rel=1e-3)
    assert buckets(np.zeros((2, 8), np.int64)) == []
    same = np.zeros((2, 1 << 14), np.int64)
    same[:, 8192] = 50
    assert [one["samples"] for one in buckets(same)] == [100]


# --- in a run ---------------------------------------------------------------------------------------------------------


def measured(data, out, **more):
    held = {"data_dot_eval": [str(data / "eval.tsv")], "eval_dot_group": "C1", "eval_dot_every_steps": 16}
    return settings(data, out, **(held | more))


def test_the_best_checkpoint_is_kept_without_patience(data, tmp_path, capsys):
    more = {"out_dot_keep_best": True, "eval_dot_metric": "gauc", "table_dot_lr": 1.0, "train_dot_epochs": 3,
            "out_dot_every_steps": 5, "out_dot_keep": 1}  # fmt: skip
    told = run(measured(data, tmp_path, **more))
    best = max(told.evaluations, key=lambda one: one["gauc"])
    assert {"pr_auc", "gauc", "ndcg", "buckets"} <= best.keys()
    end = told.ended
    assert (end["why"], end["kept_step"], end["kept_value"]) == ("finished", best["step"], best["gauc"])
    assert f"ckpt-{best['step']:08d}" in folders(tmp_path)
    assert len(folders(tmp_path)) <= 2
    PlainReporter().evaluated(**best)
    said = capsys.readouterr().err
    assert "GAUC" in said
    assert "by bucket" in said


def test_what_cannot_be_measured_is_refused(data, tmp_path):
    with pytest.raises(ConfigError, match="keep_best needs"):
        settings(data, tmp_path, out_dot_keep_best=True)
    with pytest.raises(ConfigError, match="needs a group"):
        measured(data, tmp_path, eval_dot_metric="ndcg", eval_dot_group=None)
    with pytest.raises(ConfigError, match="group must be a feature, got 'nobody'"):
        measured(data, tmp_path, eval_dot_group="nobody")


def evaluated(rank, world, *, data, ranks=None):
    with trainer(measured(data, None, train_dot_max_steps=1)) as one:
        return {name: value for name, value in one.evaluate().items() if name in ("gauc", "ndcg", "auc", "samples")}


def test_two_ranks_measure_what_one_does(data):
    (alone,) = run_ranks(1, evaluated, data=data)
    first, second = run_ranks(2, evaluated, data=data)
    assert first == second
    for name, value in alone.items():
        assert first[name] == pytest.approx(value, abs=1e-6), name


def test_a_run_says_how_long_it_will_take(data):
    class Timed(Told):
        def __init__(self):
            super().__init__()
            self.etas = []

        def progress(self, **values):
            self.etas.append((values["eta_s"], values["samples"], values["samples_per_s"]))

    told = Timed()
    run(settings(data, train_dot_epochs=3, out_dot_log_steps=10), told)
    total = told.ended["samples"]
    for eta, samples, rate in told.etas:
        assert eta * rate == pytest.approx(total - samples, abs=0.15 * total)
    assert told.etas[-1][0] * told.etas[-1][2] < 0.1 * total
    told = Timed()
    run(settings(data, train_dot_epochs=3, out_dot_log_steps=10, train_dot_max_steps=50), told)
    eta, samples, rate = told.etas[0]
    assert eta * rate == pytest.approx(40 * 128, rel=0.05)
