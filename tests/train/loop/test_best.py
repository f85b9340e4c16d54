"""Early stopping ends with the best model, not with the last: here, on parameter servers, and on two ranks."""

import pytest

from shoal.cli.train_console import summary
from shoal.testing import run_ranks
from shoal.train.loop.trainer import trainer
from tests.cli.train_helpers import rows_of
from tests.train.loop.helpers import Told, folders, open_run, run, settings

STOPS = {
    "table_dot_lr": 1.0, "train_dot_lr": 0.05, "train_dot_epochs": 40, "eval_dot_patience": 3,
    "eval_dot_every_steps": 8, "out_dot_every_steps": 5, "out_dot_keep": 1,
}  # fmt: skip


def stops(data, out, **more):
    return settings(data, out, data_dot_eval=[str(data / "eval.tsv")], **(STOPS | more))


def best_of(told, metric="auc"):
    sign = 1 if metric == "auc" else -1
    return max(told.evaluations, key=lambda one: sign * one[metric])


def test_an_early_stopped_run_ends_with_the_best_rows_and_weights(data, tmp_path):
    told = run(stops(data, tmp_path))
    best, end = best_of(told), told.ended
    assert end["why"] == "early_stop"
    assert end["step"] == best["step"] + 3 * 8
    assert (end["model_step"], end["kept_step"], end["kept_value"]) == (best["step"], best["step"], best["auc"])
    kept, last = tmp_path / f"ckpt-{best['step']:08d}", tmp_path / f"ckpt-{end['step']:08d}"
    assert folders(tmp_path) == [kept.name, last.name]
    assert end["checkpoint"] == str(last)
    assert rows_of(kept) == rows_of(last)
    assert (kept / "dense.safetensors").read_bytes() == (last / "dense.safetensors").read_bytes()
    assert f"the model in {last} is from step {best['step']}, the best (auc {best['auc']:.4f})" in summary(end)
    with open_run(stops(data, tmp_path))[0] as one:
        assert one.evaluate()["auc"] == best["auc"]


def test_the_least_logloss_is_the_best(data, tmp_path):
    told = run(stops(data, tmp_path, eval_dot_metric="logloss"))
    best = best_of(told, "logloss")
    assert told.ended["why"] == "early_stop"
    assert (told.ended["model_step"], told.ended["kept_value"]) == (best["step"], best["logloss"])
    with open_run(stops(data, tmp_path, eval_dot_metric="logloss"))[0] as one:
        assert one.evaluate()["logloss"] == best["logloss"]


def test_a_run_that_was_stopped_in_between_ends_the_same(data, tmp_path):
    whole = run(stops(data, tmp_path / "whole")).ended
    best = whole["kept_step"]
    for steps in (best - 3, best, best + 4, best + 9):  # before the best evaluation, at it, after it
        run(stops(data, tmp_path / "cut", train_dot_max_steps=steps))
    end = run(stops(data, tmp_path / "cut")).ended
    for name in ("why", "step", "model_step", "kept_step", "kept_value"):
        assert end[name] == whole[name], name
    for one in ("whole", "cut"):
        assert (tmp_path / one / f"ckpt-{end['step']:08d}").is_dir()
    a, b = (tmp_path / one / f"ckpt-{end['step']:08d}" / "dense.safetensors" for one in ("whole", "cut"))
    assert a.read_bytes() == b.read_bytes()


def test_the_same_command_again_changes_nothing_and_more_patience_goes_on_with_the_best(data, tmp_path):
    first = run(stops(data, tmp_path)).ended
    there = folders(tmp_path)
    again = run(stops(data, tmp_path))
    assert (again.ended["why"], again.ended["model_step"]) == ("early_stop", first["model_step"])
    assert again.saves == again.evaluations == []
    assert folders(tmp_path) == there
    more = run(stops(data, tmp_path, eval_dot_patience=5))
    assert any(f"of the best step, {first['model_step']}" in note for note in more.notes)
    assert more.ended["step"] > first["step"]
    assert more.ended["model_step"] == best_of(more)["step"] or more.ended["kept_value"] == first["kept_value"]


def test_the_last_checkpoint_is_replaced_where_the_step_has_one_already(data, tmp_path):
    """Every step has a checkpoint before the evaluation that ends the run."""
    told = run(stops(data, tmp_path, eval_dot_every_steps=0, eval_dot_patience=2, out_dot_every_steps=1))
    end = told.ended
    assert end["why"] == "early_stop"
    kept, last = (tmp_path / f"ckpt-{end[name]:08d}" for name in ("kept_step", "step"))
    assert (kept / "dense.safetensors").read_bytes() == (last / "dense.safetensors").read_bytes()
    assert not told.notes


def test_a_run_that_does_not_stop_early_says_where_the_best_is(data, tmp_path):
    steps = run(stops(data, tmp_path / "stopped")).ended["step"]
    end = run(stops(data, tmp_path / "run", eval_dot_patience=1000, train_dot_max_steps=steps)).ended
    assert (end["why"], end["model_step"]) == ("max_steps", steps)
    assert f"the one from step {end['kept_step']}, the best" in summary(end)
    assert folders(tmp_path / "run") == [f"ckpt-{end['kept_step']:08d}", f"ckpt-{steps:08d}"]


def test_without_a_folder_the_end_says_that_the_model_is_the_last(data):
    told = run(stops(data, None))
    assert (told.ended["why"], told.ended["kept_step"]) == ("early_stop", None)
    assert "the model is from the last step" in summary(told.ended)


def test_without_patience_no_checkpoint_is_written_for_an_evaluation(data, tmp_path):
    told = run(stops(data, tmp_path, eval_dot_patience=0, train_dot_epochs=1, out_dot_every_steps=0))
    assert (told.saves, told.ended["kept_step"]) == ([32], None)


def test_a_damaged_best_checkpoint_is_told_and_the_model_stays_the_last(data, tmp_path):
    step = run(stops(data, tmp_path / "other")).ended["kept_step"]

    def damage(at):
        if at == step + 20:
            path = tmp_path / "run" / f"ckpt-{step:08d}" / "dense.safetensors"
            path.write_bytes(path.read_bytes()[:-9] + b"x" + path.read_bytes()[-8:])

    told = run(stops(data, tmp_path / "run"), Told(damage))
    assert (told.ended["why"], told.ended["model_step"]) == ("early_stop", told.ended["step"])
    assert any("dense.safetensors is damaged" in note and "model of the last step" in note for note in told.notes)


# --- parameter servers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False], ids=["with a directory", "without"])
def test_rows_on_servers_are_those_of_the_best_step_where_they_can_be_kept(data, tmp_path, durable):
    pytest.importorskip("zmq")
    from shoal.sharded.ps import Engine, ParameterServer, Shard

    engine = Engine(Shard(0, 1), "checkpoint", tmp_path / "ps") if durable else Engine(Shard(0, 1))
    with ParameterServer(engine) as server:
        config = stops(data, tmp_path / "run", train_dot_ps=[server.address])
        told = run(config)
        best, end = best_of(told), told.ended
        assert end["why"] == "early_stop"
        assert end["model_step"] == (best["step"] if durable else end["step"])
        with open_run(config)[0] as one:
            assert (one.evaluate()["auc"] == best["auc"]) == durable
    if durable:
        kept = {path.name.rpartition("-")[2] for path in (tmp_path / "ps").rglob("kept-*")}
        assert {str(best["step"]), f"{end['step']}_best"} <= kept
        assert len(kept) <= 3  # servers release kept rows when the next ones are kept
    else:
        assert any("have not kept the rows of the best step" in note for note in told.notes)


# --- two ranks --------------------------------------------------------------------------------------------------------


def stop_early(rank, world, *, data, out):
    told = Told()
    config = stops(data, out, table_dot_lr=3.0, eval_dot_every_steps=4)
    with trainer(config, reporter=told) as one:
        one.reporter = told  # also on the rank that prints nothing
        one.run()
        after = one.evaluate()["auc"]
    return told.evaluations, told.ended, after


@pytest.mark.timeout(600)
def test_all_ranks_go_back_to_the_best_step(data, tmp_path):
    for evaluations, end, after in run_ranks(2, stop_early, data=data, out=tmp_path, timeout_s=300):
        best = max(evaluations, key=lambda one: one["auc"])
        assert (end["why"], end["model_step"]) == ("early_stop", best["step"])
        assert after == best["auc"]
