"""`shoal demo`: its stream, numbers, files and options."""

import json
import subprocess

import pytest
import torch

from shoal.cli.main import main
from shoal.demo.run import auc, compare
from shoal.demo.stream import FIELDS, StreamConfig, stream
from shoal.fid import slot_v2
from shoal.testing.commands import Command

SMALL = StreamConfig(days=6, batches_per_day=8, batch_size=256, users=2000, items=2000, seed=3)


def test_auc_counts_pairs():
    scores, labels = torch.rand(60).mul(20).round(), (torch.rand(60) > 0.4).float()
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[labels == 1].tolist() for b in scores[labels == 0].tolist()]
    assert auc(scores, labels) == pytest.approx(sum(pairs) / len(pairs))
    assert auc(torch.arange(4.0), torch.ones(4)) != auc(torch.arange(4.0), torch.ones(4))  # NaN: there are no pairs


def test_equal_seeds_give_equal_streams_and_others_do_not():
    def first(seed):
        config = StreamConfig(days=1, batches_per_day=2, batch_size=64, users=500, items=500, seed=seed)
        return next(iter(stream(config)))

    one, same, other = first(1), first(1), first(2)
    assert torch.equal(one.clicks, same.clicks)
    assert all(torch.equal(one.ids[name][0], same.ids[name][0]) for name in FIELDS)
    assert not torch.equal(one.ids["user"][0], other.ids["user"][0])


def test_the_vocabulary_grows_and_old_ids_fade():
    batches = list(stream(SMALL))
    assert len(batches) == 48
    early = {int(i) for batch in batches[:8] for i in batch.ids["item"][0]}
    late = {int(i) for batch in batches[-8:] for i in batch.ids["item"][0]}
    assert len(late - early) > 0.8 * len(late)
    for batch in batches:
        for slot, (name, (values, offsets)) in enumerate(batch.ids.items(), start=1):
            assert name == FIELDS[slot - 1]
            assert set(slot_v2(values).tolist()) <= {slot}
            assert (offsets[0], offsets[-1], len(offsets)) == (0, len(values), 257)


def test_clicks_follow_their_probabilities():
    batches = list(stream(SMALL))
    clicks = torch.cat([batch.clicks for batch in batches])
    probabilities = torch.cat([batch.probabilities for batch in batches])
    assert abs(float(clicks.mean() - probabilities.mean())) < 0.02


@pytest.mark.timeout(400)
def test_the_comparison_is_fair_and_repeatable():
    first, second = compare(SMALL), compare(SMALL)
    ours, theirs = first.results
    assert [result.auc for result in first.results] == [result.auc for result in second.results]
    assert ours.memory_bytes <= theirs.memory_bytes <= ours.memory_bytes + 16384
    assert theirs.rows[-1] > ours.rows[-1] * 0.9  # without an index, the same memory holds at least as many rows
    assert first.ids == sorted(first.ids)
    assert first.ids[-1] > 1.2 * ours.rows[-1]  # the rows of expired ids were removed
    best = first.mean_auc(first.best_auc)
    assert 0.5 < first.mean_auc(ours.auc) < best < 0.95


@pytest.mark.timeout(400)
def test_the_command_writes_a_picture_and_prints_a_table(tmp_path, capsys):
    assert main(["demo", "--quick", "--seed", "1", "--out", str(tmp_path / "a" / "b")]) == 0
    picture = (tmp_path / "a" / "b" / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    out = capsys.readouterr().out
    assert "best reachable" in out
    assert "shoal.HashTable" in out
    assert "points of AUC" in out


@pytest.mark.timeout(400)
def test_json_is_all_of_stdout(tmp_path):
    given = ("demo", "--quick", "--json", "--out", tmp_path)
    with Command(*given, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        out, err = command.communicate(300)
    assert command.returncode == 0, err
    report = json.loads(out)
    assert report == json.loads((tmp_path / "demo.json").read_text())
    assert [table["name"] for table in report["tables"]] == ["shoal.HashTable", "nn.EmbeddingBag, hashed"]
    assert report["best_reachable_auc"] > report["tables"][0]["auc"]
    assert "Warning" not in err


def test_wrong_usage_is_one_line_and_an_exit_code(tmp_path, capsys):
    assert main(["demo", "--seconds", "1"]) == 2
    assert "--seconds must be in 5..3600, got 1" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["demo", "--quick", "--out", str(tmp_path / "file" / "x")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main(["demo", "--nonsense"]) == 2
    assert main(["demo", "--help"]) == 0
    assert "Example: shoal demo" in capsys.readouterr().out
