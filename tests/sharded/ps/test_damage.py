"""Damage to every file of a server's directory: acknowledged writes are restored, or an error names the file."""

import json
import random
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from shoal.errors import DataError
from shoal.sharded import Engine, Shard
from shoal.sharded.ps.client.remote import create_request
from shoal.sharded.ps.protocol import Op, Request, Status
from shoal.sharded.ps.reshard import load_shard, reshard_servers
from shoal.sharded.ps.server.checkpoint import Checkpoint
from shoal.table import AdamOptimizer, HashTable, RandomUniformInitializer, SlotOccurrenceThresholdConfig
from tests.sharded.helpers import config

T = torch.tensor
IDS = torch.arange(60)
GOLDEN = Path(__file__).parent / "golden" / "servers-0.1.tar.gz"


def engine(folder, durability="log"):
    made = Engine(Shard(0, 1), durability, folder)
    made.recover()
    return made


class Worker:
    def __init__(self, engine):
        self.engine, self.seq = engine, engine.streams.last(b"w" * 16)

    def __call__(self, op, name="t", ids=IDS, **fields):
        self.seq += 1
        request = Request(
            op,
            stream=b"w" * 16,
            seq=self.seq,
            acked=self.seq - 1,
            names=(name,),
            counts=[ids.numel()],
            ids=ids,
            **fields,
        )
        return self.engine.apply([request])[0]

    def create(self, name, made, **options):
        assert self.engine.apply([create_request(made, {"name": name, "seed": 3, **options})])[0].status == Status.OK

    def learn(self, seed):
        values = torch.randn(60, 2, generator=torch.Generator().manual_seed(seed))
        assert self(Op.APPLY, values=values, rates=[0.1], req_time=1000 + seed).status == Status.OK
        assert self(Op.APPLY, "rare", T([1, seed]), values=torch.ones(4), rates=[0.1]).status == Status.OK
        bad = torch.full((2,), float("nan"))
        assert self(Op.APPLY, ids=T([1]), values=bad, rates=[0.1]).status == Status.BAD_REQUEST


def fill(folder, checkpoints=3, **options):
    """A server's directory with checkpoints and a log behind them; what is in it."""
    subject = engine(folder, **options)
    worker = Worker(subject)
    worker.create("t", config(2, optimizer=AdamOptimizer(), initializer=RandomUniformInitializer()))
    thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=1).SerializeToString().hex()
    worker.create("rare", config(2), filter={"type": "sliding_hash_filter", "capacity": 50, "config": thresholds})
    for number in range(checkpoints):
        worker.learn(number)
        subject.finish_checkpoint(subject.begin_checkpoint(), f"run-{number}", [f"run-{number - 1}"])
    worker.learn(100)
    subject.close()
    return state(subject)


def state(subject):
    tables = {name: (t.lookup_entry(IDS), t.size(), t.max_update_time) for name, t in subject.shard.tables.items()}
    return tables, subject.streams.dump(), subject.streams.dump_answers(), subject.shard.version


def attempt(folder):
    """What a server comes back with, or the error that tells why it does not."""
    try:
        again = engine(folder)
    except DataError as error:
        return None, str(error)
    again.close()
    return state(again), ""


def newest(folder):
    return sorted(folder.glob("checkpoint-*"))[-1]


def damages(path, rng):
    """Copies of a file's bytes with one bit flipped, or cut short."""
    data = path.read_bytes()
    places = range(len(data)) if len(data) < 200 else sorted(rng.sample(range(len(data)), 25))
    for at in places if path.suffix != ".json" else sorted(rng.sample(range(len(data)), min(len(data), 120))):
        yield f"bit {at}", data[:at] + bytes((data[at] ^ 1 << rng.randrange(8),)) + data[at + 1 :]
    for size in sorted({0, len(data) // 2, len(data) - 1} - {len(data)}):
        if size >= 0:
            yield f"cut at {size}", data[:size]
    yield "longer", data + b"x"


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


def test_one_damaged_byte_of_a_checkpoint_loses_nothing_and_is_told(tmp_path, caplog):
    """Each file of the newest checkpoint, a bit or its length at a time: the one before and the log are used."""
    rng = random.Random(0)
    expected = fill(tmp_path / "whole")
    tried = 0
    for name in files_of(newest(tmp_path / "whole")):
        for what, data in damages(newest(tmp_path / "whole") / name, rng):
            folder = tmp_path / "damaged"
            shutil.copytree(tmp_path / "whole", folder, copy_function=shutil.copy)
            path = newest(folder)
            (path / name).write_bytes(data)
            caplog.clear()
            again = engine(folder)
            assert state(again) == expected, f"{name}, {what}"
            if again.recovered_records > 3:  # it used the previous checkpoint
                assert f"checkpoint {path} is damaged" in caplog.text, f"{name}, {what}"
                assert name in caplog.text, f"{name}, {what}"
                assert "is used instead" in caplog.text
            else:
                pytest.fail(f"{name}, {what}: the damage was not noticed")
            again.close()
            shutil.rmtree(folder)
            tried += 1
    assert tried > 300


@pytest.mark.parametrize("durability", ["log", "checkpoint"])
def test_a_missing_file_is_damage(tmp_path, caplog, durability):
    expected = fill(tmp_path / "whole")
    for name in files_of(newest(tmp_path / "whole")):
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "whole", folder)
        (newest(folder) / name).unlink()
        caplog.clear()
        assert state(engine(folder, durability)) == expected
        assert "is damaged" in caplog.text
        shutil.rmtree(folder)


def test_a_damaged_checkpoint_is_not_counted_and_the_next_ones_take_its_place(tmp_path, caplog):
    expected = fill(tmp_path)
    damaged = newest(tmp_path)
    rows = damaged / "table-00001-00000-of-00001"
    rows.write_bytes(rows.read_bytes()[:-1] + b"?")
    again = engine(tmp_path)
    assert not damaged.exists()
    assert len(list(tmp_path.glob("damaged-checkpoint-*"))) == 1
    again.checkpoint()
    worker = Worker(again)
    worker.learn(7)
    again.checkpoint()
    expected = state(again)
    again.close()
    for path in sorted(tmp_path.glob("checkpoint-*"))[1:]:  # the older of two kept ones suffices
        (path / "manifest.json").write_text("{}")
    caplog.clear()
    assert state(engine(tmp_path)) == expected
    assert "manifest.json has no digest" in caplog.text


def test_without_a_whole_checkpoint_a_log_from_the_first_write_will_do(tmp_path, caplog):
    expected = fill(tmp_path, checkpoints=1)
    (newest(tmp_path) / "manifest.json").write_text("{")
    assert state(engine(tmp_path)) == expected
    assert "the log, which begins with the first write, is used instead" in caplog.text


def test_nothing_starts_where_what_was_acknowledged_cannot_come_back(tmp_path):
    fill(tmp_path)
    checkpoints = sorted(tmp_path.glob("checkpoint-*"))
    for path in checkpoints:
        (path / "manifest.json").write_text("{")
    for _ in range(2):  # the first time changes nothing
        with pytest.raises(
            DataError, match=f"no checkpoint in {tmp_path} is complete: .*manifest.json is not a JSON file"
        ):
            engine(tmp_path)
        assert sorted(tmp_path.glob("checkpoint-*")) == checkpoints


def test_a_log_that_does_not_reach_back_is_an_error_and_not_a_loss(tmp_path):
    fill(tmp_path)
    damaged = newest(tmp_path)
    (damaged / "manifest.json").write_text("{")
    logs = sorted(tmp_path.glob("log-*.shlog"))
    for path in logs:
        path.rename(path.with_suffix(".gone"))
    number = int(damaged.name.removeprefix("checkpoint-"))
    with pytest.raises(DataError, match=f"checkpoint of write {number} .* is damaged, and the log has no writes"):
        engine(tmp_path)
    assert damaged.exists()
    assert engine(tmp_path, "checkpoint").shard.version > 0  # as the error advises
    for path in logs:
        path.with_suffix(".gone").rename(path)


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_log_is_an_error_that_names_it_or_a_torn_tail(tmp_path, seed):
    rng = random.Random(seed)
    expected = fill(tmp_path / "whole")
    path = sorted((tmp_path / "whole").glob("log-*.shlog"))[-1]
    for what, data in damages(path, rng):
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "whole", folder)
        (folder / path.name).write_bytes(data)
        found, error = attempt(folder)
        if found is None:
            assert path.name in error, what
        else:
            assert found[3] <= expected[3], what  # a tail that was not known to be synced
        shutil.rmtree(folder)


def test_a_kept_checkpoint_that_is_damaged_is_an_error_that_names_the_file(tmp_path):
    rng = random.Random(0)
    fill(tmp_path / "whole")
    for name in files_of(tmp_path / "whole" / "kept-run-1"):
        for what, data in list(damages(tmp_path / "whole" / "kept-run-1" / name, rng))[::9]:
            folder = tmp_path / "damaged"
            shutil.copytree(tmp_path / "whole", folder, copy_function=shutil.copy)
            (folder / "kept-run-1" / name).write_bytes(data)
            worker = Worker(engine(folder))
            before = state(worker.engine)
            replies = [worker(Op.RESTORE, table, T([], dtype=torch.int64), values=b"run-1") for table in ("t", "rare")]
            statuses = [reply.status for reply in replies]
            assert Status.BAD_REQUEST in statuses, f"{name}, {what}"
            assert any(name in reply.text() for reply in replies if reply.status), f"{name}, {what}"
            if name == "manifest.json":
                assert statuses == [Status.BAD_REQUEST] * 2
                assert state(worker.engine)[0] == before[0]
            worker.engine.close()
            shutil.rmtree(folder)


def test_what_was_kept_is_there_for_the_log_after_it_was_let_go(tmp_path):
    subject = engine(tmp_path)
    worker = Worker(subject)
    worker.create("t", config(2))
    worker(Op.ASSIGN, values=torch.ones(60, 2))
    subject.finish_checkpoint(subject.begin_checkpoint(), "run-1")
    worker(Op.ASSIGN, values=torch.zeros(60, 2))
    subject.checkpoint()
    assert worker(Op.RESTORE, ids=T([], dtype=torch.int64), values=b"run-1").status == Status.OK
    subject.finish_checkpoint(subject.begin_checkpoint(), "run-2")  # releases run-1
    assert worker(Op.RESTORE, ids=T([], dtype=torch.int64), values=b"run-1").status == Status.BAD_REQUEST
    subject.close()
    (newest(tmp_path) / "manifest.json").write_text("{")
    again = engine(tmp_path)  # from the previous one, and a log that names run-1
    assert again.shard.tables["t"].lookup(IDS).tolist() == [[1, 1]] * 60
    for _ in range(2):
        Worker(again)(Op.ASSIGN, values=torch.ones(60, 2))
        again.checkpoint()
    assert not list(tmp_path.glob("released-*"))


def test_resharding_refuses_damage(tmp_path):
    rng = random.Random(0)
    source = tmp_path / "ps"
    fill(source / "shard-00000", checkpoints=1)
    engine(source / "shard-00000").checkpoint()
    path = newest(source / "shard-00000")
    for name in files_of(path):
        whole = (path / name).read_bytes()
        for what, data in list(damages(path / name, rng))[::7]:
            (path / name).write_bytes(data)
            if name.startswith("filter"):  # not read
                continue
            with pytest.raises(DataError, match=name):
                reshard_servers(source, tmp_path / f"{name}-{what}", 2)
        (path / name).write_bytes(whole)
    assert reshard_servers(source, tmp_path / "two", 2)["t"] == 60


# --- version 0.1 ------------------------------------------------------------------------------------------------------


@pytest.fixture
def golden(tmp_path):
    """A directory that servers of version 0.1 left: two checkpoints, a kept one, a log behind them."""
    with tarfile.open(GOLDEN) as file:
        file.extractall(tmp_path / "golden", filter="data")
    return tmp_path / "golden"


def test_checkpoints_of_version_0_1_are_loaded(golden):
    expected = json.loads((golden / "expected.json").read_text())
    ids = T([0, 1, 2, 9, 10, 19, 100])
    for _ in range(3):  # then written in the current format
        again = engine(golden / "shard-00000")
        for name in ("item", "rare"):
            assert [entry.hex() for entry in again.shard.tables[name].lookup_entry(ids)] == expected[name]
        assert again.streams.last(b"w" * 16) == expected["last"]
        again.checkpoint()
        again.close()
    again = engine(golden / "shard-00000")
    assert Worker(again)(Op.RESTORE, "item", T([], dtype=torch.int64), values=b"run-1").status == Status.OK
    assert not again.shard.tables["item"].contains(T([100]))


def test_rows_of_version_0_1_are_resharded(golden, tmp_path):
    engine(golden / "shard-00000").checkpoint()
    assert reshard_servers(golden, tmp_path / "two", 2) == {"item": 21, "rare": 1}
    local = load_shard(HashTable(2, name="item", optimizer="adam"), tmp_path / "two", "item")
    assert local.lookup(T([100])).tolist() == [[7, 8]]


def test_damage_to_a_checkpoint_of_version_0_1_is_named_where_it_is_seen(golden):
    rng = random.Random(0)
    folder = golden / "shard-00000"
    path = sorted(folder.glob("checkpoint-*"))[-1] / "manifest.json"
    whole = path.read_text()
    for key in ("number", "tables", "streams", "shard", "spec", "calls", "file"):
        path.write_text(whole.replace(f'"{key}"', f'"{key[:-1]}?"', 1))
        with pytest.raises(DataError, match=r"manifest\.json"):
            Checkpoint(path.parent)
    for _, data in damages(path, rng):
        path.write_bytes(data)
        found, error = attempt(folder)
        assert found is not None or str(folder) in error
        for aside in folder.glob("damaged-*"):
            aside.rename(path.parent)
