"""`shoal table get --text`: rows of a run's checkpoint by raw value."""

import json

import pytest

from shoal.cli.main import main
from shoal.data.schema import text_fid


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    lines = [f"{n % 2},u{n % 50},{n % 7}" for n in range(600)]
    (folder / "train.csv").write_text("\n".join(["click,user,item", *lines]) + "\n")
    (folder / "c.toml").write_text(
        '[data]\nformat = "csv"\ntrain = ["train.csv"]\nlabel = "click"\n[features.user]\n[features.item]\n'
        '[features.pair]\nkind = "cross"\nof = ["user", "item"]\n'
        '[table]\ndim = 2\n[model]\nhidden = [4]\n[train]\nbatch_size = 64\n[out]\ndir = "out"\n'
    )
    assert main(["train", str(folder / "c.toml"), "--json"]) == 0
    return folder / "out"


def get(capsys, *argv):
    code = main(["table", "get", *map(str, argv)])
    got = capsys.readouterr()
    return code, got.out, got.err


def test_a_row_is_found_by_its_text(checkpoint, capsys):
    code, out, _ = get(capsys, checkpoint, "--text", "user=u17", "--json")
    (row,) = json.loads(out)
    assert (code, row["id"]) == (0, text_fid("u17", 1))
    newest = sorted(path for path in checkpoint.iterdir() if path.name.startswith("ckpt-"))[-1]
    assert get(capsys, newest, row["id"], "--json")[1] == out
    assert get(capsys, newest, "--text", "item=3")[0] == 0
    assert get(capsys, newest, "--text", "pair=u17,3")[0] == 0


def test_what_there_is_not_is_told(checkpoint, capsys, tmp_path):
    code, _, err = get(capsys, checkpoint, "--text", "user=nobody")
    assert (code, "(of user=nobody)" in err) == (1, True)
    for argv, text in [
        (("--text", "usr=u17"), "did you mean 'user'"), (("--text", "u17"), "FEATURE=VALUE"),
        (("--text", "pair=u17"), "pair' is a cross of user and item; give --text pair=USER,ITEM"),
        ((), "exactly one of ID and --text"), ((7, "--text", "user=u17"), "exactly one of ID and --text"),
    ]:  # fmt: skip
        code, _, err = get(capsys, checkpoint, *argv)
        assert (code, text in err) == (2, True), err
