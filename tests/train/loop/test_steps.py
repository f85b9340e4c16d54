"""A step's learning-rate schedule, gradients of several batches, bfloat16; killed and resumed, on ranks."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.errors import ConfigError
from shoal.table.offline.source import open_source
from shoal.testing import run_ranks
from shoal.train.loop.config import TrainConfig
from shoal.train.loop.schedule import factor
from shoal.train.loop.trainer import trainer
from tests.cli.train_helpers import rows_of
from tests.train.loop.helpers import run, settings

LONG = {"train_dot_max_steps": 12, "data_dot_shuffle_rows": 0}


def test_schedules_rise_and_fall():
    def rates(steps=12, **given):
        return [round(factor(TrainConfig(**given), step), 4) for step in range(steps)]

    assert rates(3) == [1.0, 1.0, 1.0]
    assert rates(5, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(6, schedule="linear", schedule_steps=4, lr_end=0.2) == [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert rates(5, schedule="cosine", max_steps=4) == [1.0, 0.8536, 0.5, 0.1464, 0.0]
    assert rates(6, schedule="step", decay_every=2, decay=0.5, lr_end=0.3) == [1.0, 1.0, 0.5, 0.5, 0.3, 0.3]
    assert rates(5, schedule="step", decay_every=2, decay=0.5, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"schedule": "linear"}, "needs schedule_steps"),
        ({"schedule": "step"}, "needs decay_every"),
        ({"lr_end": 2.0}, "at most 1"),
        ({"accumulate": 0}, "accumulate"),
        ({"warmup_steps": -1}, "warmup_steps"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(given, text):
    with pytest.raises(ConfigError, match=text):
        TrainConfig(**given)


def folder_of(told):
    return Path(told.ended["checkpoint"])


def dense_of(folder):
    return {name: value for name, value in load_file(folder / "dense.safetensors").items() if name.startswith("model.")}


def weights_of(folder):
    """(table, id) -> weights."""
    return {
        (table, id_): row
        for table, batch in open_source(folder).scan()
        for id_, row in zip(batch.ids.tolist(), torch.from_numpy(batch.weights.copy()), strict=True)
    }


def states_of(folder):
    """Weights and optimizer state of all rows, to the bit; not the time, which differs between runs."""
    return {
        (table, int(batch.ids[i])): (batch.weights[i].tobytes(), batch.state(i))
        for table, batch in open_source(folder).scan()
        for i in range(len(batch))
    }


def assert_alike(one, other, rtol=2e-3, atol=2e-5):
    a, b = weights_of(one), weights_of(other)
    assert a.keys() == b.keys()
    for key in a:
        assert torch.allclose(a[key], b[key], rtol=rtol, atol=atol), key
    a, b = dense_of(one), dense_of(other)
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=rtol, atol=1e-4), name


@pytest.mark.parametrize("tables", [{}, {"table_dot_features.C3.lr": 0.02}], ids=["one table", "two"])
def test_four_batches_are_learnt_from_as_one_of_four_times_the_size(data, tmp_path, tables):
    sgd = {"table_dot_optimizer": "sgd", "train_dot_optimizer": "sgd"}
    whole = run(settings(data, tmp_path / "whole", train_dot_batch_size=256, **LONG, **sgd, **tables))
    parts = {"train_dot_batch_size": 64, "train_dot_accumulate": 4}
    cut = run(settings(data, tmp_path / "cut", **parts, **LONG, **sgd, **tables))
    assert whole.ended["samples"] == cut.ended["samples"] == 12 * 256
    assert_alike(folder_of(whole), folder_of(cut))


def test_rates_of_rows_and_weights_follow_the_schedule(data, tmp_path):
    plain = run(
        settings(data, tmp_path / "plain", train_dot_max_steps=1, train_dot_optimizer="sgd", table_dot_optimizer="sgd")
    )
    half = run(
        settings(
            data, tmp_path / "half", train_dot_max_steps=1, train_dot_optimizer="sgd", table_dot_optimizer="sgd",
            train_dot_warmup_steps=2, train_dot_lr=0.002, table_dot_lr=0.1,
        )
    )  # fmt: skip
    assert_alike(folder_of(plain), folder_of(half), rtol=1e-4, atol=1e-7)  # half of twice the rates
    none = {"train_dot_schedule": "linear", "train_dot_schedule_steps": 1}
    two = run(settings(data, tmp_path / "two", train_dot_max_steps=2, **none))
    one = run(settings(data, tmp_path / "one", train_dot_max_steps=1, **none))
    a, b = dense_of(folder_of(one)), dense_of(folder_of(two))
    assert all(torch.equal(a[name], b[name]) for name in a)  # the second step had a rate of 0
    old, new = weights_of(folder_of(one)), weights_of(folder_of(two))
    assert all(torch.equal(new[key], old[key]) for key in old)


@pytest.mark.parametrize(
    "how",
    [
        {"train_dot_accumulate": 3},
        {"train_dot_schedule": "cosine", "train_dot_warmup_steps": 5, "train_dot_schedule_steps": 40},
    ],
    ids=["accumulate", "cosine"],
)
def test_a_run_that_was_ended_in_between_ends_with_the_same_rows(data, tmp_path, how):
    how = how | {"train_dot_epochs": 4}
    whole = run(settings(data, tmp_path / "whole", train_dot_max_steps=30, **how))
    for steps in (7, 8, 21, 30):
        cut = run(settings(data, tmp_path / "cut", train_dot_max_steps=steps, out_dot_every_steps=5, **how))
    assert states_of(folder_of(whole)) == states_of(folder_of(cut))
    a, b = dense_of(folder_of(whole)), dense_of(folder_of(cut))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_rest_of_an_epoch_makes_a_step_of_its_own(data):
    told = run(settings(data, train_dot_accumulate=7, train_dot_epochs=2))
    assert told.ended["why"] == "finished"
    assert (told.ended["samples"], told.ended["step"]) == (2 * 4096, 2 * math.ceil(4096 / 128 / 7))


def test_bfloat16_learns_about_the_same(data):
    exact = run(settings(data, train_dot_epochs=3)).ended
    amp = run(settings(data, train_dot_epochs=3, train_dot_amp="bf16")).ended
    assert amp["logloss"] == pytest.approx(exact["logloss"], rel=0.02)
    assert amp["logloss"] != exact["logloss"]


def test_rows_on_servers_are_updated_as_those_of_this_process(data, tmp_path):
    pytest.importorskip("zmq")
    from shoal.sharded.ps import Engine, ParameterServer, Shard

    how = {"train_dot_accumulate": 2, "train_dot_warmup_steps": 3, "train_dot_max_steps": 8, "data_dot_shuffle_rows": 0}
    here = run(settings(data, tmp_path / "here", **how))
    with ParameterServer(Engine(Shard(0, 1), directory=str(tmp_path / "ps"))) as server:
        config = settings(data, None, train_dot_ps=[server.address], **how)
        with trainer(config) as one:
            one.run()
            rows = weights_of(folder_of(here))
            ids = torch.tensor([id_ for _, id_ in rows])
            (table,) = one.rows.tables.values()
            assert torch.allclose(table.lookup(ids), torch.stack(list(rows.values())), atol=1e-5)


def learnt(rank, world, *, data, out):
    config = settings(
        data, out, train_dot_batch_size=32 if world == 2 else 64, train_dot_accumulate=2, train_dot_warmup_steps=3,
        train_dot_max_steps=10, data_dot_shuffle_rows=0, table_dot_optimizer="sgd", train_dot_optimizer="sgd",
    )  # fmt: skip
    with trainer(config) as one:
        return one.run()["samples"]


def test_two_ranks_learn_together_from_several_batches(data, tmp_path):
    assert run_ranks(2, learnt, data=data, out=tmp_path / "two") == [10 * 2 * 2 * 32] * 2
    assert rows_of(tmp_path / "two" / "ckpt-00000010")
