"""Checkpoints with one damaged file: the previous complete one is used and named, or the run refuses to start.

First on one process, then checkpoints of version 0.1, then on two ranks.
"""

import random
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.data import CRITEO, Stream, make_format
from shoal.errors import DataError
from shoal.testing import run_ranks
from shoal.train.loop.trainer import trainer
from tests.cli.train_helpers import rows_of
from tests.train.loop.helpers import Told, folders, open_run, run, settings

GOLDEN = Path(__file__).parent / "golden"
ADMIT = {"table_dot_admit_after": 1, "table_dot_admit_capacity": 1000}  # so that there are files of a filter


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory):
    """A run with checkpoints of steps 8 and 16."""
    out = tmp_path_factory.mktemp("saved") / "run"
    run(settings(data, out, out_dot_every_steps=8, train_dot_max_steps=16, **ADMIT))
    assert folders(out) == ["ckpt-00000008", "ckpt-00000016"]
    return out


@pytest.fixture(scope="module")
def ids(data):
    stream = Stream([str(data / "train.tsv")], make_format("criteo", CRITEO), CRITEO, batch_size=4096)
    return next(iter(stream)).samples.ids.view(-1).unique()


def state(one, ids):
    """Everything that a checkpoint brings back, as bytes."""
    rows = [table.lookup(ids) for table in one.rows.tables.values()]
    tensors = [*one.model.state_dict().values(), *rows, torch.get_rng_state()]
    for _, values in sorted(one.optimizer.state_dict()["state"].items()):
        tensors += [torch.as_tensor(value) for _, value in sorted(values.items())]
    sliding = one.rows.local[0].hash_filter
    counts = [sliding.get_block(block).cells.tobytes() for block in range(sliding.split_num)]
    metrics = [array.tobytes() for _, array in sorted(one.metrics.state().items())]
    return [t.detach().numpy().tobytes() for t in tensors], counts, metrics, one.reader, one.at, one.rows.size()


def states(data, saved, tmp_path, ids):
    """Of the newest checkpoint and of the one before."""
    found = []
    for name in ("ckpt-00000016", "ckpt-00000008"):
        shutil.copytree(saved / name, tmp_path / "only" / name)
        with open_run(settings(data, tmp_path / "only", **ADMIT))[0] as one:
            found.append(state(one, ids))
        shutil.rmtree(tmp_path / "only")
    return found


def damages(content):
    """Some flipped bits and cuts of a file."""
    chance = random.Random(len(content))
    places = {0, len(content) // 2, len(content) - 1, *(chance.randrange(len(content)) for _ in range(12))}
    for place in sorted(places):
        yield f"bit of byte {place}", content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
    for size in sorted({0, 1, len(content) // 2, len(content) - 1} - {len(content)}):
        yield f"cut to {size}", content[:size]
    yield "longer", content + b"\0"


def test_any_damage_of_any_file_of_the_newest_checkpoint_is_named_and_the_one_before_is_used(
    data, saved, tmp_path, ids
):
    newest, before = states(data, saved, tmp_path, ids)
    out = tmp_path / "run"
    shutil.copytree(saved, out)
    config = settings(data, out, **ADMIT)
    folder = out / "ckpt-00000016"
    names = folders(folder)
    assert {"dense.safetensors", "rank-00000.safetensors", "manifest.json", "features-00000-of-00001"} < set(names)
    assert sum(name.startswith("filter-") for name in names) >= 7
    noticed = 0
    for name in names:
        content = (folder / name).read_bytes()
        for what, changed in damages(content):
            (folder / name).write_bytes(changed)
            one, told = open_run(config)
            with one as resumed:
                got = state(resumed, ids)
            if got == newest and name == "manifest.json":  # only white space was changed
                assert not told.notes, (name, what)
                continue
            assert got == before, (name, what)
            assert len(told.notes) == 1, (name, what)
            assert f"checkpoint {folder} is damaged: " in told.notes[0], (name, what)
            assert name in told.notes[0], (name, what)
            assert f"{out / 'ckpt-00000008'} is used instead" in told.notes[0]
            noticed += 1
        (folder / name).unlink()
        one, told = open_run(config)
        with one as resumed:
            assert state(resumed, ids) == before, name
        assert told.notes, name
        (folder / name).write_bytes(content)
    assert noticed > 150
    one, told = open_run(config)
    with one as resumed:
        assert (state(resumed, ids), told.notes) == (newest, [])


def test_where_no_checkpoint_is_whole_the_run_refuses_to_start_unless_it_is_fresh(data, saved, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(saved, out)
    config = settings(data, out, train_dot_max_steps=1, **ADMIT)
    (out / "ckpt-00000008" / "manifest.json").write_text("{")
    dense = out / "ckpt-00000016" / "dense.safetensors"
    content = bytearray(dense.read_bytes())
    content[-5] ^= 4
    dense.write_bytes(content)
    for _ in range(2):  # twice, because the first time must change nothing
        with pytest.raises(DataError) as caught:
            run(config)
        for part in ("no checkpoint in", "dense.safetensors is damaged", "manifest.json", "--fresh moves them aside"):
            assert part in str(caught.value)
        assert folders(out) == ["ckpt-00000008", "ckpt-00000016"]
    told = run(config, fresh=True)
    assert told.saves == [1]
    (aside,) = out.glob("before-*")
    assert folders(aside) == ["ckpt-00000008", "ckpt-00000016"]


def test_a_damaged_checkpoint_in_the_way_is_replaced_and_the_run_ends_the_same(data, saved, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(saved, out)
    more = {"out_dot_every_steps": 8, "out_dot_keep": 9, "train_dot_epochs": 1, **ADMIT}
    run(settings(data, tmp_path / "whole", **more))
    dense = out / "ckpt-00000016" / "dense.safetensors"
    good = dense.read_bytes()
    dense.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))  # the size is right; only its digest is wrong
    told = run(settings(data, out, **more))
    assert told.saves == [16, 24, 32]
    assert len(told.notes) == 2
    assert f"the damaged checkpoint {out / 'ckpt-00000016'} was replaced" in told.notes[1]
    assert dense.read_bytes() == good
    last = [path / "ckpt-00000032" / "dense.safetensors" for path in (out, tmp_path / "whole")]
    assert last[0].read_bytes() == last[1].read_bytes()
    assert not run(settings(data, out, **more)).notes


def test_a_whole_checkpoint_of_somebody_else_in_the_way_is_moved_aside(data, saved, tmp_path):
    def another_run(step):
        if step == 4:
            shutil.copytree(saved / "ckpt-00000008", tmp_path / "ckpt-00000008")

    told = run(settings(data, tmp_path, out_dot_every_steps=8, train_dot_max_steps=8, **ADMIT), Told(another_run))
    assert told.saves == [8]
    (aside,) = tmp_path.glob("before-*")
    assert f"was moved to {aside}" in told.notes[0]
    assert rows_of(aside / "ckpt-00000008") == rows_of(saved / "ckpt-00000008")


# --- version 0.1 ------------------------------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path):
    """A run of version 0.1 that was stopped at step 3, with checkpoints of steps 2 and 3."""
    with tarfile.open(GOLDEN / "run-0.1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    more = {"model_dot_hidden": [2], "train_dot_batch_size": 16, "data_dot_shuffle_rows": 32, "out_dot_every_steps": 2}
    return settings(tmp_path, tmp_path / "run", out_dot_auc_window=100, **more, **ADMIT), tmp_path / "run"


def test_a_run_of_version_0_1_goes_on(old):
    config, out = old
    told = run(config)
    assert told.notes == []
    assert (told.ended["samples"], told.ended["rows"]) == (64, 139)
    assert told.ended["logloss"] == pytest.approx(0.401227026737235, rel=1e-5)
    assert folders(out) == ["ckpt-00000003", "ckpt-00000004"]


@pytest.mark.parametrize(
    "name", ["manifest.json", "dense.safetensors", "features-00000-of-00001", "rank-00000.safetensors"]
)
def test_what_can_be_seen_of_damage_of_version_0_1_is_named(old, name):
    config, out = old
    path = out / "ckpt-00000003" / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with open_run(config)[0] as one:
        assert one.at.step == 2
    broken = content[: len(content) // 2] + b"\xff" + content[len(content) // 2 + 1 :]
    if name in ("manifest.json", "features-00000-of-00001"):
        path.write_bytes(broken)
        told = run(config)
        assert name in told.notes[0]


def test_new_checkpoints_stay_although_a_damaged_one_has_a_later_step(data, tmp_path):
    """Its size is right, so that it looks complete until it is read."""
    run(settings(data, tmp_path, out_dot_every_steps=4, train_dot_max_steps=8))
    path = tmp_path / "ckpt-00000008" / "dense.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    told = run(settings(data, tmp_path, out_dot_every_steps=1, out_dot_keep=1, train_dot_max_steps=6))
    assert (told.saves, folders(tmp_path)) == ([5, 6], ["ckpt-00000006", "ckpt-00000008"])
    told = run(settings(data, tmp_path, out_dot_every_steps=1, out_dot_keep=1, train_dot_max_steps=9))
    assert (told.saves, folders(tmp_path)) == ([7, 8, 9], ["ckpt-00000009"])


# --- two ranks --------------------------------------------------------------------------------------------------------


def resume_after_damage(rank, world, *, data, out, names):
    """The step at which two ranks resume after a bit of each file was flipped, and what rank 0 says."""
    config = settings(data, out, train_dot_max_steps=8, out_dot_every_steps=4)
    with trainer(config) as one:
        one.run()
        one.ranks.barrier()
        found = []
        for name in names:
            path = out / "ckpt-00000008" / name
            content = path.read_bytes()
            dist.barrier()
            if rank == 0:
                path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
            dist.barrier()
            told = Told()
            with trainer(config, reporter=told) as again:
                found.append((name, again.at.step, again.reader["batch"], again.rows.size(), told.notes))
            dist.barrier()
            if rank == 0:
                path.write_bytes(content)
            dist.barrier()
        with trainer(config) as again:
            found.append(("", again.at.step, again.reader["batch"], again.rows.size(), []))
    return found


@pytest.mark.timeout(600)
def test_ranks_agree_which_checkpoint_is_whole(data, tmp_path):
    names = ["dense.safetensors", "rank-00000.safetensors", "rank-00001.safetensors", "manifest.json"]
    names += ["features-00000-of-00002", "features-00001-of-00002"]
    first, second = run_ranks(2, resume_after_damage, data=data, out=tmp_path, names=names, timeout_s=300)
    for ours, theirs in zip(first, second, strict=True):
        name, step, _, rows, notes = ours
        assert (theirs[1], theirs[3]) == (step, rows)
        assert step == (4 if name else 8), name
        assert not name or (name in notes[0] and "ckpt-00000004 is used instead" in notes[0])
