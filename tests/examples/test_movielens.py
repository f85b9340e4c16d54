"""The MovieLens example, on a small generated file of the same format."""

import json
import random
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "movielens.py"
HEADING = "user_id:token\titem_id:token\trating:float\ttimestamp:float"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(SCRIPT))


def ratings(users=150, movies=80, each=30):
    """Users with a taste that they show in their first ratings; a few join every day."""
    draw = random.Random(1)
    lines = []
    for user in range(users):
        taste, start = draw.choice((0, 1)), 880_000_000 + user * 86400 // 2
        for k in range(each):
            movie = draw.randrange(movies)
            stars = draw.choice((4, 5) if (movie % 2 == taste) == (draw.random() < 0.9) else (1, 2, 3))
            lines.append(f"{user}\t{movie}\t{stars}\t{start + k * 60}")
    draw.shuffle(lines)
    return lines


@pytest.mark.timeout(400)
def test_it_runs_as_a_program_and_finds_both_effects(tmp_path):
    data = tmp_path / "ml-100k.inter"
    data.write_text("\n".join([HEADING, *ratings()]) + "\n")
    command = [sys.executable, str(SCRIPT), "--data", str(data), "--seeds", "1", "--epochs", "6"]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "4,500 ratings, 230 ids" in done.stdout
    assert "| hashed, equal memory |" in done.stdout
    found = json.loads((tmp_path / "out" / "movielens.json").read_text())
    (collided,), (aged,) = found["collisions"], found["freshness"]
    assert collided["a row per id"]["auc"][-1] > collided["1/4"]["auc"][-1]
    assert collided["1/4"]["shared"] > collided["5x memory"]["shared"]
    assert aged["every batch"]["auc"] > aged["1 week"]["auc"]
    for name in ("collisions", "freshness"):
        assert (tmp_path / "out" / f"movielens_{name}.png").read_bytes().startswith(b"\x89PNG")


def test_all_forms_of_the_data_read_alike_and_come_sorted_by_time(example, tmp_path):
    lines = ratings(users=3, movies=5, each=4)
    plain, headed = tmp_path / "u.data", tmp_path / "ml-100k.inter"
    plain.write_text("\n".join(lines))
    headed.write_text("\n".join([HEADING, *lines]))
    with zipfile.ZipFile(tmp_path / "ml-100k.zip", "w") as archive:
        archive.write(plain, "ml-100k/u.data")
    first = example["load"](plain)
    assert (first.time_s.diff() >= 0).all()
    for path in (headed, tmp_path / "ml-100k.zip"):
        other = example["load"](path)
        assert torch.equal(other.ids, first.ids)
        assert torch.equal(other.liked, first.liked)
    assert len(torch.unique(first.ids)) == len(torch.unique(first.ids[:, 0])) + len(torch.unique(first.ids[:, 1]))


def test_a_broken_line_is_named(example, tmp_path):
    path = tmp_path / "u.data"
    path.write_text("1\t2\t3\t4\nnonsense\n")
    with pytest.raises(SystemExit, match=r"line 2: not a rating: 'nonsense'"):
        example["load"](path)
    path.write_text("")
    with pytest.raises(SystemExit, match="no ratings"):
        example["load"](path)


def test_the_last_fifth_is_taken_per_user_and_by_time(example):
    user = torch.tensor([1, 2, 1, 1, 2, 1, 1])
    data = example["Ratings"](torch.stack([user, user], 1), torch.zeros(7), torch.arange(7))
    assert example["last_fifth"](data).tolist() == [False, False, False, False, False, False, True]
