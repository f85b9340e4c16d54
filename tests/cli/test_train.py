"""`shoal train` as a user runs it: in one process, interrupted, killed, on two ranks."""

import importlib
import json
import random
import re
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

import shoal
from shoal import _core
from shoal.cli.main import main
from shoal.table import restore_incremental
from shoal.testing.commands import Command
from shoal.train.loop.guard.rollback import running
from shoal.train.loop.trainer import trainer
from shoal.trainer import load_config
from tests.cli.train_helpers import (
    DEADLINE_S,
    SMALL,
    command,
    events,
    kill_after,
    newest,
    of,
    rows_of,
    run,
    same_checkpoint,
)


def test_it_learns_evaluates_and_leaves_a_checkpoint(capsys, data, tmp_path):
    told = run(
        capsys, data, "--eval", data / "eval.tsv", "--epochs", 2, "--out", tmp_path, "--log-steps", 20,
        "--checkpoint-steps", 20, "--keep", 2,
    )  # fmt: skip
    end = told[-1]
    assert (end["event"], end["why"], end["samples"], end["epoch"]) == ("end", "finished", 24_000, 2)
    assert end["rows"] > 1000
    assert end["auc"] > 0.6
    evaluations = of("eval", told)
    assert [one["step"] for one in evaluations] == [47, 94]
    assert evaluations[0]["samples"] == 2000
    assert evaluations[0]["auc"] > 0.65
    assert len(of("checkpoint", told)) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-00000080", "ckpt-00000094"]
    progress = of("progress", told)[-1]
    assert {"auc", "window_auc", "logloss", "calibration", "samples_per_s", "rows", "resident_bytes"} <= progress.keys()
    table = shoal.HashTable(8, optimizer=shoal.Adagrad(), name="features")
    assert restore_incremental(table, tmp_path).step == 94
    assert table.size() == end["rows"]
    again = run(capsys, data, "--eval", data / "eval.tsv", "--epochs", 2, "--out", tmp_path)
    assert again[-1]["samples"] == 24_000
    assert of("start", again)[0]["resumed"].endswith("ckpt-00000094")


def test_equal_runs_end_in_equal_bits_and_so_do_those_that_were_interrupted(capsys, data, tmp_path):
    for name in ("a", "b"):
        run(capsys, data, "--out", tmp_path / name, "--set", "model.dropout=0.1", "out.every_s=0")
    for steps in (13, 26):
        told = run(capsys, data, "--out", tmp_path / "c", "--max-steps", steps, "--set", "model.dropout=0.1")
        assert told[-1]["why"] == "max_steps"
    run(capsys, data, "--out", tmp_path / "c", "--set", "model.dropout=0.1")
    a, b, c = (newest(tmp_path / name) for name in "abc")
    started = {json.loads((p / "manifest.json").read_text())["content"]["progress"]["started_s"] for p in (a, b, c)}
    if len(started) == 1:  # rows are stamped with the second in which a run began
        same_checkpoint(a, b)
        same_checkpoint(a, c)
    for name in ("dense.safetensors", "rank-00000.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes() == (c / name).read_bytes()


SEVERAL = (
    '[table.features.C3]\ndim = 4\noptimizer = "adam"\nexpire_after = "30d"\n[table.features.C4]\ntable = "C3"\n'
    "[table.features.C7]\nadmit_after = 1\nadmit_capacity = 1000\n"
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tables", ["", SEVERAL], ids=["one table", "several"])
def test_a_run_that_was_killed_goes_on_to_the_same_bits(data, tmp_path, tables):
    """kill -9 at a random moment between two checkpoints, or within one; rows are stamped with a time of the data."""
    lines = (data / "train.tsv").read_text().splitlines()
    timed = tmp_path / "timed.tsv"
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)), "time"]
    timed.write_text("\n".join(["\t".join(names), *(f"{line}\t{1_700_000_000 + i}" for i, line in enumerate(lines))]))
    model = "dcn" if tables else "deepfm"
    config = tmp_path / "run.toml"
    config.write_text(
        f'[data]\ntrain = ["timed.tsv"]\nformat = "tsv"\nlabel = "label"\ntime = "time"\nshuffle_rows = 1000\n'
        "log_dense = true\n"
        f"dense = {json.dumps(names[1:14])}\nsparse = {json.dumps(names[14:40])}\n[table]\ndim = 8\n"
        f'{tables}[model]\nname = "{model}"\nhidden = [16]\ndropout = 0.1\n'
        "[train]\nbatch_size = 64\nthreads = 1\n"
        "[out]\nevery_steps = 10\nlog_steps = 1\n"
    )
    assert main(["train", str(config), "--out", str(tmp_path / "whole"), "--json"]) == 0
    out = tmp_path / "killed"
    shell = [sys.executable, "-m", "shoal", "train", str(config), "--out", str(out), "--json"]
    kill_after(shell, "checkpoint", 10 * random.randint(1, 12), random.random() * 0.05)
    assert int(newest(out).name.split("-")[1]) < 188
    assert main(["train", str(config), "--out", str(out), "--json"]) == 0
    same_checkpoint(newest(tmp_path / "whole"), newest(out))


@pytest.mark.timeout(900)
def test_ctrl_c_leaves_a_checkpoint_and_ends_with_130(data, tmp_path):
    shell = command(data, "--out", tmp_path / "run", "--epochs", 500, "--log-steps", 5)
    process = subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "interrupted; run the same command to resume from the checkpoint" in out
    assert "Traceback" not in err
    assert "\x1b" not in out + err  # no colour outside a terminal
    assert newest(tmp_path / "run").exists()


def test_a_run_of_several_tables_says_what_they_are_and_hold(capsys, data, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(
        f'[data]\ntrain = ["{data / "train.tsv"}"]\n[table]\ndim = 8\n{SEVERAL}[model]\nname = "dcn"\nhidden = [16]\n'
        "[train]\nbatch_size = 256\nthreads = 1\nmax_steps = 2\n"
    )
    assert main(["train", str(config)]) == 0
    said = capsys.readouterr()
    assert "table features: 23 features, C1 to C26, dim 8, adagrad, 0 rows\n" in said.err
    assert "table features.C3: C3, C4, dim 4, adam, 0 rows\n" in said.err
    assert re.search(r"\ntables: features [\d,]+ rows \d+ MiB; features.C3 [\d,]+ rows \d+ MiB; features.C7", said.out)
    assert main(["train", str(config), "--model", "deepfm"]) == 2
    assert "dim 4: C3, C4; dim 8: C1, C2, C5" in capsys.readouterr().err
    assert main(["train", str(config), "--set", "train.hooks=my_missing:Hook"]) == 2
    assert "[train] hooks: there is no module 'my_missing'" in capsys.readouterr().err


def test_bad_rows_are_counted_shown_once_and_stop_a_strict_run(capsys, data, tmp_path):
    path = tmp_path / "bad.tsv"
    lines = (data / "train.tsv").read_text().splitlines()[:600]
    lines[41] = "what?"
    lines[300] = lines[300].replace("\t", "\tx", 1)
    path.write_text("\n".join(lines))
    assert main(["train", "--train", str(path), *SMALL]) == 0
    said = capsys.readouterr()
    assert said.err.count("bad row skipped") == 1
    assert f"{path}, line 42: column 1 is the label" in said.err
    assert "2 bad rows" in said.out
    assert main(["train", "--train", str(path), "--strict", *SMALL]) == 1
    said = capsys.readouterr()
    assert f"shoal train: {path}, line 42" in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("name", "content", "more", "says"),
    [
        ("none.tsv", b"", [], "there are no samples, because DIR/none.tsv is empty"),
        ("none.parquet", b"", ["--format", "parquet"], "none.parquet is empty"),
        ("head.csv", b"y,u\n", ["--format", "csv"], "there are no samples in DIR/head.csv"),
        ("bad.csv", b"y,u\nx,1\nx,2\n", ["--format", "csv"], "line 2: column 1 is the label and must be a number"),
        ("cut.parquet", b"", ["--format", "parquet"], "DIR/cut.parquet, row 1: the file is damaged"),
    ],
    ids=["empty", "empty parquet", "a header alone", "bad rows alone", "truncated parquet"],
)  # fmt: skip
def test_files_without_a_sample_end_with_1_and_leave_no_checkpoint(capsys, tmp_path, name, content, more, says):
    path, out = tmp_path / name, tmp_path / "run"
    path.write_bytes(content)
    if name == "cut.parquet":
        table = pytest.importorskip("pyarrow").table({"y": [0, 1] * 500, "u": ["a", "b"] * 500})
        importlib.import_module("pyarrow.parquet").write_table(table, path)
        path.write_bytes(path.read_bytes()[:-100])
    argv = ["train", "--train", str(path), "--out", str(out), "--threads", "1", *more]
    if more:
        argv += ["--set", "data.label=y", 'data.sparse=["u"]']
    assert main(argv) == 1
    assert says.replace("DIR", str(tmp_path)) in capsys.readouterr().err
    assert not out.exists() or not list(out.iterdir())


def test_an_empty_file_among_others_is_named_and_an_empty_evaluation_refused(capsys, data, tmp_path):
    (tmp_path / "none.tsv").write_text("")
    told = run(capsys, data, "--train", tmp_path / "none.tsv", "--max-steps", 1)
    assert of("note", told)[0]["text"] == f"[data] train: {tmp_path / 'none.tsv'} is empty"
    argv = ["train", "--train", str(data / "train.tsv"), "--eval", str(tmp_path / "none.tsv"), *SMALL]
    assert main(argv) == 1
    assert "[data] eval: there are no samples" in capsys.readouterr().err


def test_an_out_folder_that_cannot_be_written_is_told_in_a_line(capsys, data, tmp_path):
    (tmp_path / "file").write_text("")
    argv = ["train", "--train", str(data / "train.tsv"), *SMALL, "--max-steps", "1"]
    assert main([*argv, "--out", str(tmp_path / "file" / "run")]) == 2
    said = capsys.readouterr().err
    assert "Not a directory" in said
    assert "Traceback" not in said


def test_early_stopping_ends_when_nothing_gets_better(capsys, data):
    told = run(
        capsys, data, "--eval", data / "eval.tsv", "--epochs", 50, "--patience", 2, "--set", "table.lr=0.5"
    )  # fmt: skip
    assert told[-1]["why"] == "early_stop"
    best = max(one["auc"] for one in of("eval", told))
    assert best == pytest.approx(told[-1]["best"])
    assert [one["auc"] < best for one in of("eval", told)][-2:] == [True, True]


def test_a_checkpoint_of_another_configuration_is_refused(capsys, data, tmp_path):
    run(capsys, data, "--out", tmp_path, "--max-steps", 2)
    assert main(["train", "--train", str(data / "train.tsv"), "--out", str(tmp_path), *SMALL, "--dim", "4"]) == 2
    assert "table.dim = 8, the configuration has 4" in capsys.readouterr().err


def test_fresh_moves_the_checkpoints_aside_as_the_refusal_says(capsys, data, tmp_path):
    out = tmp_path / "run"
    run(capsys, data, "--out", out, "--max-steps", 4, "--checkpoint-steps", 2)
    (out / "ckpt-00000002" / "manifest.json").unlink()
    files = {path.name: path.read_bytes() for path in (out / "ckpt-00000004").iterdir()}
    argv = ["train", "--train", str(data / "train.tsv"), "--out", str(out), *SMALL, "--max-steps", "1", "--dim", "4"]
    assert main(argv) == 2
    assert "start over with --fresh (which moves the checkpoints aside)" in capsys.readouterr().err
    assert main([*argv, "--fresh"]) == 0
    said = capsys.readouterr().err
    (aside,) = out.glob("before-*")
    assert f"the checkpoints of {out} were moved to {aside}" in said
    assert re.fullmatch(r"before-\d{8}-\d{6}", aside.name)
    assert sorted(path.name for path in out.iterdir()) == [aside.name, "ckpt-00000001"]
    assert sorted(path.name for path in aside.iterdir()) == ["ckpt-00000002", "ckpt-00000004"]
    assert {path.name: path.read_bytes() for path in (aside / "ckpt-00000004").iterdir()} == files
    resumed = run(capsys, data, "--out", aside, "--max-steps", 4)  # nothing was lost
    assert of("start", resumed)[0]["step"] == 4
    assert main([*argv, "--fresh"]) == 0  # the second time, another name is used
    assert len(list(out.glob("before-*"))) == 2
    run(capsys, data, "--out", tmp_path / "new", "--max-steps", 1, "--fresh")  # works if there is nothing to move
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["ckpt-00000001"]


def test_fresh_can_begin_with_the_rows_of_the_checkpoints_that_it_moves_aside(capsys, data, tmp_path):
    run(capsys, data, "--out", tmp_path, "--max-steps", 2)
    told = run(capsys, data, "--out", tmp_path, "--max-steps", 1, "--fresh", "--init-from", tmp_path)
    notes = "\n".join(one["text"] for one in of("note", told))
    assert f"begins with rows and weights of {tmp_path}/ckpt-00000002, step 2" in notes
    assert of("start", told)[0]["tables"][0]["rows"] > 0
    capsys.readouterr()
    argv = ["train", "--train", str(data / "train.tsv"), *SMALL, "--out", str(tmp_path), "--fresh"]
    assert main([*argv, "--init-from", str(data)]) == 2
    assert newest(tmp_path).name == "ckpt-00000001"  # nothing is moved if the run cannot begin


def test_two_runs_cannot_use_one_folder(capsys, data, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.train.loop.saving._ENDING_S", 0.1)
    argv = ["train", "--train", str(data / "train.tsv"), *SMALL, "--out", str(tmp_path), "--max-steps", "1"]
    with running(str(tmp_path)):
        assert main(argv) == 2
    assert f"another run uses '{tmp_path}'; stop it first, or set another folder (--out)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(argv) == 0


class Linear(nn.Module):
    """A model of the user's own."""

    def __init__(self, inputs, *, bias=0.0):
        super().__init__()
        self.dense = nn.Linear(len(inputs.dense), 1)
        self.bias = bias

    def forward(self, dense, rows):
        return self.dense(dense).squeeze(1) + rows.sum((1, 2)) + self.bias


class Wrong(Linear):
    def forward(self, dense, rows):
        return super().forward(dense, rows).unsqueeze(1)


def test_a_model_of_ones_own_is_found_by_its_path(capsys, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_models", sys.modules[__name__])
    shell = ["train", "--train", str(data / "train.tsv"), "--json", "--max-steps", "2", "--threads", "1", "--set"]
    assert main([*shell, "model.bias=-1.0", "--model", "my_models:Linear"]) == 0
    assert events(capsys.readouterr().out)[-1]["samples"] == 8192
    assert main([*shell, "model.bias=-1.0", "--model", "my_models:Wrong"]) == 2
    assert "forward must return logits of shape [4096], got [4096, 1]" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["dlrm", "dcn"])
def test_other_models_learn_too(capsys, data, model):
    told = [
        json.loads(line)
        for line in _out(capsys, data, "--model", model, "--dim", 8, "--batch-size", 256, "--threads", 1)
    ]
    assert told[-1]["auc"] > 0.6


def _out(capsys, data, *more):
    assert main(["train", "--train", str(data / "train.tsv"), "--json", *map(str, more)]) == 0
    return capsys.readouterr().out.splitlines()


def test_many_ids_a_feature_are_pooled(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(
        "y,user,tags\n" + "".join(f"{i % 2},u{i % 5},{'red|' if i % 2 else ''}t{i % 3}\n" for i in range(4000))
    )
    config = load_config(None, {
        "data.train": [str(path)], "data.format": "csv", "data.label": "y", "data.sparse": ["user", "tags"],
        "data.separator": "|", "train.batch_size": 100, "table.dim": 4, "table.combiner": "mean",
        "model.hidden": [8], "train.threads": 1,
    })  # fmt: skip
    with trainer(config) as one:
        result = one.run()
        assert result["window_auc"] > 0.9  # "red" determines the label
        assert result["rows"] == 5 + 4


def test_tensorboard_gets_the_metrics(capsys, data, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(capsys, data, "--tensorboard", tmp_path, "--log-steps", 10, "--eval", data / "eval.tsv")
    read = EventAccumulator(str(tmp_path)).Reload()
    assert {"train/auc", "train/logloss", "train/rows", "eval/auc"} <= set(read.Tags()["scalars"])
    assert [one.step for one in read.Scalars("train/auc")] == [10, 20, 30, 40]


@pytest.mark.timeout(900)
def test_two_ranks_share_the_work_and_go_on_from_their_checkpoint(data, tmp_path):
    pytest.importorskip("tensorboard")
    shell = ["launch", "-n", "2", "-m", "shoal", *command(data)[3:]]
    more = ["--out", str(tmp_path / "run"), "--json", "--log-steps", "5", "--eval", str(data / "eval.tsv")]
    more += ["--tensorboard", str(tmp_path / "board")]

    def launch(*extra):
        with Command(*shell, *more, *extra, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launched:
            out, err = launched.communicate(DEADLINE_S)
        assert launched.returncode == 0, err[-3000:]
        return [json.loads(line.split("] ", 1)[1]) for line in out.splitlines() if line.startswith("[rank")]

    first = launch("--max-steps", "10")
    assert first[-1]["samples"] == 10 * 2 * 256
    rest = launch()
    assert of("start", rest)[0]["step"] == 10
    assert (rest[-1]["samples"], rest[-1]["why"]) == (12_000, "finished")
    assert of("eval", rest)[0]["samples"] == 2000
    assert of("eval", rest)[0]["auc"] > 0.6
    manifest = json.loads((newest(tmp_path / "run") / "manifest.json").read_text())
    assert manifest["content"]["world"] == 2
    assert manifest["content"]["tables"][0]["rows"] == rest[-1]["rows"] == len(rows_of(newest(tmp_path / "run")))
    # One process loads the rows of both ranks, and reads from the beginning.
    config = load_config(None, {
        "data.train": [str(data / "train.tsv")], "model.hidden": [16], "data.shuffle_rows": 2048, "table.dim": 8,
        "table.lr": 0.05, "train.batch_size": 256, "train.threads": 1, "out.dir": str(tmp_path / "run"),
    })  # fmt: skip
    with trainer(config) as alone:
        assert alone.resumed is not None
        assert alone.rows.size() == rest[-1]["rows"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = EventAccumulator(str(tmp_path / "board")).Reload().Tags()
    assert "all_fids_size" in tags["scalars"]
    assert {"Alltoall_id_dist", "Alltoall_emb_dist"} <= set(tags["histograms"])


def test_a_new_user_gets_data_and_a_configuration(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.cli.train.INIT_ROWS", (8192, 1000))
    assert main(["train", "--init", str(tmp_path / "try")]) == 0
    assert "shoal train" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "try" / "criteo.toml"), "--threads", "1"]) == 0
    assert "finished" in capsys.readouterr().out
    assert main(["train", "--init", str(tmp_path / "try")]) == 2
    assert main(["train", "--generate", "criteo:1_00", str(tmp_path / "g.tsv.gz")]) == 0
    written = (tmp_path / "try" / "criteo.toml").read_text()
    capsys.readouterr()
    for made, path, says in (
        ("criteo:1_", "h.tsv", "must be criteo:N, such as criteo:1000000, got 'criteo:1_'"),
        ("criteo:²", "h.tsv", "must be criteo:N"),
        ("criteo:5", "try/criteo.toml", "must write to a file named .tsv or .tsv.gz, got"),
    ):
        assert main(["train", "--generate", made, str(tmp_path / path)]) == 2
        assert says in capsys.readouterr().err
    assert (tmp_path / "try" / "criteo.toml").read_text() == written


def test_the_example_is_what_init_writes():
    from pathlib import Path

    from shoal.cli.train import STARTER

    assert (Path(__file__).parents[2] / "examples" / "criteo.toml").read_text() == STARTER


def test_training_uses_the_threads_it_is_given(data):
    config = load_config(None, {"data.train": [str(data / "train.tsv")], "train.threads": 1, "train.max_steps": 1})
    with trainer(config) as one:
        one.run()
    assert (torch.get_num_threads(), _core.num_threads()) == (1, 1)
