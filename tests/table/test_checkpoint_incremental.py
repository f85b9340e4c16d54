"""Incremental checkpoints: base and deltas restore exactly the full state; partial ones are never used."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shoal import _core
from shoal.errors import ConfigError, DataError, UnsupportedError
from shoal.table import (
    Checkpoint,
    CheckpointNotFoundError,
    EntryDump,
    HashTable,
    latest_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    restore_incremental,
    save_incremental,
)

DAY = 86400


def make(name="t", **options):
    return HashTable(2, name=name, seed=1, optimizer="adagrad", **options)


def write(table, ids, value, seconds=0):
    ids = torch.as_tensor(ids)
    return table.assign(ids, torch.full((ids.numel(), 2), float(value)), req_time=seconds)


def all_rows(table):
    rows = {}
    for stripe in range(table._native.num_stripes):
        rows.update({EntryDump.FromString(e).id: e for e in _core.walk_entries(table._native, stripe, 0, 1 << 30)[0]})
    return rows


def restored(directory, name=None, **options):
    table = make(**options)
    write(table, [10**9], 1)  # never in a checkpoint
    restore_incremental(table, directory, name)
    return table


def test_a_delta_has_only_what_changed(tmp_path):
    table = write(make(), range(1000), 1)
    full = save_incremental(table, tmp_path)
    assert (full.kind, full.rows, full.removed, full.parent) == ("full", 1000, 0, None)
    write(table, [5, 2000], 2)
    table.erase(torch.tensor([7, 8]))
    delta = save_incremental(table, tmp_path, since=full, step=12)
    assert (delta.kind, delta.rows, delta.removed, delta.parent, delta.step) == ("delta", 2, 2, full.name, 12)
    assert delta.bytes < full.bytes / 10
    assert all_rows(restored(tmp_path)) == all_rows(table)
    assert restored(tmp_path, full.name).size() == 1000
    assert [c.name for c in list_checkpoints(tmp_path)] == ["ckpt-00000001", "ckpt-00000002"]
    assert latest_checkpoint(tmp_path) == delta


def test_a_delta_of_nothing_is_empty_and_still_restores(tmp_path):
    table = write(make(), range(10), 1)
    save_incremental(table, tmp_path)
    assert save_incremental(table, tmp_path).rows == 0
    assert all_rows(restored(tmp_path)) == all_rows(table)


def test_an_id_that_left_and_came_back_is_there(tmp_path):
    table = write(make(), range(10), 1)
    save_incremental(table, tmp_path)
    table.erase(torch.arange(10))
    write(table, [3], 9)
    delta = save_incremental(table, tmp_path)
    assert (delta.rows, delta.removed) == (1, 9)
    assert all_rows(restored(tmp_path)) == all_rows(table)


def test_deltas_against_an_older_checkpoint(tmp_path):
    table = write(make(), range(100), 1)
    full = save_incremental(table, tmp_path)
    save_incremental(write(table, range(50), 2), tmp_path)
    far = save_incremental(write(table, range(10), 3), tmp_path, since=full.name)
    assert (far.parent, far.rows) == (full.name, 50)
    assert all_rows(restored(tmp_path)) == all_rows(table)


def test_training_goes_on_from_a_restored_chain(tmp_path):
    table = write(make(), range(100), 1)
    save_incremental(table, tmp_path)
    save_incremental(write(table, [1], 2), tmp_path)
    second = restored(tmp_path)
    delta = save_incremental(write(second, [2], 3), tmp_path)
    assert (delta.kind, delta.rows) == ("delta", 1)
    assert all_rows(restored(tmp_path)) == all_rows(second)


def test_rows_that_expired_since_are_not_restored(tmp_path):
    table = write(make(expire_after="2d"), [1, 2], 1, seconds=0)
    save_incremental(table, tmp_path)
    write(table, [2, 3], 1, seconds=3 * DAY)
    save_incremental(table, tmp_path)
    assert set(all_rows(restored(tmp_path))) == {2, 3}  # as in a full save
    write(table, [3], 5, seconds=0)  # an earlier time: stale although it was written last
    save_incremental(table, tmp_path)
    table.save(str(tmp_path / "full"))
    assert set(all_rows(make().restore(str(tmp_path / "full")))) == set(all_rows(restored(tmp_path))) == {2}
    assert restored(tmp_path).max_update_time == 3 * DAY


def test_eviction_is_in_the_delta(tmp_path):
    table = write(make(expire_after="1d"), range(50), 1, seconds=0)
    save_incremental(table, tmp_path)
    write(table, [99], 1, seconds=DAY)
    assert table.evict() == 50
    assert save_incremental(table, tmp_path).removed == 50
    assert set(all_rows(restored(tmp_path))) == {99}


def test_after_a_clear_a_full_checkpoint_is_written(tmp_path):
    table = write(make(), range(50), 1)
    full = save_incremental(table, tmp_path)
    write(table.clear(), [1], 2)
    with pytest.raises(ConfigError, match="table 't': its changes since 'ckpt-00000001' are not known"):
        save_incremental(table, tmp_path, since=full)
    assert save_incremental(table, tmp_path).kind == "full"
    assert set(all_rows(restored(tmp_path))) == {1}


def test_another_table_cannot_continue_a_chain_it_does_not_know(tmp_path):
    full = save_incremental(write(make(), range(5), 1), tmp_path)
    stranger = write(make(), range(5), 2)
    with pytest.raises(ConfigError, match="save a full checkpoint with since=None"):
        save_incremental(stranger, tmp_path, since=full)
    assert save_incremental(stranger, tmp_path).kind == "full"
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint 'ckpt-00000009'"):
        save_incremental(stranger, tmp_path, since="ckpt-00000009")


def test_several_tables_are_one_checkpoint(tmp_path):
    tables = [write(make("a/x"), range(5), 1), write(make("b:y"), range(7), 2)]
    save_incremental(tables, tmp_path)
    write(tables[0], [1], 5)
    save_incremental(tables, tmp_path)
    other = [make("a/x"), make("b:y")]
    restore_incremental(other, tmp_path)
    assert [all_rows(t) for t in other] == [all_rows(t) for t in tables]
    with pytest.raises(CheckpointNotFoundError, match=r"unable to find table checkpoint.*'c'"):
        restore_incremental([other[0], make("c")], tmp_path)
    with pytest.raises(ConfigError, match="different names"):
        save_incremental([make("c"), make("c")], tmp_path)
    with pytest.raises(ConfigError, match="at least one table"):
        save_incremental([], tmp_path)


def test_a_shard_of_a_chain(tmp_path):
    table = write(make(), range(-50, 50), 1)
    save_incremental(table, tmp_path)
    write(table, range(10), 2)
    table.erase(torch.arange(-5, 0))
    save_incremental(table, tmp_path)
    rows = {}
    for rank in range(3):
        part = make(f"t{rank}")
        part.name = "t"
        restore_incremental(part, tmp_path, shard=(rank, 3))
        assert all(id % 3 == rank for id in all_rows(part))
        rows.update(all_rows(part))
    assert rows == all_rows(table)


def test_one_damaged_file_of_a_chain_leaves_every_table(tmp_path):
    tables = [write(make("a"), range(50), 1), write(make("b"), range(50), 2)]
    save_incremental(tables, tmp_path)
    write(tables[1], [1], 5)
    tables[1].erase(torch.tensor([2]))
    save_incremental(tables, tmp_path)
    targets = [write(make("a"), [1], 7), write(make("b"), [1], 7)]
    before = [all_rows(t) for t in targets]
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    assert any(path.name == "b.removed" for path in files)
    for path in files:
        whole = path.read_bytes()
        for damaged in (whole[:-1], bytes([whole[0] ^ 1]) + whole[1:], whole + b"x"):
            path.write_bytes(damaged)
            with pytest.raises(DataError):
                restore_incremental(targets, tmp_path, "ckpt-00000002")
            assert [all_rows(t) for t in targets] == before
        path.write_bytes(whole)
    restore_incremental(targets, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(version=3),
        lambda m: m.pop("digest"),
        lambda m: m.update(digest="sha256:0"),
        lambda m: m.update(format="x"),
        lambda m: m.update(files={"../../etc/passwd": 1}),
        lambda m: m.update(files={"t-00000-of-00001": "1"}),
        lambda m: m.update(content=[]),
        lambda m: m.update(step="1"),
        lambda m: m["content"].update(tables={}),
        lambda m: m["content"]["tables"][0].update(file="../t"),
        lambda m: m["content"]["tables"][0].update(shards=-1),
        lambda m: m["content"]["tables"][0].update(rows=True),
        lambda m: m["content"]["tables"][0].update(rows=3),
        lambda m: m["content"]["tables"][0].update(max_update_time=1 << 40),
        lambda m: m["content"]["tables"][0].update(scales="no"),
        lambda m: m["content"]["tables"][0].update(scales=[10**400]),
        lambda m: m["content"]["tables"][0].update(expiry=None),
        lambda m: m["content"]["tables"][0].update(expiry={"default_days": -1, "slots": []}),
        lambda m: m["content"]["tables"][0].update(expiry={"default_days": float("inf"), "slots": []}),
        lambda m: m["content"]["tables"][0].update(expiry={"default_days": 1, "slots": [[99999, 1]]}),
        lambda m: m["content"]["tables"][0].update(expiry={"default_days": 1, "slots": [[1, -1]]}),
        lambda m: m.update(kind="other"),
        lambda m: m.update(kind="delta"),
        lambda m: (m.update(kind="delta"), m["content"].update(parent={"name": "ckpt-00000001", "id": m["id"]})),
    ],
)
def test_a_manifest_that_says_nonsense_is_refused(change, tmp_path):
    save_incremental(write(make(), range(5), 1), tmp_path)
    change_manifest(tmp_path / "ckpt-00000001", change)
    table = write(make(), [1], 1)
    with pytest.raises(DataError):
        restore_incremental(table, tmp_path, "ckpt-00000001")
    assert table.size() == 1


def change_manifest(folder, change):
    """Changes a manifest, and its digest with it, as a faulty writer would."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    before = manifest["digest"]
    change(manifest)
    if manifest.get("digest") == before:
        del manifest["digest"]
        canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
        manifest["digest"] = "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("tables", [None, 5, [5], [{"name": "t", "rows": "5"}]])
def test_a_manifest_without_readable_tables_counts_as_damaged(tables, tmp_path, caplog):
    table = write(make(), range(5), 1)
    good = save_incremental(table, tmp_path)
    bad = save_incremental(write(table, [1], 2), tmp_path)
    change_manifest(tmp_path / bad.name, lambda m: m["content"].update(tables=tables))
    assert [found.name for found in list_checkpoints(tmp_path)] == [good.name]
    assert f"{bad.name} is damaged" in caplog.text
    assert restore_incremental(make(), tmp_path).name == good.name
    assert save_incremental(write(table, [1], 3), tmp_path).parent == good.name


def test_what_is_half_written_is_never_picked_up(tmp_path):
    table = write(make(), range(5), 1)
    good = save_incremental(table, tmp_path)
    newer = save_incremental(write(table, [1], 2), tmp_path)
    os.unlink(os.path.join(newer.path, "t-00000-of-00001"))
    shutil.copytree(good.path, tmp_path / ".tmp-ckpt-00000009-ff")
    (tmp_path / "ckpt-00000003").mkdir()
    (tmp_path / "ckpt-4").mkdir()
    assert [c.name for c in list_checkpoints(tmp_path)] == [good.name]
    assert restored(tmp_path).size() == 5
    assert save_incremental(table, tmp_path).name == "ckpt-00000004"
    with pytest.raises(DataError, match="is damaged"):
        restored(tmp_path, newer.name)


def test_a_parent_that_was_replaced_is_noticed(tmp_path):
    table = write(make(), range(5), 1)
    full = save_incremental(table, tmp_path)
    save_incremental(write(table, [1], 2), tmp_path)
    shutil.rmtree(full.path)
    with pytest.raises(DataError, match="the parent of ckpt-00000002, does not exist"):
        restored(tmp_path)
    save_incremental(write(make(), range(5), 9), tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "elsewhere" / "ckpt-00000001", full.path)
    with pytest.raises(DataError, match="another one has replaced it"):
        restored(tmp_path, "ckpt-00000002")


def test_nothing_there(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert list_checkpoints(tmp_path / "nowhere") == []
    for name in (None, "ckpt-00000001", "../x", ""):
        with pytest.raises(CheckpointNotFoundError):
            restored(tmp_path, name)


def test_pruning_keeps_what_the_newest_build_on(tmp_path):
    table = write(make(), range(20), 1)
    names = [save_incremental(table, tmp_path, since=None).name]
    names.append(save_incremental(write(table, [1], 2), tmp_path).name)
    names.append(save_incremental(table, tmp_path, since=None).name)
    names.append(save_incremental(write(table, [2], 3), tmp_path).name)
    names.append(save_incremental(write(table, [3], 4), tmp_path).name)
    old = tmp_path / ".tmp-ckpt-00000009-ff"
    old.mkdir()
    os.utime(old, (0, 0))
    (tmp_path / ".tmp-ckpt-00000010-ee").symlink_to("gone")  # like a save that finishes while this one looks
    assert prune_checkpoints(tmp_path, keep=2) == names[:2]
    assert [c.name for c in list_checkpoints(tmp_path)] == names[2:]
    assert all_rows(restored(tmp_path)) == all_rows(table)
    assert not old.exists()
    assert prune_checkpoints(tmp_path, keep=1, leftovers_after=timedelta(0)) == []
    with pytest.raises(ConfigError, match="keep must be at least 1"):
        prune_checkpoints(tmp_path, keep=0)
    delta = save_incremental(write(table, [5], 6), tmp_path)
    assert delta.kind == "delta"
    assert all_rows(restored(tmp_path)) == all_rows(table)


def test_the_log_of_removals_does_not_grow_for_ever(tmp_path):
    table = write(make(), range(100), 1)
    first = save_incremental(table, tmp_path)
    for round in range(12):
        save_incremental(write(table, [round], 2), tmp_path)
    with pytest.raises(ConfigError, match=r"changes since .* are not known"):
        save_incremental(table, tmp_path, since=first)


def test_serving_tables_cannot_be_saved_but_can_be_restored(tmp_path):
    from shoal.table.config.messages import EntryConfig

    table = write(make(), range(5), 1)
    save_incremental(table, tmp_path)
    config = make().config
    config.table_config.entry_config.entry_type = EntryConfig.SERVING
    serving = HashTable.from_config(config, name="t")
    restore_incremental(serving, tmp_path)
    assert serving.lookup(torch.arange(5)).tolist() == [[1, 1]] * 5
    with pytest.raises(UnsupportedError, match="not supported by serving entries"):
        save_incremental(serving, tmp_path)


class Chain(RuleBasedStateMachine):
    """Any history of writes, removals and checkpoints: every checkpoint restores what a full save held then."""

    ids = st.lists(st.integers(-20, 20), min_size=1, max_size=12)

    @initialize(days=st.integers(1, 40))
    def begin(self, days):
        import tempfile

        self.folder = tempfile.mkdtemp()
        self.table = make(expire_after=timedelta(days=days))
        self.days = days
        self.states: dict[str, dict] = {}
        self.now = 1

    def teardown(self):
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)

    @rule(ids=ids, days=st.integers(0, 15), back=st.booleans())
    def train(self, ids, days, back):
        self.now += days * DAY
        seconds = max(1, self.now - 10 * DAY) if back else self.now
        grads = torch.arange(len(ids) * 2, dtype=torch.float32).view(-1, 2) - 3
        self.table.apply_gradients(torch.tensor(ids), grads, 1, req_time=seconds)

    @rule(ids=ids, how=st.sampled_from(["assign", "assign_add", "reinitialize", "insert"]))
    def write(self, ids, how):
        ids = torch.tensor(ids)
        values = torch.full((len(ids), 2), 0.5)
        if how == "assign":
            self.table.assign(ids, values, self.now)
        elif how == "assign_add":
            self.table.assign_add(ids, values, self.now)
        elif how == "reinitialize":
            self.table.reinitialize(ids)
        else:
            self.table.lookup(ids, insert_missing=True, req_time=self.now)

    @rule(ids=ids)
    def erase(self, ids):
        self.table.erase(torch.tensor(ids))

    @rule()
    def evict(self):
        self.table.evict()

    @rule()
    def clear(self):
        self.table.clear()

    @rule(full=st.booleans())
    def save(self, full):
        checkpoint = save_incremental(self.table, self.folder, since=None if full else "latest")
        stale = self.table.max_update_time - self.days * DAY
        rows = {id: e for id, e in all_rows(self.table).items() if EntryDump.FromString(e).last_update_ts_sec > stale}
        self.states[checkpoint.name] = rows

    @rule(data=st.data())
    def restore(self, data):
        if self.states:
            name = data.draw(st.sampled_from(sorted(self.states)))
            restore_incremental(self.table, self.folder, name)
            assert all_rows(self.table) == self.states[name]

    @rule()
    def prune(self):
        for name in prune_checkpoints(self.folder, keep=2):
            del self.states[name]

    @invariant()
    def every_checkpoint_restores(self):
        for name, rows in getattr(self, "states", {}).items():
            assert all_rows(restored(self.folder, name)) == rows


TestChain = Chain.TestCase
TestChain.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)

SAVER = """
import sys, torch
from shoal.table import HashTable, save_incremental
table = HashTable(2, name="t", optimizer="adagrad")
ids = torch.arange(100_000)
value = 0.0
while True:
    value += 1
    table.assign(ids, torch.full((len(ids), 2), value))
    save_incremental(table, sys.argv[1])
    print("saved", flush=True)
    ids = ids[: max(1000, len(ids) // 2)]
"""


@pytest.mark.parametrize("delay", [0.02, 0.1])
def test_a_process_killed_during_a_save_leaves_the_chain(delay, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ)
    try:
        for _ in range(3):
            assert process.stdout.readline() == b"saved\n"
        time.sleep(delay)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(120)
        process.stdout.close()
    newest = latest_checkpoint(tmp_path)
    assert isinstance(newest, Checkpoint)
    assert restored(tmp_path).size() == 100_000
    prune_checkpoints(tmp_path, leftovers_after=timedelta(0))
    assert all(name.startswith("ckpt-") for name in os.listdir(tmp_path))
    assert restored(tmp_path).size() == 100_000
