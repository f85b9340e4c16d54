"""Checkpoints of many tables: the native multi table's files, filters' files, and the listeners of a training loop."""

import os
import struct

import cramjam
import numpy as np
import pytest
import torch
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from shoal import _core
from shoal.errors import DataError
from shoal.table import (
    CheckpointNotFoundError,
    CkptInfo,
    CombineAsSegment,
    CuckooEmbeddingHashTableConfig,
    EmbeddingHashTableConfig,
    EntryConfig,
    EntryDump,
    Fp32Compressor,
    HashFilterCheckpointRestorerListener,
    HashFilterCheckpointSaverListener,
    HashFilterSplitDataDump,
    HashFilterSplitMetaDump,
    HashTable,
    HashTableCheckpointRestorerListener,
    HashTableCheckpointSaverListener,
    HashTableConfigInstance,
    HashTableRestorerSaverListener,
    MultiHashTable,
    MultiHashTableCheckpointRestorerListener,
    MultiHashTableCheckpointSaverListener,
    MultiHashTableMetadata,
    MultiHashTableRestorerSaverListener,
    OneBitCompressor,
    SgdOptimizer,
    SlotExpireTimeConfig,
    ZerosInitializer,
    create_dummy_hash_filter,
    create_hash_filter,
    create_probabilistic_filter,
    hash_table_from_config,
    latest_checkpoint,
    reset_registry,
    restore_hash_filter,
    restore_incremental,
    save_hash_filter,
    save_incremental,
)
from shoal.table import test_hash_table as small_table


@pytest.fixture(autouse=True)
def no_tables_of_other_tests():
    reset_registry()
    yield
    reset_registry()


def config(dim=2, days=None, compressor=None, extra=None):
    message = EmbeddingHashTableConfig(
        entry_config=EntryConfig(
            segments=[CombineAsSegment(dim, ZerosInitializer(), SgdOptimizer(), compressor or Fp32Compressor())]
        ),
        cuckoo=CuckooEmbeddingHashTableConfig(),
    )
    if days is not None:
        message.slot_expire_time_config.CopyFrom(SlotExpireTimeConfig(default_expire_time=days))
    return HashTableConfigInstance(message, [1.0], extra)


def multi(dims, suffix="m", **options):
    return MultiHashTable.from_configs({n: config(d) for n, d in dims.items()}, name_suffix=suffix, **options)


def fill(table, count=40):
    writes = {}
    for name, member in table.tables.items():
        ids = torch.arange(count) * len(name) - 7
        writes[name] = (ids, torch.randn(count, member.dim_size, generator=torch.Generator().manual_seed(count)))
    return table.assign(writes, req_time=100)


def all_rows(table):
    rows = {}
    for stripe in range(table._native.num_stripes):
        rows.update({EntryDump.FromString(e).id: e for e in _core.walk_entries(table._native, stripe, 0, 1 << 30)[0]})
    return rows


def contents(table):
    return {name: all_rows(member) for name, member in table.tables.items()}


def blocks(path):
    """The framed stream inside the blocks of a data file, by another Snappy."""
    data, plain, sizes = path.read_bytes(), b"", []
    while data:
        (length,) = struct.unpack(">I", data[:4])
        sizes.append(len(block := bytes(cramjam.snappy.decompress_raw(data[4 : 4 + length]))))
        plain += block
        data = data[4 + length :]
    return plain, sizes


def payloads(stream):
    out = []
    while stream:
        (length,) = struct.unpack("<Q", stream[:8])
        out.append(stream[12 : 12 + length])
        stream = stream[16 + length :]
    return out


# --- the native multi table -------------------------------------------------------------------------------------------


def test_data_files_hold_the_tables_in_order_of_their_names(tmp_path):
    table = fill(multi({"b": 2, "a": 3, "cc": 1}, saver_parallel=2))
    table.save(str(tmp_path / "m"))
    files = [f"m{k}-0000{i}-of-00002" for i in range(2) for k in ("", ".meta")]
    assert sorted(os.listdir(tmp_path)) == sorted([*files, "m.manifest"])
    total = {}
    for i in range(2):
        stream, sizes = blocks(tmp_path / f"m-0000{i}-of-00002")
        assert all(size <= 256 * 1024 for size in sizes)
        records = payloads(stream)
        meta = [
            MultiHashTableMetadata.FromString(r) for r in _core.read_records(str(tmp_path / f"m.meta-0000{i}-of-00002"))
        ]
        assert [m.table_name for m in meta] == ["a", "b", "cc"]
        assert len(records) == sum(m.num_entries for m in meta)
        for m in meta:
            mine, records = records[: m.num_entries], records[m.num_entries :]
            for entry in mine:
                assert all_rows(table.tables[m.table_name])[EntryDump.FromString(entry).id] == entry
            total[m.table_name] = total.get(m.table_name, 0) + m.num_entries
    assert total == table.feature_stat(str(tmp_path / "m")) == {"a": 40, "b": 40, "cc": 40}


def test_a_checkpoint_of_several_blocks_restores(tmp_path):
    table = fill(multi({"a": 16, "b": 8}), 6000)
    table.save(str(tmp_path / "m"))
    assert len(blocks(tmp_path / "m-00000-of-00001")[1]) > 2
    other = fill(multi({"b": 8, "a": 16}, "other"), 10)
    other.restore(str(tmp_path / "m"))
    assert contents(other) == contents(table)
    assert [t.max_update_time for t in other.tables.values()] == [100, 100]


def test_blocks_of_any_size_are_read(tmp_path):
    table = fill(multi({"a": 2, "b": 2}))
    table.save(str(tmp_path / "m"))
    path = tmp_path / "m-00000-of-00001"
    (tmp_path / "m.manifest").unlink()  # as if another program had written the files
    stream, _ = blocks(path)
    for size in (1, 7, 100, len(stream)):
        cut = [bytes(cramjam.snappy.compress_raw(stream[i : i + size])) for i in range(0, len(stream), size)]
        path.write_bytes(b"".join(struct.pack(">I", len(c)) + c for c in [*cut, b"\0"]))
        other = multi({"a": 2, "b": 2}, f"o{size}")
        other.restore(str(tmp_path / "m"))
        assert contents(other) == contents(table)


def test_tables_are_matched_by_name(tmp_path, caplog):
    fill(multi({"a": 2, "b": 2, "z": 5})).save(str(tmp_path / "m"))
    other = fill(multi({"b": 2, "new": 3}, "other"), 5)
    before = contents(other)
    other.restore(str(tmp_path / "m"))
    assert len(contents(other)["b"]) == 40
    assert contents(other)["new"] == before["new"]
    assert "has no table 'new'" in caplog.text


def test_restoring_clears_what_the_checkpoint_does_not_have(tmp_path):
    table = fill(multi({"a": 2}), 10)
    table.save(str(tmp_path / "m"))
    table.assign({"a": (torch.tensor([10**6]), torch.ones(1, 2))})
    table.restore(str(tmp_path / "m"))
    assert table.size() == 10


def test_each_table_expires_by_its_own_rule_or_that_of_the_first(tmp_path):
    configs = {"a": config(), "b": config(days=1), "c": config(days=3)}
    table = MultiHashTable.from_configs(configs, name_suffix="m")
    day = 86400
    for name in configs:
        table.assign({name: (torch.tensor([1]), torch.ones(1, 2))}, req_time=0)
        table.assign({name: (torch.tensor([2]), torch.ones(1, 2))}, req_time=2 * day)
    table.save(str(tmp_path / "m"))
    assert table.feature_stat(str(tmp_path / "m")) == {"a": 1, "b": 1, "c": 2}
    assert table.size() == 6


def test_the_scales_of_all_tables_survive(tmp_path):
    def build(suffix):
        configs = {n: config(1, compressor=OneBitCompressor(10, 0.2)) for n in "ab"} | {"plain": config(1)}
        return MultiHashTable.from_configs(configs, name_suffix=suffix)

    table = build("m")
    ids, grads = torch.tensor([1]), torch.ones(1, 1)
    table.apply_gradients({"a": (ids, grads)}, global_step=600)
    table.apply_gradients({"b": (ids, grads)}, global_step=1000)
    table.save(str(tmp_path / "m"))
    other = build("o").restore(str(tmp_path / "m"))
    assert [t._native.scales() for t in other.tables.values()] == [t._native.scales() for t in table.tables.values()]
    assert other.tables["a"]._native.scales() != [1.0]


def expect_refusal(tmp_path, match, dims=None):
    table = fill(multi(dims or {"a": 2, "b": 2}, f"r{np.random.default_rng().integers(1 << 60)}"), 3)
    before = contents(table)
    with pytest.raises(DataError, match=match):
        table.restore(str(tmp_path / "m"))
    assert contents(table) == before


def test_files_that_do_not_belong_together(tmp_path):
    expect_refusal(tmp_path, "there is no checkpoint")
    table = fill(multi({"a": 2, "b": 2}, saver_parallel=2))
    table.save(str(tmp_path / "m"))
    expect_refusal(tmp_path, "the table has dim 4", {"a": 2, "b": 4})
    (tmp_path / "m.manifest").unlink()  # as if another program had written the files
    meta = tmp_path / "m.meta-00001-of-00002"
    kept = meta.read_bytes()
    for counts in ((0, 0), (1, 1 << 20), (1 << 61, 1 << 61), (1 << 63, 1)):
        records = [
            MultiHashTableMetadata(table_name=n, num_entries=c).SerializeToString()
            for n, c in zip("ab", counts, strict=True)
        ]
        meta.unlink()
        _core.write_records(str(tmp_path / "x"), str(meta), records)
        expect_refusal(tmp_path, "meta file|entries|cannot have")
    meta.unlink()
    _core.write_records(str(tmp_path / "x"), str(meta), [b"\xff\xff"])
    expect_refusal(tmp_path, "not a MultiHashTableMetadata")
    meta.write_bytes(kept[:-3])
    expect_refusal(tmp_path, "truncated")
    meta.unlink()
    expect_refusal(tmp_path, "1 of 2 shards are missing")
    with pytest.raises(CheckpointNotFoundError):
        table.feature_stat(str(tmp_path / "nothing"))


@given(st.randoms(use_true_random=False))
def test_a_damaged_data_file_never_crashes(tmp_path_factory, rng):
    tmp_path = tmp_path_factory.mktemp("damage")
    reset_registry()
    table = fill(multi({"a": 2, "b": 2}))
    table.save(str(tmp_path / "m"))
    path = tmp_path / "m-00000-of-00001"
    whole = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(whole))
        if rng.random() < 0.6:
            whole[place] ^= 1 << rng.randrange(8)
        else:
            del whole[place : place + rng.randrange(1, 40)]
    path.write_bytes(whole)
    target = fill(multi({"a": 2, "b": 2}, "target"), 3)
    before = contents(target)
    try:
        target.restore(str(tmp_path / "m"))
    except DataError:
        assert contents(target) == before
    else:
        assert contents(target) == contents(table)  # another encoding of the same bytes


def test_a_block_that_claims_to_be_huge_allocates_nothing(tmp_path):
    fill(multi({"a": 2, "b": 2})).save(str(tmp_path / "m"))
    path = tmp_path / "m-00000-of-00001"
    path.write_bytes(struct.pack(">I", 6) + b"\xff\xff\xff\xff\x0f\0")
    expect_refusal(tmp_path, "claims more bytes than it can hold")
    path.write_bytes(struct.pack(">I", 0xFFFFFFFF) + b"abc")
    expect_refusal(tmp_path, "4294967295 bytes announced, 3 are left")


def test_a_multi_table_in_increments(tmp_path):
    table = fill(multi({"a": 2, "b": 3}))
    save_incremental(table, tmp_path)
    table.assign({"b": (torch.tensor([5]), torch.zeros(1, 3))})
    assert save_incremental(table, tmp_path).rows == 1
    other = multi({"a": 2, "b": 3}, "other")
    restore_incremental(other, tmp_path)
    assert contents(other) == contents(table)
    assert latest_checkpoint(tmp_path).kind == "delta"


# --- listeners --------------------------------------------------------------------------------------------------------


def one(id, value=1.0):
    return torch.tensor([id]), torch.full((1, 2), float(value))


def test_tables_are_saved_beside_the_model_and_come_back(tmp_path):
    base = str(tmp_path / "model.ckpt")
    tables = [small_table(2, name_suffix=s).assign(*one(i)) for i, s in enumerate(["a", "x/y:0"])]
    HashTableCheckpointSaverListener(base).before_save(7)
    folder = tmp_path / "model.ckpt-7.assets"
    files = {name for name in os.listdir(folder) if not name.startswith("manifest.")}
    bases = ["MonolithHashTable_a", "MonolithHashTable_x-y-0"]
    assert files == {f"{base}{end}" for base in bases for end in ("-00000-of-00001", ".manifest")}
    for table in tables:
        table.clear()
    assert HashTableCheckpointRestorerListener(base).before_restore()
    assert [table.size() for table in tables] == [1, 1]
    assert tables[1].lookup(torch.tensor([1])).tolist() == [[1, 1]]


def test_the_newest_complete_step_is_restored(tmp_path):
    base = str(tmp_path / "model")
    table = small_table(2, name_suffix="a")
    for step in (1, 20, 3):
        table.assign(*one(1, step))
        HashTableCheckpointSaverListener(base).before_save(step)
    restorer = HashTableCheckpointRestorerListener(base)
    assert restorer.before_restore()
    assert table.lookup(torch.tensor([1]))[0, 0] == 3  # written last, though it is not the highest step
    path = tmp_path / "model-3.assets" / "MonolithHashTable_a-00000-of-00001"
    path.write_bytes(path.read_bytes()[:-1])
    restorer.before_restore()
    assert table.lookup(torch.tensor([1]))[0, 0] == 20
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model-1"\nall_model_checkpoint_paths: "model-20"\n')
    restorer.before_restore()
    assert table.lookup(torch.tensor([1]))[0, 0] == 1
    (tmp_path / "checkpoint").write_text(f'# text\n  model_checkpoint_path: "{tmp_path}/mo\\144el-20"\n')
    restorer.before_restore()
    assert table.lookup(torch.tensor([1]))[0, 0] == 20


def test_without_a_checkpoint_a_single_folder_is_taken_and_several_are_not(tmp_path):
    base = str(tmp_path / "model")
    table = small_table(2, name_suffix="a").assign(*one(1))
    restorer = HashTableCheckpointRestorerListener(base)
    assert not restorer.before_restore()
    table.save(str(tmp_path / "other-5.assets" / table.name))
    table.clear()
    assert restorer.before_restore()
    assert table.size() == 1
    (tmp_path / "more.assets").mkdir()
    table.clear()
    assert not restorer.before_restore()
    assert table.size() == 0


def test_a_table_is_found_under_its_older_names(tmp_path):
    base, folder = str(tmp_path / "model"), tmp_path / "model-1.assets"
    legacy, merged = "af5bbe003827b45d95a8e6a6c55ec030", "1cc202e2a6834a029ebbf8c1dfb0177c"
    source = small_table(2, name_suffix="source").assign(*one(3))
    reset_registry()
    table = hash_table_from_config(config(extra=["old", legacy]), name_suffix=f"{merged}_2")
    restorer = HashTableCheckpointRestorerListener(base)
    source.save(str(folder / "nothing of ours"))
    with pytest.raises(ValueError, match="unable to find table checkpoint"):
        restorer.before_restore()
    source.save(str(folder / f"MonolithHashTable_{legacy}_2"))
    restorer.before_restore()
    assert table.contains(torch.tensor([3])).item()
    source.clear().assign(*one(4)).save(str(folder / "old"))
    restorer.before_restore()
    assert table.contains(torch.tensor([4])).item()  # the first name with files wins
    source.clear().assign(*one(5)).save(str(folder / table.name))
    restorer.before_restore()
    assert table.contains(torch.tensor([5])).item()


def test_a_missing_table_leaves_the_others_as_they_were(tmp_path):
    base = str(tmp_path / "model")
    first = small_table(2, name_suffix="a").assign(*one(1))
    HashTableCheckpointSaverListener(base).before_save(1)
    small_table(2, name_suffix="b")
    first.assign(*one(2))
    with pytest.raises(ValueError, match="unable to find table checkpoint: table 'MonolithHashTable_b'"):
        HashTableCheckpointRestorerListener(base).before_restore()
    assert first.size() == 2


def test_only_processes_that_lost_their_tables_are_restored(tmp_path):
    base = str(tmp_path / "model")
    tables = {s: small_table(2, name_suffix=s).assign(*one(1)) for s in ("lost", "fine")}
    HashTableCheckpointSaverListener(base).before_save(1)
    for table in tables.values():
        table.assign(*one(2))

    class Monitor:
        def is_ps_uninitialized(self, table):
            return table is tables["lost"]

    HashTableCheckpointRestorerListener(base, ps_monitor=Monitor()).before_restore()
    assert [t.size() for t in tables.values()] == [1, 2]


def test_restoring_after_a_save_drops_stale_rows(tmp_path):
    base = str(tmp_path / "model")
    table = small_table(2, name_suffix="a", expire_time=1)
    table.assign(*one(1), req_time=0).assign(*one(2), req_time=86400)
    HashTableCheckpointSaverListener(base).before_save(9)
    assert table.size() == 2
    HashTableRestorerSaverListener(base).after_save(9)
    assert table.size() == 1


def test_two_parts_of_a_program_share_the_folder_of_a_step(tmp_path):
    base = str(tmp_path / "model")
    single = small_table(2, name_suffix="s").assign(*one(1))
    many = fill(multi({"a": 2, "b": 3}))
    counts = create_hash_filter(300, 5, name_suffix="f")
    counts.add(5, 3)
    for _ in range(2):  # a step saved twice is saved once
        HashTableCheckpointSaverListener(base).before_save(4)
        MultiHashTableCheckpointSaverListener(base).before_save(4)
        HashFilterCheckpointSaverListener(base, [counts], enable_hash_filter=True).before_save(4)
    assert sorted(os.listdir(tmp_path)) == ["ckpt.info-4", "model-4.assets"]
    assert len([n for n in os.listdir(tmp_path / "model-4.assets") if n.startswith("manifest.")]) == 3
    info = text_format.Parse((tmp_path / "ckpt.info-4").read_text(), CkptInfo())
    assert dict(info.feature_counts) == {"a": 40, "b": 40}
    single.clear(), many.clear()
    assert HashTableCheckpointRestorerListener(base).before_restore()
    assert MultiHashTableCheckpointRestorerListener(base).before_restore()
    empty = create_hash_filter(300, 5)
    assert HashFilterCheckpointRestorerListener(base, [empty], enable_hash_filter=True).before_restore()
    assert (single.size(), many.size(), empty.get(5)) == (1, 80, 3)


def test_processes_of_different_tables_add_to_one_folder(tmp_path):
    base = str(tmp_path / "model")
    small_table(2, name_suffix="ps0").assign(*one(1))
    HashTableCheckpointSaverListener(base).before_save(4)
    reset_registry()
    small_table(2, name_suffix="ps1").assign(*one(2))
    HashTableCheckpointSaverListener(base).before_save(4)
    reset_registry()
    tables = [small_table(2, name_suffix=f"ps{i}") for i in range(2)]
    assert HashTableCheckpointRestorerListener(base).before_restore()
    assert [t.size() for t in tables] == [1, 1]


def test_a_multi_table_without_info_and_after_a_save(tmp_path):
    base = str(tmp_path / "deep" / "model")
    table = MultiHashTable.from_configs({"a": config(days=1)}, name_suffix="x/y")
    table.assign({"a": one(1)}, req_time=0).assign({"a": one(2)}, req_time=86400)
    MultiHashTableCheckpointSaverListener(base, write_ckpt_info=False).before_save(2)
    assert os.listdir(tmp_path / "deep") == ["model-2.assets"]
    assert "MonolithMultiHashTable_x-y-00000-of-00001" in os.listdir(tmp_path / "deep" / "model-2.assets")
    MultiHashTableRestorerSaverListener(base).after_save(2)
    assert table.size() == 1


def test_a_saver_without_tables_writes_nothing(tmp_path):
    HashTableCheckpointSaverListener(str(tmp_path / "m")).before_save(1)
    assert os.listdir(tmp_path) == []


# --- filters ----------------------------------------------------------------------------------------------------------


def counted(capacity=400, split=5, n=300):
    table = create_hash_filter(capacity, split)
    for id in range(n):
        table.add(id, 1 + id % 15)
    return table


def test_a_filter_comes_back_with_every_count(tmp_path):
    saved = counted()
    save_hash_filter(saved, tmp_path / "f", True)
    assert sorted(os.listdir(tmp_path)) == [*(f"f-0000{i}-of-00005" for i in range(5)), "f.manifest"]
    table = create_hash_filter(400, 5)
    restore_hash_filter(table, tmp_path / "f", True)
    assert [table.get(i) for i in range(400)] == [saved.get(i) for i in range(400)]
    assert (table.head, table.head_increment, table.num_elements) == (
        saved.head,
        saved.head_increment,
        saved.num_elements,
    )
    assert saved.head_increment > 0
    for id in range(300, 600):
        assert table.add(id) == saved.add(id)


def test_the_files_of_a_filter_are_protobuf_records(tmp_path):
    saved = create_hash_filter(60000, 5)  # blocks of 18064 cells: two records
    saved.add(12345, 7)
    save_hash_filter(saved, tmp_path / "f", True)
    for i in range(5):
        first, *rest = _core.read_records(str(tmp_path / f"f-0000{i}-of-00005"))
        meta = HashFilterSplitMetaDump.FromString(first)
        assert meta.SerializeToString() == first
        sliding = meta.sliding_hash_filter_meta
        assert (sliding.split_num, sliding.max_forward_step, sliding.max_backward_step, sliding.max_step) == (
            5,
            2,
            3,
            16,
        )
        assert (meta.total_size, meta.num_elements, meta.fill_rate) == (18000, i == 0, 1.2)
        cells = []
        for record in rest:
            dump = HashFilterSplitDataDump.FromString(record)
            assert dump.SerializeToString() == record
            assert dump.offset == len(cells)
            assert 0 < len(dump.data) <= 10000
            cells += dump.data
        assert len(cells) == 18064
        assert sum(cell & 15 for cell in cells) == (7 if i == 0 else 0)


def test_filters_that_are_off_or_keep_no_counts_write_nothing(tmp_path):
    for hash_filter, flag in [
        (counted(), False),
        (create_dummy_hash_filter(), True),
        (create_probabilistic_filter(False), True),
    ]:
        save_hash_filter(hash_filter, tmp_path / "f", flag)
        restore_hash_filter(hash_filter, tmp_path / "f", flag)
    HashFilterCheckpointSaverListener(str(tmp_path / "m"), [counted()]).before_save(1)
    HashFilterCheckpointSaverListener(str(tmp_path / "m"), [counted()], True, enable_save_restore=False).before_save(1)
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointNotFoundError):
        restore_hash_filter(counted(), tmp_path / "f", True)


def test_a_filter_of_another_shape_is_refused(tmp_path):
    save_hash_filter(counted(split=6), tmp_path / "f", True)
    table = counted()
    with pytest.raises(DataError, match="split_num is 6"):
        restore_hash_filter(table, tmp_path / "f", True)
    assert [table.get(i) for i in range(300)] == [counted().get(i) for i in range(300)]


@given(st.randoms(use_true_random=False))
def test_a_damaged_filter_file_never_crashes(tmp_path_factory, rng):
    tmp_path = tmp_path_factory.mktemp("filter")
    save_hash_filter(counted(), tmp_path / "f", True)
    path = tmp_path / f"f-0000{rng.randrange(5)}-of-00005"
    records = [bytearray(r) for r in _core.read_records(str(path))]
    record = records[rng.randrange(len(records))]
    for _ in range(rng.randrange(1, 4)):
        record[rng.randrange(len(record))] = rng.randrange(256)
    path.unlink()
    _core.write_records(str(tmp_path / "x"), str(path), [bytes(r) for r in records])
    table = create_hash_filter(400, 5)
    try:
        restore_hash_filter(table, tmp_path / "f", True)
    except (DataError, ValueError):
        assert table.num_elements == 0
    for id in range(2000):
        table.add(id)  # the restored filter can be used


def test_a_table_and_its_filter_survive_a_restart(tmp_path):
    base = str(tmp_path / "model")

    def build():
        reset_registry()
        return small_table(2, enable_hash_filter=True, occurrence_threshold=2, name_suffix="t")

    table = build()
    for id in (1, 1, 1, 2):
        table.apply_gradients(torch.tensor([id]), torch.ones(1, 2), 0)
    assert table.contains(torch.tensor([1, 2])).tolist() == [True, False]
    HashTableCheckpointSaverListener(base).before_save(1)
    HashFilterCheckpointSaverListener(base, [table.hash_filter], True).before_save(1)
    table = build()
    assert isinstance(table, HashTable)
    HashTableCheckpointRestorerListener(base).before_restore()
    HashFilterCheckpointRestorerListener(base, [table.hash_filter], True).before_restore()
    table.apply_gradients(torch.tensor([2]), torch.ones(1, 2), 0)
    assert not table.contains(torch.tensor([2])).item()
    table.apply_gradients(torch.tensor([2]), torch.ones(1, 2), 0)
    assert table.contains(torch.tensor([2])).item()
