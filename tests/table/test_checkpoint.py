"""Saving and restoring one table: file rules, expiry, damaged files, shards, threads, processes that die."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import _core
from shoal.durable import read_newest, read_saved, write_saved
from shoal.errors import CancelledError, ConfigError, DataError
from shoal.table import (
    CheckpointNotFoundError,
    CombineAsSegment,
    CuckooEmbeddingHashTableConfig,
    EmbeddingHashTableConfig,
    EntryConfig,
    EntryDump,
    HashTable,
    HashTableConfigInstance,
    OneBitCompressor,
    Progress,
    SgdOptimizer,
    SlotExpireTimeConfig,
    ZerosInitializer,
    iterate_table_and_apply,
    restore_table,
    save_table,
)
from shoal.table.checkpoint import naming, single


def table_of(n=200, dim=3, name="t", saver_parallel=-1, **options):
    table = HashTable(dim, name=name, seed=0, optimizer="adagrad", **options)
    table.saver_parallel = saver_parallel
    if n:
        ids = torch.arange(n) * 7919 - 500
        table.apply_gradients(ids, torch.randn(n, dim, generator=torch.Generator().manual_seed(n)), 1, req_time=1000)
    return table


def all_rows(table):
    rows = {}
    for stripe in range(table._native.num_stripes):
        rows.update({EntryDump.FromString(e).id: e for e in _core.walk_entries(table._native, stripe, 0, 1 << 30)[0]})
    return rows


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saver_parallel", "rows", "files"),
    [(-1, 0, 1), (-1, 999_999, 1), (0, 2_000_000, 2), (-1, 9_000_000, 4), (7, 0, 7), (1, 9_000_000, 1)],
)
def test_the_number_of_shards(saver_parallel, rows, files):
    assert naming.shard_count(saver_parallel, rows) == files


def test_folders_are_made_and_nothing_else_is_left(tmp_path):
    table_of(saver_parallel=2).save(str(tmp_path / "a" / "b" / "t"))
    assert sorted(os.listdir(tmp_path / "a" / "b")) == ["t-00000-of-00002", "t-00001-of-00002", "t.manifest"]


def test_an_empty_table_is_a_checkpoint_too(tmp_path):
    table_of(0, saver_parallel=3).save(str(tmp_path / "t"))
    table = table_of(5).restore(str(tmp_path / "t"))
    assert table.size() == 0
    assert table.max_update_time == 1000


def test_more_shards_than_stripes(tmp_path):
    table = table_of(500, saver_parallel=100)
    table.save(str(tmp_path / "t"))
    assert len(os.listdir(tmp_path)) == 101  # the files and the manifest
    assert all_rows(table_of(0).restore(str(tmp_path / "t"))) == all_rows(table)


def test_a_path_may_hold_anything_that_a_pattern_would_eat(tmp_path):
    base = tmp_path / "a[1]*?" / "t[0-9]*"
    table = table_of()
    save_table(table, base)
    restore_table(other := table_of(0), base)
    assert all_rows(other) == all_rows(table)


def test_a_relative_basename_lies_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = table_of().save("t")
    assert table_of(0).restore("t").size() == table.size()


def save_shards(tmp_path, count=2):
    table = table_of(saver_parallel=count)
    table.save(str(tmp_path / "t"))
    return table


def expect_refusal(tmp_path, match, error=DataError):
    table = table_of(9, name="target")
    before = all_rows(table)
    with pytest.raises(error, match=match):
        table.restore(str(tmp_path / "t"))
    assert all_rows(table) == before
    assert table.max_update_time == 1000


def test_files_of_another_form_are_ignored(tmp_path):
    table = save_shards(tmp_path)
    strangers = [
        "t-00000-of-00002-tmp-0123",
        "t-0-of-2",
        "t-00000-of-00002.bak",
        "t-extra",
        "t-00000of00002",
        "xt-00000-of-00009",
    ]
    for name in strangers:
        (tmp_path / name).write_bytes(b"no record")
    (tmp_path / "t-00005-of-00009").mkdir()
    assert all_rows(table_of(0).restore(str(tmp_path / "t"))) == all_rows(table)


def test_no_files_at_all(tmp_path):
    expect_refusal(tmp_path, "table 'target': there is no checkpoint", CheckpointNotFoundError)
    expect_refusal(tmp_path / "nowhere", "there is no checkpoint", FileNotFoundError)
    (tmp_path / "t-00000-of-00001-tmp-77").write_bytes(b"")
    expect_refusal(tmp_path, "there is no checkpoint", ValueError)


def test_shards_of_different_counts(tmp_path):
    save_shards(tmp_path, 2)
    (tmp_path / "t.manifest").unlink()  # as if another program had written them
    save_shards(tmp_path, 3)
    expect_refusal(tmp_path, "mixes shards of 2 and 3 files")


def test_an_index_that_is_not_below_the_count(tmp_path):
    save_shards(tmp_path)
    os.rename(tmp_path / "t-00001-of-00002", tmp_path / "t-00002-of-00002")
    expect_refusal(tmp_path, "shard index 2 is not below the count 2")


def test_a_missing_index(tmp_path):
    save_shards(tmp_path, 3)
    os.unlink(tmp_path / "t-00001-of-00003")
    expect_refusal(tmp_path, "1 of 3 shards are missing, the first is t-00001-of-00003")


def test_the_files_that_a_save_replaced_must_be_names(tmp_path):
    save_shards(tmp_path, 2)
    saved = read_saved(tmp_path / "t.manifest")
    for replaced in (5, [[1]]):
        fields = {**saved.fields, "replaces": replaced}
        write_saved(tmp_path / "t.manifest", fields, saved.files, saved.moves)
        expect_refusal(tmp_path, "replaces must be a list of file names, got")


def test_an_automatic_save_replaces_one_of_another_count(tmp_path):
    save_shards(tmp_path, 3)
    table = table_of(20)
    table.save(str(tmp_path / "t"))
    assert sorted(os.listdir(tmp_path)) == ["t-00000-of-00001", "t.manifest"]
    assert all_rows(table_of(0).restore(str(tmp_path / "t"))) == all_rows(table)


def test_an_id_that_comes_twice_is_refused(tmp_path):
    save_shards(tmp_path, 1)
    whole = (tmp_path / "t-00000-of-00001").read_bytes()
    (tmp_path / "t-00000-of-00001").write_bytes(whole + whole)
    expect_refusal(tmp_path, f"has {2 * len(whole)} bytes, its manifest says {len(whole)}")
    (tmp_path / "t.manifest").unlink()
    expect_refusal(tmp_path, "200 of the 400 records repeat the id of another record")


def test_random_sleep_delays_but_does_not_harm(tmp_path):
    table = table_of(saver_parallel=2).save(str(tmp_path / "t"), random_sleep_ms=30)
    assert all_rows(table_of(0).restore(str(tmp_path / "t"))) == all_rows(table)


# --- expiry -----------------------------------------------------------------------------------------------------------


def test_stale_rows_are_left_out_and_live_on_in_the_table(tmp_path):
    table = HashTable(1, name="e", optimizer="sgd", expire_after="2d")
    for id, seconds in ((1, 827200), (2, 827201), (3, 1000000)):
        table.assign(torch.tensor([id]), torch.ones(1, 1), req_time=seconds)
    table.save(str(tmp_path / "t"))
    other = HashTable(1, name="f", optimizer="sgd").restore(str(tmp_path / "t"))
    assert other.contains(torch.tensor([1, 2, 3])).tolist() == [False, True, True]
    assert table.size() == 3
    assert other.max_update_time == 1000000


def test_expiry_is_by_slot(tmp_path):
    config = EmbeddingHashTableConfig(
        entry_config=EntryConfig(segments=[CombineAsSegment(1, ZerosInitializer(), SgdOptimizer(), None)]),
        cuckoo=CuckooEmbeddingHashTableConfig(),
        slot_expire_time_config=SlotExpireTimeConfig(
            default_expire_time=1, slot_expire_times=[{"slot": 5, "expire_time": 3}, {"slot": 32767, "expire_time": 0}]
        ),
    )
    table = HashTable.from_config(HashTableConfigInstance(config, [1.0]), name="slots")
    day = 86400
    ids = torch.tensor([1, (5 << 48) + 1, -1])
    table.assign(ids, torch.ones(3, 1), req_time=0)
    table.assign(torch.tensor([2, -2]), torch.ones(2, 1), req_time=2 * day)
    table.save(str(tmp_path / "t"))
    restored = HashTable.from_config(HashTableConfigInstance(config, [1.0]), name="r").restore(str(tmp_path / "t"))
    assert set(all_rows(restored)) == {(5 << 48) + 1, 2}  # slot 32767 expires at once


# --- damaged files ----------------------------------------------------------------------------------------------------


def test_every_truncation_is_refused_and_the_table_stays(tmp_path):
    save_shards(tmp_path, 1)
    path = tmp_path / "t-00000-of-00001"
    whole = path.read_bytes()
    record = len(whole) // 200
    for size in {1, 5, 11, 12, 13, record - 1, record + 1, len(whole) // 2 + 1, len(whole) - 5, len(whole) - 1}:
        path.write_bytes(whole[:size])
        expect_refusal(tmp_path, "t-00000-of-00001: record .*truncated")


@given(st.data())
def test_any_flipped_bit_is_refused(tmp_path_factory, data):
    tmp_path = tmp_path_factory.mktemp("flip")
    table_of(30, saver_parallel=1).save(str(tmp_path / "t"))
    path = tmp_path / "t-00000-of-00001"
    whole = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    expect_refusal(tmp_path, "checksum|truncated")


@given(st.binary(min_size=1, max_size=200))
def test_an_alien_file_is_refused(tmp_path_factory, content):
    tmp_path = tmp_path_factory.mktemp("alien")
    (tmp_path / "t-00000-of-00001").write_bytes(content)
    expect_refusal(tmp_path, "t-00000-of-00001")


def framed(payload):
    header = len(payload).to_bytes(8, "little")
    mask = lambda c: ((((c >> 15) | (c << 17)) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")  # noqa: E731
    return header + mask(_core.crc32c(header)) + payload + mask(_core.crc32c(payload))


@given(st.binary(max_size=120))
def test_records_with_good_checksums_and_any_bytes_never_crash(tmp_path_factory, payload):
    tmp_path = tmp_path_factory.mktemp("bytes")
    (tmp_path / "t-00000-of-00001").write_bytes(framed(payload))
    expect_refusal(tmp_path, "record 0: ")


@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_damaged_messages_with_good_checksums_never_crash(tmp_path_factory, rng, changes):
    tmp_path = tmp_path_factory.mktemp("fuzz")
    source = table_of(3)
    records = [bytearray(e) for e in all_rows(source).values()]
    for record in records:
        for _ in range(changes):
            kind, place = rng.randrange(3), rng.randrange(len(record))
            if kind == 0:
                record[place] = rng.randrange(256)
            elif kind == 1:
                del record[place : place + rng.randrange(8)]
            else:
                record[place:place] = bytes(rng.randrange(256) for _ in range(rng.randrange(8)))
            record = record or bytearray(b"\0")
    (tmp_path / "t-00000-of-00001").write_bytes(b"".join(framed(bytes(r)) for r in records))
    table = table_of(9)
    before = all_rows(table)
    try:
        restore_table(table, tmp_path / "t", strict=rng.random() < 0.5)
    except DataError:
        assert all_rows(table) == before
    else:
        assert table.size() == 3
        assert all(len(EntryDump.FromString(e).num) == 3 for e in all_rows(table).values())


def test_a_length_that_is_not_there_allocates_nothing(tmp_path):
    header = (1 << 62).to_bytes(8, "little")
    crc = _core.crc32c(header)
    masked = ((((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")
    (tmp_path / "t-00000-of-00001").write_bytes(header + masked + b"x" * 100)
    expect_refusal(tmp_path, "truncated")


def test_one_bad_shard_of_many_leaves_the_table(tmp_path):
    save_shards(tmp_path, 4)
    path = tmp_path / "t-00002-of-00004"
    path.write_bytes(path.read_bytes()[:-1])
    expect_refusal(tmp_path, "t-00002-of-00004")


def test_a_file_that_may_not_be_read_is_an_os_error(tmp_path):
    save_shards(tmp_path, 1)
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    os.chmod(tmp_path / "t-00000-of-00001", 0)
    expect_refusal(tmp_path, "t-00000-of-00001", PermissionError)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_save_that_cannot_write_leaves_the_old_one(tmp_path, monkeypatch):
    table = save_shards(tmp_path, 1)
    before = (tmp_path / "t-00000-of-00001").read_bytes()
    monkeypatch.setattr(single, "temporary_path", lambda path: str(tmp_path / "no" / "such" / "folder"))
    table.assign(torch.tensor([1]), torch.zeros(1, 3))
    with pytest.raises(FileNotFoundError, match="no/such/folder"):
        table.save(str(tmp_path / "t"))
    assert (tmp_path / "t-00000-of-00001").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["t-00000-of-00001", "t.manifest"]


# --- other numbers of shards ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 3), (4, 3), (3, 5)])
def test_what_w_processes_saved_any_number_reads(saved_on, loaded_on, tmp_path):
    whole = table_of(400)
    rows = all_rows(whole)
    bases = []
    for rank in range(saved_on):
        part = table_of(0, name=f"part{rank}", saver_parallel=1 + rank)
        whole.save(str(tmp_path / "all"))
        restore_table(part, tmp_path / "all", shard=(rank, saved_on))
        assert set(all_rows(part)) == {id for id in rows if id % saved_on == rank}
        bases.append(tmp_path / f"rank{rank}")
        save_table(part, bases[-1])
    together = {}
    for rank in range(loaded_on):
        part = table_of(7, name=f"new{rank}")
        restore_table(part, bases, shard=(rank, loaded_on))
        assert all(id % loaded_on == rank for id in all_rows(part))
        together.update(all_rows(part))
    assert together == rows


def test_an_empty_rank_zero_stores_nothing(tmp_path):
    table_of(100).save(str(tmp_path / "t"))
    parts = [table_of(0, name=f"p{r}") for r in range(5)]
    for rank, part in enumerate(parts):
        restore_table(part, tmp_path / "t", shard=(rank, 5, True))
    assert parts[0].size() == 0
    assert sum(part.size() for part in parts) == 100
    assert all(id % 4 == 2 for id in all_rows(parts[3]))


@pytest.mark.parametrize("shard", [(3, 3), (-1, 2), (0, 0), (1,), (0, 1, 2, 3)])
def test_a_shard_that_cannot_be_is_refused(shard, tmp_path):
    table_of(10).save(str(tmp_path / "t"))
    with pytest.raises(ConfigError, match="shard must be"):
        restore_table(table_of(0), tmp_path / "t", shard=shard)


# --- quantization scale -----------------------------------------------------------------------------------------------


def hash_net_table(name):
    segments = [
        CombineAsSegment(1, ZerosInitializer(), SgdOptimizer(), None),
        CombineAsSegment(1, ZerosInitializer(), SgdOptimizer(), OneBitCompressor(200, 0.2)),
    ]
    config = EmbeddingHashTableConfig(
        entry_config=EntryConfig(segments=segments), cuckoo=CuckooEmbeddingHashTableConfig()
    )
    return HashTable.from_config(HashTableConfigInstance(config, [0.0, 0.0]), name=name)


def test_the_scale_of_hash_net_segments_survives(tmp_path):
    table = hash_net_table("h")
    ids = torch.tensor([1])
    table.assign(ids, torch.full((1, 2), 0.7))
    table.apply_gradients(ids, torch.ones(1, 2), global_step=600)
    assert table.lookup(ids)[0, 1].item() == pytest.approx(0.17707033, abs=1e-6)
    table.save(str(tmp_path / "t"))
    other = hash_net_table("another name").restore(str(tmp_path / "t"))
    assert torch.equal(other.lookup(ids), table.lookup(ids))
    assert other._native.scales() == table._native.scales()


def test_a_checkpoint_without_a_scale_is_restored_and_a_damaged_one_is_refused(tmp_path):
    table = hash_net_table("h").assign(torch.tensor([1]), torch.ones(1, 2))
    table.save(str(tmp_path / "t"))
    sidecar = tmp_path / "t.scale.json"
    sidecar.write_bytes(sidecar.read_bytes().replace(b"1.", b"2."))
    with pytest.raises(DataError, match=r"table 'g': .*scale.json"):
        hash_net_table("g").restore(str(tmp_path / "t"))
    (tmp_path / "t.manifest").unlink()  # as if another program had written the rest
    scales = '{"format": "shoal.scales", "version": 1, "scales": {"h": [%s]}}'
    large = [scales % f"1, 1{'0' * digits}" for digits in (400, 5000)]  # json refuses the second with a ValueError
    for content in ("", "{}", "[]", scales % "1", scales % "1, NaN", *large, "\udcff"):
        sidecar.write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(DataError, match=r"table 'g': .*scale"):
            hash_net_table("g").restore(str(tmp_path / "t"))
    sidecar.unlink()
    assert hash_net_table("g").restore(str(tmp_path / "t")).size() == 1


# --- iteration --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nshards", "limit"), [(1, 1), (3, 7), (4, 1000), (64, 3), (200, 2)])
def test_iteration_sees_every_entry_once(nshards, limit):
    table = table_of(150)
    seen = []
    iterate_table_and_apply(table, seen.append, limit, nshards)
    entries = [e for batch in seen for e in batch]
    assert sorted(entries) == sorted(all_rows(table).values())
    assert all(1 <= len(batch) <= limit for batch in seen)


def test_save_as_tensor_fills_its_limit_until_the_part_ends():
    table = table_of(300)
    offset, first = table.save_as_tensor(0, 1, 299, 0)
    assert len(first) == 299
    offset, rest = table.save_as_tensor(0, 1, 299, offset)
    assert len(rest) == 1
    assert table.save_as_tensor(0, 1, 299, offset) == (offset, [])
    for arguments in [(1, 1, 5, 0), (-1, 2, 5, 0), (0, 0, 5, 0), (0, 1, 0, 0), (0, 1, 5, -1)]:
        with pytest.raises(ConfigError, match="table 't'"):
            table.save_as_tensor(*arguments)
    assert table.save_as_tensor(0, 1, 5, (1 << 63) - 1)[1] == []


# --- threads ----------------------------------------------------------------------------------------------------------


def test_rows_saved_while_training_goes_on_are_whole(tmp_path):
    n, dim = 20000, 8
    table = HashTable(dim, optimizer="sgd", initializer="zeros", name="busy")
    table.saver_parallel = 3
    ids = torch.arange(n)
    table.assign(ids, torch.zeros(n, dim))
    stop = threading.Event()

    def write():
        value = 0.0
        while not stop.is_set():
            value += 1
            table.assign(ids, torch.full((n, dim), value), req_time=int(value))
            table.erase(ids[:100])

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for round in range(5):
            base = str(tmp_path / f"t{round}")
            table.save(base)
            saved = HashTable(dim, optimizer="sgd", name="saved").restore(base)
            rows = saved.lookup(ids)
            assert torch.equal(rows, rows[:, :1].expand(-1, dim))  # no row is torn
            assert saved.size() >= n - 100
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)


def test_readers_see_the_old_rows_or_the_new_during_a_restore(tmp_path):
    n = 5000
    ids = torch.arange(n)
    table = HashTable(2, optimizer="sgd", name="swap")
    for value in (1.0, 2.0):
        table.assign(ids, torch.full((n, 2), value)).save(str(tmp_path / f"v{value:.0f}"))
    seen, stop, failures = set(), threading.Event(), []

    def read():
        while not stop.is_set():
            values = table.lookup(ids[:64]).unique().tolist()
            seen.update(values)
            if len(values) != 1 or values[0] == 0:
                failures.append(values)

    reader = threading.Thread(target=read)
    reader.start()
    deadline = time.monotonic() + 60
    try:
        rounds = 0
        while rounds < 20 or (seen != {1.0, 2.0} and time.monotonic() < deadline):  # readers may starve
            table.restore(str(tmp_path / f"v{1 + rounds % 2}"))
            rounds += 1
    finally:
        stop.set()
        reader.join(120)
    assert not failures
    assert seen == {1.0, 2.0}


def test_progress_counts_and_cancels(tmp_path):
    table = table_of(1000, saver_parallel=2)
    progress = Progress()
    save_table(table, tmp_path / "t", progress=progress)
    assert progress.rows == 1000
    restore_table(table, tmp_path / "t", progress=(reading := Progress()))
    assert reading.rows == 1000
    cancelled = Progress()
    cancelled.cancel()
    with pytest.raises(CancelledError, match="table 't'"):
        save_table(table, tmp_path / "u", progress=cancelled)
    with pytest.raises(CancelledError):
        restore_table(table, tmp_path / "t", progress=cancelled)
    assert sorted(os.listdir(tmp_path)) == ["t-00000-of-00002", "t-00001-of-00002", "t.manifest"]
    assert table.size() == 1000


# --- processes --------------------------------------------------------------------------------------------------------

SAVER = """
import sys, torch
from shoal.table import HashTable
table = HashTable(8, name="t", optimizer="adagrad")
table.saver_parallel = 2
table.assign(torch.arange(200_000), torch.full((200_000, 8), 1.0))
table.save(sys.argv[1])
print("saved", flush=True)
value = 1.0
while True:
    value += 1
    table.assign(torch.arange(200_000), torch.full((200_000, 8), value))
    table.save(sys.argv[1])
"""


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.13])
def test_a_process_killed_during_a_save_leaves_a_checkpoint(delay, tmp_path):
    base = str(tmp_path / "t")
    process = subprocess.Popen([sys.executable, "-c", SAVER, base], stdout=subprocess.PIPE, env=os.environ)
    try:
        assert process.stdout.readline() == b"saved\n"
        time.sleep(delay + random.random() * 0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(120)
        process.stdout.close()
    table = HashTable(8, name="t", optimizer="adagrad").restore(base)
    assert table.size() == 200_000
    rows = table.lookup(torch.arange(200_000))
    assert torch.equal(rows, rows[:, :1].expand(-1, 8))


def test_a_save_that_another_replaces_while_it_is_read_is_read_again(tmp_path):
    base = str(tmp_path / "t")
    HashTable(2, name="t").assign([1], [[1.0, 1.0]]).save(base)
    tried = []

    def read():
        tried.append(len(tried))
        if len(tried) == 2:
            return "read"
        HashTable(2, name="t").assign([1], [[2.0, 2.0]]).save(base)
        raise DataError("its files are those of the next save")

    assert read_newest([base], read) == "read"

    def fail():
        raise DataError("damaged")

    with pytest.raises(DataError, match="damaged"):  # and nothing replaced it
        read_newest([base], fail)


def test_a_process_may_restore_while_another_saves(tmp_path):
    base = str(tmp_path / "t")
    process = subprocess.Popen([sys.executable, "-c", SAVER, base], stdout=subprocess.PIPE, env=os.environ)
    try:
        assert process.stdout.readline() == b"saved\n"
        for _ in range(5):
            table = HashTable(8, name="t", optimizer="adagrad").restore(base)
            assert table.size() == 200_000
    finally:
        process.kill()
        process.wait(120)
        process.stdout.close()


def test_the_share_of_a_rank_in_a_manifest_is_checked(tmp_path):
    table, base = table_of(), str(tmp_path / "t")
    table.save(base)
    saved, before = read_saved(f"{base}.manifest"), all_rows(table)
    table.rank_share = (0, 1, False)
    for wrong in (5, "abc", [1, 2], [0, "1", 0], [0, 1.5, 0], [[0], 1, 0], None):
        write_saved(saved.manifest, {**saved.fields, "rank_share": wrong}, saved.files)
        with pytest.raises(DataError, match="rank_share must be three integers, got"):
            table.restore(base)
    write_saved(saved.manifest, {**saved.fields, "rank_share": [0, 1 << 60, 0]}, saved.files)
    with pytest.raises(DataError, match=f"has the rows of rank 0 of {1 << 60}, but this table is for rank 0 of 1"):
        table.restore(base)
    assert all_rows(table) == before
    write_saved(saved.manifest, {**saved.fields, "rank_share": [0, 1, 0]}, saved.files)
    assert all_rows(table.restore(base)) == before
    assert all_rows(table_of(0).restore(base)) == before  # a table that is nobody's share takes any
