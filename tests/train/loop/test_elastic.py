"""Runs that are resumed by more or fewer ranks: rows, metrics and positions are redistributed (processes)."""

import pytest
import torch

from shoal.data import CriteoLike, write_criteo
from shoal.testing import run_ranks
from shoal.train.loop.trainer import trainer
from tests.train.loop.helpers import Told, settings

ROWS, EPOCHS, BATCH = 2000, 2, 64


@pytest.fixture(scope="module")
def one_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elastic")
    write_criteo(folder / "train.tsv", CriteoLike(rows=ROWS, seed=1, scale=0.001))
    return folder


def learnt(rank, world, *, data, out, steps, part_bytes=None):
    """Trains up to ``steps``; the samples of this rank by epoch, what it said, and how it ended."""
    config = settings(
        data, out, train_dot_batch_size=BATCH, train_dot_max_steps=steps, train_dot_epochs=EPOCHS,
        data_dot_shuffle_rows=256, **({} if part_bytes is None else {"data_dot_options": {"part_bytes": part_bytes}}),
    )  # fmt: skip
    told, seen = Told(), {}
    with trainer(config, reporter=told) as one:
        learn = one.learner.learn

        def recorded(parts, step):
            def each():
                for samples in parts:
                    if samples:
                        # hashes the 26 ids of a sample into one number, which identifies its line in the file
                        lines = (samples.ids.view(len(samples), -1) * torch.arange(1, 27)).sum(1).tolist()
                        seen.setdefault(one.at.epoch, []).extend(lines)
                    yield samples

            return learn(each(), step)

        one.learner.learn = recorded
        ended = one.run()
    return seen, told.notes, {name: ended[name] for name in ("step", "samples", "why", "rows")}


def all_together(parts, into):
    for seen, _, _ in parts:
        for epoch, lines in seen.items():
            into.setdefault(epoch, []).extend(lines)


def test_every_sample_is_learnt_once_in_each_epoch_however_many_ranks_there_are(one_file, tmp_path):
    learnt_by_epoch, notes = {}, []
    for world, steps in ((3, 4), (2, 8), (1, 20), (3, 10_000)):
        parts = run_ranks(world, learnt, data=one_file, out=tmp_path, steps=steps, timeout_s=300)
        all_together(parts, learnt_by_epoch)
        notes += parts[0][1]
        assert all(ended == parts[0][2] for _, _, ended in parts)
    expected = {}
    all_together(run_ranks(1, learnt, data=one_file, out=tmp_path / "alone", steps=10_000), expected)
    assert {epoch: sorted(lines) for epoch, lines in learnt_by_epoch.items()} == {
        epoch: sorted(lines) for epoch, lines in expected.items()
    }
    assert parts[0][2]["samples"] == EPOCHS * ROWS
    assert [note.partition(" rank(s) and this run has ")[2][:1] for note in notes if "rank(s)" in note] == [
        "2", "1", "3"
    ]  # fmt: skip
