"""`shoal train` with the mistakes of a first try: wrong data, other files, split flags; admission and evaluation."""

import subprocess
import sys

import pytest

from shoal.cli.main import main
from tests.cli.train_helpers import DEADLINE_S, SMALL, command, events, newest, of, rows_of, run, unstamped


def test_other_files_are_read_from_their_beginning(capsys, data, tmp_path):
    first = run(capsys, data, "--out", tmp_path)
    argv = ["train", "--train", str(data / "eval.tsv"), "--json", *SMALL, "--out", str(tmp_path)]
    assert main(argv) == 0
    told = events(capsys.readouterr().out)
    assert "was reading other files" in of("note", told)[0]["text"]
    assert told[-1]["samples"] == 14_000
    assert told[-1]["rows"] > first[-1]["rows"]
    assert main(argv) == 0  # these flags are known now
    assert events(capsys.readouterr().out)[-1]["samples"] == 14_000


def test_an_id_gets_a_row_when_it_came_often_enough_and_counts_outlive_a_checkpoint(capsys, data, tmp_path):
    every = run(capsys, data)[-1]["rows"]
    for name in ("a", "b"):
        if name == "b":
            run(capsys, data, "--out", tmp_path / "b", "--max-steps", 20, "--set", "table.admit_after=2")
        rows = run(capsys, data, "--out", tmp_path / name, "--set", "table.admit_after=2")[-1]["rows"]
        assert 0 < rows < every / 2
    a, b = newest(tmp_path / "a"), newest(tmp_path / "b")
    assert unstamped(rows_of(a)) == unstamped(rows_of(b))
    assert (a / "dense.safetensors").read_bytes() == (b / "dense.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("text", "more", "code", "says"),
    [
        ("5,1,u\n1,1,v\n", [], 2, "labels must be between 0 and 1, got 5; set positive_above"),
        ("-1,1,u\n1,1,v\n", [], 2, "got -1"),
        ("5,1,u\n1,1,v\n", ["data.positive_above=3"], 0, ""),
        ("x,1,u\ny,1,v\n", [], 1, "there are no samples that can be read"),
        (
            "1,1e30,u\n0,1e30,v\n" * 50,
            ["train.optimizer=sgd", "train.lr=1e30", "train.batch_size=9"],
            1,
            "the loss must be finite, got",
        ),
    ],
)
def test_labels_and_numbers_that_cannot_be_learnt_are_told(capsys, tmp_path, text, more, code, says):
    (tmp_path / "a.csv").write_text("y,a,u\n" + text)
    shell = ["train", "--train", str(tmp_path / "a.csv"), "--format", "csv", "--threads", "1"]
    for one in ("data.label=y", 'data.dense=["a"]', 'data.sparse=["u"]', *more):
        shell += ["--set", one]
    assert main(shell) == code
    assert says in capsys.readouterr().err


def test_a_list_of_values_may_be_given_in_pieces(capsys, data):
    argv = ["train", "--train", str(data / "train.tsv"), "--train", str(data / "eval.tsv"), "--json"]
    for one in SMALL[1:4]:
        argv += ["--set", one]
    assert main([*argv, *SMALL[4:]]) == 0
    told = events(capsys.readouterr().out)
    assert (of("start", told)[0]["files"], told[-1]["samples"]) == (2, 14_000)


def test_an_evaluation_without_an_auc_is_never_the_best(capsys, data, tmp_path):
    (tmp_path / "zero.tsv").write_text(
        "".join("0" + line[1:] for line in (data / "eval.tsv").read_text().splitlines(keepends=True))
    )
    told = run(capsys, data, "--eval", tmp_path / "zero.tsv", "--eval-steps", 5, "--patience", 3)
    assert told[-1]["why"] == "early_stop"
    assert told[-1]["best"] is None
    assert [one["is_best"] for one in of("eval", told)] == [False] * 3
    told = run(capsys, data, "--eval", data / "eval.tsv", "--set", "eval.metric=logloss")
    assert told[-1]["best"] == of("eval", told)[0]["logloss"] > 0


@pytest.mark.timeout(600)
def test_a_rank_that_loses_another_says_so_in_a_line(data, tmp_path):
    lines = (data / "train.tsv").read_text().splitlines()
    (tmp_path / "bad.tsv").write_text("\n".join([*lines[:6000], "bad", *lines[6000:]]))
    shell = [sys.executable, "-m", "shoal", "launch", "-n", "2", "-m", "shoal", *command(tmp_path)[3:], "--strict"]
    shell[shell.index(str(tmp_path / "train.tsv"))] = str(tmp_path / "bad.tsv")
    done = subprocess.run(shell, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "bad.tsv, line 6001" in said
    assert "Traceback" not in said
