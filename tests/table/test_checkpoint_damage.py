"""Every file of every kind of table checkpoint, damaged in every way: an error or a fallback that names it."""

import logging
import os
import threading

import pytest
import torch

from shoal.errors import ConfigError, DataError
from shoal.sharded import AllToAllHashTable
from shoal.table import (
    HashFilterCheckpointRestorerListener,
    HashFilterCheckpointSaverListener,
    HashTable,
    HashTableCheckpointRestorerListener,
    HashTableCheckpointSaverListener,
    create_hash_filter,
    reset_registry,
    restore_hash_filter,
    restore_incremental,
    save_hash_filter,
    save_incremental,
)
from shoal.table import test_hash_table as small_table
from shoal.table.offline.verify import verify
from shoal.testing.damage import damages
from tests.table.test_checkpoint_multi import contents, fill, multi


@pytest.fixture(autouse=True)
def no_tables_of_other_tests():
    reset_registry()
    yield
    reset_registry()


def table_of(rows, value=1.0, **options):
    table = HashTable(3, name="t", optimizer="adagrad", seed=1, **options)
    return table.assign(torch.arange(rows), torch.full((rows, 3), value), req_time=100)


def rows_of(table):
    return [table.size(), *table.lookup(torch.arange(60)).flatten().tolist()]


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_files_of_a_table(tmp_path):
    table = table_of(50)
    table.saver_parallel = 2
    table.save(tmp_path / "t")
    other = table_of(7, 5.0)
    before = rows_of(other)
    assert len(files(tmp_path)) == 3
    for path in files(tmp_path):
        for damage in damages(path):
            if damage == "t.manifest removed":  # like files of another program
                continue
            with pytest.raises(DataError, match=r"table 't': .*t(-0000\d-of|\.manifest)"):
                other.restore(tmp_path / "t")
            assert rows_of(other) == before, damage
            assert not verify(str(tmp_path / "t")).good, damage
    assert verify(str(tmp_path / "t")).good


def test_files_of_a_multi_table(tmp_path):
    fill(multi({"a": 2, "b": 3}, saver_parallel=2)).save(str(tmp_path / "m"))
    other = fill(multi({"a": 2, "b": 3}, "other"), 5)
    before = contents(other)
    assert len(files(tmp_path)) == 5
    for path in files(tmp_path):
        for damage in damages(path):
            if damage == "m.manifest removed":
                continue
            with pytest.raises(DataError, match=r"m(-0000\d-of|\.meta-0000\d-of|\.manifest)"):
                other.restore(str(tmp_path / "m"))
            assert contents(other) == before, damage


def test_files_of_a_filter(tmp_path):
    def counted(n):
        table = create_hash_filter(60, 3)
        for id in range(n):
            table.add(id, 1 + id % 15)
        return table

    save_hash_filter(counted(40), tmp_path / "f", True)
    other = counted(5)
    before = [other.get(i) for i in range(50)]
    for path in files(tmp_path):
        for damage in damages(path, flips=3):
            if damage == "f.manifest removed":
                continue
            with pytest.raises(DataError, match=r"f(-0000\d-of|\.manifest)"):
                restore_hash_filter(other, tmp_path / "f", True)
            assert [other.get(i) for i in range(50)] == before, damage


def test_a_filter_is_read_again_where_another_save_takes_its_place(tmp_path):
    def counts(one):
        return [one.get(id) for id in range(40)]

    older, newer = create_hash_filter(60, 3), create_hash_filter(60, 3)
    for id in range(40):
        older.add(id, 1)
        newer.add(id, 2)
    save_hash_filter(older, tmp_path / "f", True)
    whole = [counts(older), counts(newer)]
    saving, stop = threading.Event(), threading.Event()

    def save():
        while not stop.is_set():
            for one in (newer, older):
                save_hash_filter(one, tmp_path / "f", True)
            saving.set()

    thread = threading.Thread(target=save)
    thread.start()
    try:
        assert saving.wait(60)
        for _ in range(20):
            other = create_hash_filter(60, 3)
            restore_hash_filter(other, tmp_path / "f", True)
            assert counts(other) in whole
    finally:
        stop.set()
        thread.join(60)


def test_filters_are_restored_together_or_not_at_all(tmp_path):
    def counted(count):
        filters = [create_hash_filter(60, 3) for _ in range(3)]
        for each in filters:
            each.add(7, count)
        return filters

    base = str(tmp_path / "model")
    HashFilterCheckpointSaverListener(base, counted(2), True).before_save(1)
    others = counted(5)
    for path in files(tmp_path / "model-1.assets"):
        if "hash_filter_2-" not in path.name:
            continue
        for damage in damages(path, flips=3):
            with pytest.raises(DataError, match="hash_filter_2"):
                HashFilterCheckpointRestorerListener(base, others, True).before_restore()
            assert [each.get(7) for each in others] == [5] * 3, damage
    assert HashFilterCheckpointRestorerListener(base, others, True).before_restore()
    assert [each.get(7) for each in others] == [2] * 3


def test_files_of_a_chain_fall_back_to_what_is_whole_and_say_so(tmp_path, caplog):
    table = table_of(50, expire_after="1d")
    states = {}
    for name, days in (("ckpt-00000001", 0), ("ckpt-00000002", 2), ("ckpt-00000003", 4)):
        assert save_incremental(table, tmp_path, since=None if name.endswith("2") else "latest").name == name
        states[name] = rows_of(table)
        table.assign(torch.arange(3), torch.full((3, 3), float(name[-1])), req_time=100 + days * 86400)
        table.evict()
    expected = {"ckpt-00000001": "ckpt-00000003", "ckpt-00000002": "ckpt-00000001", "ckpt-00000003": "ckpt-00000002"}
    assert len(files(tmp_path)) == 7
    for path in files(tmp_path):
        folder = path.parent.name
        for damage in damages(path, flips=3):
            other = table_of(7, 5.0)
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                taken = restore_incremental(other, tmp_path)
            if taken.name == "ckpt-00000003" and folder != "ckpt-00000001":
                assert path.name == "manifest.json"  # only white space was changed
            else:
                assert taken.name == expected[folder], damage
                assert (f"{folder} is damaged" in caplog.text or folder in caplog.text) == (folder != "ckpt-00000001")
            assert rows_of(other) == states[taken.name], damage


def test_a_chain_with_nothing_whole_is_an_error_and_changes_nothing(tmp_path):
    save_incremental(table_of(50), tmp_path)
    other = table_of(7, 5.0)
    before = rows_of(other)
    for path in files(tmp_path):
        for damage in damages(path):
            try:
                restore_incremental(other, tmp_path)
            except DataError as error:
                assert path.name in str(error) or "has no manifest" in str(error)  # noqa: PT017
                assert rows_of(other) == before, damage
            else:
                assert path.name == "manifest.json"  # only white space was changed
                assert rows_of(other) == rows_of(table_of(50))
                other = table_of(7, 5.0)


def test_a_checkpoint_of_another_width_is_an_error_and_no_older_one_is_taken(tmp_path):
    save_incremental(table_of(5), tmp_path)
    save_incremental(HashTable(4, name="t", optimizer="adagrad").assign(torch.arange(2), torch.ones(2, 4)), tmp_path)
    with pytest.raises(DataError, match="dim"):
        restore_incremental(table_of(1), tmp_path)


def test_files_of_a_model_checkpoint(tmp_path):
    base = str(tmp_path / "model")
    table = small_table(2, name_suffix="a").assign(torch.arange(20), torch.ones(20, 2))
    HashTableCheckpointSaverListener(base).before_save(3)
    table.clear()
    for path in files(tmp_path):
        for damage in damages(path):
            if damage.endswith(".manifest removed") or (path.suffix == ".json" and damage.endswith("removed")):
                continue  # like files of another program
            try:
                HashTableCheckpointRestorerListener(base).before_restore()
            except DataError as error:
                assert path.name in str(error)  # noqa: PT017
                assert table.size() == 0, damage
            else:
                assert path.suffix == ".json"  # only white space was changed
                table.clear()


def test_a_damaged_model_checkpoint_is_passed_over_and_named(tmp_path, caplog):
    base = str(tmp_path / "model")
    table = small_table(1, name_suffix="a")
    for step in (1, 2):
        table.assign(torch.tensor([7]), torch.full((1, 1), float(step)))
        HashTableCheckpointSaverListener(base).before_save(step)
    manifest = next((tmp_path / "model-2.assets").glob("manifest.*.json"))
    manifest.write_text("{")
    assert HashTableCheckpointRestorerListener(base).before_restore()
    assert table.lookup(torch.tensor([7])).item() == 1
    assert "model-2.assets is damaged" in caplog.text
    next((tmp_path / "model-1.assets").glob("manifest.*.json")).write_text("{")
    with pytest.raises(DataError, match=r"no checkpoint model-\*.assets .* is complete"):
        HashTableCheckpointRestorerListener(base).before_restore()


@pytest.mark.parametrize("again", [False, True], ids=["first save", "over another save"])
def test_tables_whose_file_names_coincide_keep_their_rows(tmp_path, again):
    base = str(tmp_path / "model")
    tables = [small_table(1, name_suffix=name) for name in ("u/a", "u:a", "u-a")]
    for _ in range(1 + again):
        for i, table in enumerate(tables):
            table.assign(torch.tensor([7]), torch.full((1, 1), float(i + 1)))
        HashTableCheckpointSaverListener(base).before_save(3)
    for table in tables:
        table.clear()
    assert HashTableCheckpointRestorerListener(base).before_restore()
    assert [table.lookup(torch.tensor([7])).item() for table in tables] == [1, 2, 3]


def test_two_processes_whose_tables_have_one_file_name_are_told(tmp_path):
    base = str(tmp_path / "model")
    small_table(1, name_suffix="u/a").assign(torch.tensor([7]), torch.ones(1, 1))
    HashTableCheckpointSaverListener(base).before_save(3)
    reset_registry()
    small_table(1, name_suffix="u:a").assign(torch.tensor([7]), torch.zeros(1, 1))
    with pytest.raises(ConfigError, match="'MonolithHashTable_u:a' and 'MonolithHashTable_u/a' would both be saved to"):
        HashTableCheckpointSaverListener(base).before_save(3)


def test_a_second_save_of_a_step_replaces_the_first_in_one_step(tmp_path, monkeypatch):
    base = str(tmp_path / "model")
    tables = [small_table(1, name_suffix=name) for name in ("a", "b")]
    for table in tables:
        table.assign(torch.tensor([7]), torch.ones(1, 1))
    HashTableCheckpointSaverListener(base).before_save(3)
    for table in tables:
        table.assign(torch.tensor([7]), torch.full((1, 1), 2.0))
    real, left = os.replace, []

    def dies_in_the_middle(source, target):
        if "model-3.assets" in str(target) and "staging" not in str(target) and not str(target).endswith(".json"):
            left.append(target)
            if len(left) > 1:
                raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", dies_in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        HashTableCheckpointSaverListener(base).before_save(3)
    monkeypatch.undo()
    for table in tables:
        table.clear()
    assert HashTableCheckpointRestorerListener(base).before_restore()
    assert [table.lookup(torch.tensor([7])).item() for table in tables] == [2, 2]


def test_files_of_a_table_over_ranks(tmp_path):
    def table_of(value, rows=20):
        table = AllToAllHashTable(2, optimizer="sgd", name="t")
        return table.assign(torch.arange(rows), torch.full((rows, 2), value))

    table_of(1.0).save(tmp_path / "t")
    other = table_of(5.0, 3)
    for path in files(tmp_path):
        if path.name == "rows.manifest":
            continue  # the manifest of the folder also lists the rows
        for damage in damages(path):
            try:
                other.restore(tmp_path / "t")
            except DataError as error:
                assert path.name in str(error)  # noqa: PT017
                assert other.size() == 3, damage
            else:
                assert path.name == "manifest.json"  # only white space was changed
                assert other.size() == 20
                other = table_of(5.0, 3)


def test_a_save_over_ranks_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    table = AllToAllHashTable(2, optimizer="sgd", name="t").assign(torch.arange(9), torch.ones(9, 2))
    table.save(tmp_path / "t")
    table.assign(torch.arange(4), torch.zeros(4, 2))
    from shoal.sharded.all_to_all import table as all_to_all_table

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(all_to_all_table, "replace_files", fails)
    with pytest.raises(OSError, match="No space left"):
        table.save(tmp_path / "t")
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path / "t")) == ["manifest.json", "rank-00000"]
    table.restore(tmp_path / "t")
    assert table.lookup(torch.arange(9)).sum() == 18
    table.assign(torch.arange(4), torch.zeros(4, 2)).save(tmp_path / "t")
    table.assign(torch.arange(9), torch.zeros(9, 2)).restore(tmp_path / "t")
    assert table.lookup(torch.arange(9)).sum() == 10
