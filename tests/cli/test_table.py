"""`shoal table`: what it reads, prints and writes; what it refuses, with which message and exit code."""

import json
import os
import struct

import cramjam
import numpy as np
import pytest
import torch

import shoal
from shoal import _core
from shoal.cli.main import main
from shoal.durable import read_saved, write_saved
from shoal.table import (
    CombineAsSegment,
    CuckooEmbeddingHashTableConfig,
    EmbeddingHashTableConfig,
    EntryConfig,
    EntryDump,
    Fp32Compressor,
    HashTableConfigInstance,
    MultiHashTable,
    SgdOptimizer,
    ZerosInitializer,
    reset_registry,
    restore_incremental,
    save_incremental,
)
from shoal.table.config.messages import MultiHashTableMetadata
from shoal.table.offline.diff import diff
from shoal.table.offline.distinct import Distinct
from shoal.table.offline.source import open_source

NOW = 1_700_000_000


@pytest.fixture(autouse=True)
def no_tables_of_other_tests():
    reset_registry()
    yield
    reset_registry()


def table_of(n=300, dim=4, name="item", optimizer=None, seed=0, step=7919):
    generator = torch.Generator().manual_seed(seed)
    table = shoal.HashTable(dim, name=name, optimizer=optimizer or shoal.Adagrad(lr=0.1))
    ids = torch.arange(n) * step
    table.assign(ids, torch.randn(n, dim, generator=generator), req_time=NOW)
    if n:
        table.apply_gradients(ids, torch.randn(n, dim, generator=generator), req_time=NOW + 5)
    return table, ids


def multi_of(dims, suffix="m", rows=50):
    configs = {}
    for name, dim in dims.items():
        entry = EntryConfig(
            segments=[CombineAsSegment(dim, ZerosInitializer(), SgdOptimizer(), Fp32Compressor())],
            entry_type=EntryConfig.TRAINING,
        )
        message = EmbeddingHashTableConfig(entry_config=entry, cuckoo=CuckooEmbeddingHashTableConfig())
        configs[name] = HashTableConfigInstance(message, [0.1])
    multi = MultiHashTable.from_configs(configs, name_suffix=suffix, saver_parallel=2)
    values = {n: (torch.arange(rows) + 1000 * i, torch.rand(rows, d)) for i, (n, d) in enumerate(dims.items())}
    return multi.assign(values, req_time=NOW), values


def run(capsys, *argv, code=0):
    """What a command prints as JSON; its exit code is checked."""
    assert main(["table", *map(str, argv), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def refused(capsys, *argv, code=2):
    """The one line that a command ends with."""
    assert main(["table", *map(str, argv)]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.startswith("shoal table: ")
    assert captured.err.count("\n") == 1
    return captured.err


def same(a, b):
    return all(not each.differs for each in diff(open_source(a), open_source(b), open_source(a).tables))


# --- reading ----------------------------------------------------------------------------------------------------------


def test_stat_of_one_table(tmp_path, capsys):
    table, ids = table_of()
    table.save(tmp_path / "item")
    [stat] = run(capsys, "stat", tmp_path / "item")["tables"]
    norms = table.lookup(ids).norm(dim=1)
    assert (stat["name"], stat["rows"], stat["dim"]) == ("item", 300, 4)
    assert (stat["min_id"], stat["max_id"]) == (0, 299 * 7919)
    assert (stat["first_update"], stat["last_update"]) == (NOW + 5, NOW + 5)
    assert stat["norm_mean"] == pytest.approx(float(norms.mean()), rel=1e-5)
    assert stat["norm_max"] == pytest.approx(float(norms.max()), rel=1e-5)
    assert stat["optimizers"] == [[{"kind": "adagrad", "dim": 4}]]
    assert (stat["zero_rows"], stat["bad_rows"]) == (0, 0)
    for file in tmp_path.iterdir():  # the name of any of its files is accepted
        assert run(capsys, "stat", file)["tables"] == [stat]


def test_an_empty_table_is_an_answer(tmp_path, capsys):
    table_of(0)[0].save(tmp_path / "item")
    [stat] = run(capsys, "stat", tmp_path / "item")["tables"]
    assert (stat["rows"], stat["dim"]) == (0, None)
    assert run(capsys, "verify", tmp_path / "item")["good"]
    assert run(capsys, "top", tmp_path / "item") == {"item": []}
    assert run(capsys, "reshard", tmp_path / "item", "--shards", 2, "--out", tmp_path / "two")["rows"] == {"item": 0}


def test_rows_one_by_one(tmp_path, capsys):
    table, _ = table_of()
    table.save(tmp_path / "item")
    [row] = run(capsys, "get", tmp_path / "item", 7919)
    assert row["weights"] == table.lookup(torch.tensor([7919]))[0].tolist()
    dump = EntryDump.FromString(_core.lookup_entry(table._native, [7919])[0])
    assert row["optimizer"][0]["adagrad"]["norm"] == pytest.approx(list(dump.opt.dump[0].adagrad.norm))
    assert run(capsys, "get", tmp_path / "item", 1, code=1) == []
    table.assign(torch.tensor([-5, -(1 << 63)]), torch.ones(2, 4), req_time=NOW + 9)
    table.save(tmp_path / "item")
    assert run(capsys, "get", tmp_path / "item", -5)[0]["time"] == NOW + 9
    assert run(capsys, "get", tmp_path / "item", 1 << 63)[0]["id"] == -(1 << 63)  # the id as an unsigned number
    assert main(["table", "get", str(tmp_path / "item"), "7919"]) == 0
    norm = dump.opt.dump[0].adagrad.norm[0]
    assert f"segment 0, adagrad: norm {norm:.4g} " in capsys.readouterr().out
    small = shoal.HashTable(dim=1, optimizer=shoal.Adagrad(lr=0.1), name="small")
    small.apply_gradients(torch.tensor([1]), torch.tensor([[0.001]]))
    small.save(tmp_path / "small")
    assert main(["table", "get", str(tmp_path / "small"), "1"]) == 0
    assert "adagrad: norm 1e-06" in capsys.readouterr().out


def test_ls_filters_and_counts(tmp_path, capsys):
    table, ids = table_of()
    other = torch.arange(7) + (3 << 48)
    table.assign(other, torch.ones(7, 4), req_time=NOW + 100)
    table.save(tmp_path / "item")

    def lines(*argv):
        assert main(["table", "ls", str(tmp_path / "item"), "--json", *argv]) == 0
        return [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()]

    assert sorted(lines("--limit", "0")) == sorted(ids.tolist() + other.tolist())
    assert sorted(lines("--slot", "3")) == other.tolist()
    assert sorted(lines("--since", str(NOW + 50))) == other.tolist()
    assert lines("--skip", "5", "--limit", "3") == lines("--limit", "8")[5:]
    assert main(["table", "ls", str(tmp_path / "item"), "--limit", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 307


def test_top_is_what_sorting_gives(tmp_path, capsys):
    table, ids = table_of(5000)
    table.assign(torch.tensor([1, 2, 3]), torch.ones(3, 4), req_time=NOW + 50)
    table.save(tmp_path / "item")
    norms = table.lookup(ids).norm(dim=1)
    best = run(capsys, "top", tmp_path / "item", "--n", 7)["item"]
    assert [row["id"] for row in best] == ids[norms.argsort(descending=True)[:7]].tolist()
    newest = run(capsys, "top", tmp_path / "item", "--by", "recent", "--n", 3)["item"]
    assert [row["id"] for row in newest] == [1, 2, 3]


def test_a_chain_is_read_as_a_restore_reads_it(tmp_path, capsys):
    table, ids = table_of(400)
    save_incremental(table, tmp_path / "chain", step=1)
    for step in range(2, 5):
        table.assign(ids[step : step + 60], torch.full((60, 4), float(step)), req_time=NOW + step)
        table.erase(ids[100 * step - 100 : 100 * step - 90])
        table.assign(torch.tensor([step]), torch.ones(1, 4), req_time=NOW + step)
        save_incremental(table, tmp_path / "chain", step=step)
    restored = shoal.HashTable(4, name="item", optimizer=shoal.Adagrad(lr=0.1))
    restore_incremental(restored, tmp_path / "chain")
    restored.save(tmp_path / "item")
    assert same(tmp_path / "chain", tmp_path / "item")
    about = run(capsys, "stat", tmp_path / "chain")
    assert (about["kind"], about["step"], len(about["checkpoints"])) == ("chain", 4, 4)
    assert about["tables"][0]["rows"] == restored.size()
    earlier = run(capsys, "stat", tmp_path / "chain" / "ckpt-00000001")
    assert earlier["tables"][0]["rows"] == 400
    assert run(capsys, "get", tmp_path / "chain", int(ids[100]), code=1) == []
    assert run(capsys, "verify", tmp_path / "chain")["good"]


def test_expired_rows_of_a_chain_are_left_out(tmp_path, capsys):
    table = shoal.HashTable(2, name="t", expire_after="2d")
    table.assign(torch.arange(10), torch.ones(10, 2), req_time=NOW)
    save_incremental(table, tmp_path / "c")
    table.assign(torch.tensor([50]), torch.ones(1, 2), req_time=NOW + 3 * 86400)
    save_incremental(table, tmp_path / "c")
    assert run(capsys, "stat", tmp_path / "c")["tables"][0]["rows"] == 1


def test_a_multi_table_and_a_folder_of_several(tmp_path, capsys):
    multi, values = multi_of({"b": 3, "a": 2})
    multi.save(tmp_path / "m")
    table_of(name="item")[0].save(tmp_path / "item")
    stats = {t["name"]: t for t in run(capsys, "stat", tmp_path / "m")["tables"]}
    assert {name: (s["rows"], s["dim"]) for name, s in stats.items()} == {"a": (50, 2), "b": (50, 3)}
    folder = run(capsys, "stat", tmp_path)
    assert (folder["kind"], [t["name"] for t in folder["tables"]]) == ("folder", ["a", "b", "item"])
    [row] = run(capsys, "get", tmp_path, 1007, "--table", "a")
    assert row["weights"] == values["a"][1][7].tolist()
    assert "has no table 'zz'; it has 'a', 'b', 'item'" in refused(capsys, "stat", tmp_path, "--table", "zz")


def test_folders_of_ranks_and_of_servers(tmp_path, capsys):
    parts = [table_of(50, name=f"r{r}")[0] for r in range(2)]
    parts[1].erase(torch.arange(50) * 7919)
    parts[1].assign(torch.arange(1, 9), torch.ones(8, 4))
    for rank, part in enumerate(parts):
        part.save(tmp_path / "ranks" / f"rank-{rank:05d}" / "rows")
    (tmp_path / "ranks" / "manifest.json").write_text(json.dumps({"format": 1, "world_size": 2, "dim": 4}))
    assert run(capsys, "stat", tmp_path / "ranks")["tables"][0]["rows"] == 58
    for shard, part in enumerate(parts):
        folder = tmp_path / "ps" / f"shard-{shard:05d}" / "checkpoint-0000000000000003"
        part.save(folder / "table-00000")
        manifest = {"format": 1, "shard": shard, "of": 2, "tables": {"user": {"file": "table-00000"}}}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    about = run(capsys, "stat", tmp_path / "ps")
    assert (about["kind"], about["tables"][0]["name"], about["tables"][0]["rows"]) == ("servers", "user", 58)


# --- comparing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [1 << 30, 4096])
def test_diff_counts_and_measures(tmp_path, memory):
    table, ids = table_of(2000)
    table.save(tmp_path / "a")
    before = table.lookup(ids[:40])
    table.apply_gradients(ids[:40], torch.ones(40, 4), req_time=NOW + 5)
    moved = (table.lookup(ids[:40]) - before).norm(dim=1)
    table.assign(ids[100:110], table.lookup(ids[100:110]), req_time=NOW + 77)  # the same weights, another time
    table.assign(torch.tensor([5, 6, 7]), torch.ones(3, 4))
    table.erase(ids[500:504])
    table.save(tmp_path / "b")
    a, b = open_source(tmp_path / "a"), open_source(tmp_path / "b")
    from shoal.table.offline.rewrite import renamed

    [found] = diff(a, renamed(b, {"b": "a"}), ["a"], memory_bytes=memory)
    assert (found.rows_a, found.rows_b, found.added, found.removed) == (2000, 1999, 3, 4)
    assert (found.changed, found.state_only, found.same) == (40, 10, 2000 - 4 - 50)
    assert found.max_distance == pytest.approx(float(moved.max()), rel=1e-5)
    assert found.report()["mean_distance"] == pytest.approx(float(moved.mean()), rel=1e-5)
    assert sorted(found.added_ids) == [5, 6, 7]


def test_diff_says_by_its_exit_code_whether_they_differ(tmp_path, capsys):
    table, ids = table_of()
    table.save(tmp_path / "a")
    table.save(tmp_path / "b")
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "b")["tables"][0]["same"] == 300
    table.assign(ids[:1], torch.zeros(1, 4))
    table.save(tmp_path / "b")
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)["tables"][0]["changed"] == 1


def test_repeated_ids_are_found_beyond_the_memory_limit():
    distinct = Distinct(limit=100)
    for begin in range(0, 1000, 50):
        distinct.add(np.arange(begin, begin + 50) << 48)
    distinct.add(np.array([3 << 48, 7 << 48, 7 << 48]))
    assert distinct.repeated() == (3, [3 << 48, 7 << 48])
    assert Distinct().repeated() == (0, [])


# --- converting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "sgd", "ftrl"])
def test_parquet_there_and_back_is_bit_for_bit(tmp_path, capsys, optimizer):
    table, ids = table_of(3000, optimizer=optimizer)
    table.save(tmp_path / "item")
    run(capsys, "export", tmp_path / "item", "--parquet", tmp_path / "x.parquet", "--state")
    run(capsys, "import", tmp_path / "x.parquet", "--name", "item", "--out", tmp_path / "ckpt", "--shards", 3)
    assert same(tmp_path / "item", tmp_path / "ckpt")
    other = shoal.HashTable(4, name="item", optimizer=optimizer)
    restore_incremental(other, tmp_path / "ckpt")
    assert torch.equal(other.lookup(ids), table.lookup(ids))


def test_csv_there_and_back_keeps_ids_times_and_weights(tmp_path, capsys):
    table, _ = table_of(100)
    table.assign(torch.tensor([-9]), torch.tensor([[1e-30, -0.1, 3.4e38, 0.0]]), req_time=7)
    table.save(tmp_path / "item")
    run(capsys, "export", tmp_path / "item", "--csv", tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text().startswith("id,time,e0,e1,e2,e3\n")
    run(capsys, "import", tmp_path / "x.csv", "--name", "item", "--out", tmp_path / "ckpt")
    [found] = diff(open_source(tmp_path / "item"), open_source(tmp_path / "ckpt"), ["item"])
    assert (found.changed, found.added, found.removed) == (0, 0, 0)
    other = shoal.HashTable(4, name="item")  # adagrad, the default of --optimizer
    restore_incremental(other, tmp_path / "ckpt")
    assert other.size() == 101


def test_npz_and_parquet_of_other_people(tmp_path, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    weights = np.random.default_rng(0).random((50, 3))  # float64
    np.savez(tmp_path / "x.npz", ids=np.arange(50), weights=weights)
    pq.write_table(pa.table({"key": pa.array(np.arange(50, 60, dtype=np.uint64)), "vec": [[1.0, 2, 3]] * 10}),
                   tmp_path / "y.parquet")  # fmt: skip
    run(capsys, "import", tmp_path / "x.npz", "--name", "t", "--out", tmp_path / "a", "--now", NOW)
    run(capsys, "import", tmp_path / "y.parquet", "--id-column", "key", "--vector-column", "vec", "--name", "t",
        "--out", tmp_path / "b", "--optimizer", "none")  # fmt: skip
    [row] = run(capsys, "get", tmp_path / "a", 7)
    assert row["weights"] == weights[7].astype(np.float32).tolist()
    assert row["time"] == NOW
    assert run(capsys, "stat", tmp_path / "b")["tables"][0]["optimizers"] == [[]]


def test_imports_are_refused_whole(tmp_path, capsys):
    out = tmp_path / "out"
    np.savez(tmp_path / "twice.npz", ids=np.array([1, 2, 1]), weights=np.ones((3, 2)))
    np.savez(tmp_path / "shape.npz", ids=np.array([1, 2]), weights=np.ones((3, 2)))
    np.savez(tmp_path / "names.npz", x=np.ones(3))
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 not a zip")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    (tmp_path / "ragged.csv").write_text("id,e0,e1\n1,0.5,0.5\n2,0.5\n")
    (tmp_path / "words.csv").write_text("id,e0\nseven,0.5\n")
    (tmp_path / "late.csv").write_text("id,time,e0\n7,-3,0.5\n")
    (tmp_path / "x.json").write_text("{}")
    for name, text in {
        "twice.npz": "rows with a duplicate id: 1 (such as 1); remove the duplicates",
        "shape.npz": "weights must be [2, dim]",
        "names.npz": "no array 'ids'",
        "bad.npz": "bad.npz: ",
        "bad.parquet": "bad.parquet: ",
        "ragged.csv": "ragged.csv: ",
        "words.csv": "column 'id': ids and times must be integers, got string",
        "late.csv": "a time must be 0..4294967295 seconds, got -3",
        "x.json": "must end in .parquet",
        "absent.csv": "is not a file",
    }.items():
        assert text in refused(capsys, "import", tmp_path / name, "--name", "t", "--out", out), name
        assert not out.exists(), name
    out.mkdir()
    (out / "something").write_text("")
    assert "exists already" in refused(capsys, "import", tmp_path / "twice.npz", "--name", "t", "--out", out)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_reshard_keeps_every_byte_of_every_row(tmp_path, capsys, shards):
    table, ids = table_of(1000)
    table.assign(-ids - 3, torch.ones(1000, 4))
    table.save(tmp_path / "item")
    run(capsys, "reshard", tmp_path / "item", "--shards", shards, "--out", tmp_path / "new" / "item")
    assert same(tmp_path / "item", tmp_path / "new" / "item")
    assert len(list((tmp_path / "new").iterdir())) == shards + 1  # the files and the manifest
    for shard in range(shards):  # row ID is in file ID mod N
        scan = _core.EntryScan(str(tmp_path / "new" / f"item-{shard:05d}-of-{shards:05d}"))
        n, floats = scan.next()
        numbers, weights = np.empty((6, n), np.int64), np.empty(floats, np.float32)
        scan.columns(numbers.ctypes.data, n, weights.ctypes.data, floats)
        assert (np.mod(numbers[0], shards) == shard).all()
    other = shoal.HashTable(4, name="other", optimizer=shoal.Adagrad(lr=0.1))
    other.restore(tmp_path / "new" / "item")
    assert torch.equal(other.lookup(ids), table.lookup(ids))


def test_reshard_of_a_multi_table_and_of_a_chain(tmp_path, capsys):
    multi, values = multi_of({"b": 3, "a": 2, "c": 1})
    multi.save(tmp_path / "m")
    assert run(capsys, "reshard", tmp_path / "m", "--shards", 3, "--out", tmp_path / "n")["rows"] == dict.fromkeys(
        "abc", 50
    )
    assert same(tmp_path / "m", tmp_path / "n")
    reset_registry()
    other, _ = multi_of({"b": 3, "a": 2, "c": 1}, rows=1)
    other.restore(tmp_path / "n")
    for name, (ids, rows) in values.items():
        assert torch.equal(other.lookup({name: ids})[name], rows)
    table, ids = table_of()
    save_incremental(table, tmp_path / "chain", step=9)
    save_incremental(table.assign(ids[:3], torch.zeros(3, 4)), tmp_path / "chain", step=10)
    run(capsys, "reshard", tmp_path / "chain", "--shards", 4, "--out", tmp_path / "flat")
    assert same(tmp_path / "chain", tmp_path / "flat")
    assert run(capsys, "stat", tmp_path / "flat")["step"] == 10
    run(capsys, "reshard", tmp_path / "m", "--shards", 2, "--out", tmp_path / "folder", "--kind", "folder")
    assert same(tmp_path / "m", tmp_path / "folder")


# --- the original system ----------------------------------------------------------------------------------------------


def mask(crc):
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def framed(payload):
    """A TFRecord, written here and not by the library."""
    length = struct.pack("<Q", len(payload))
    return (
        length
        + struct.pack("<I", mask(_core.crc32c(length)))
        + payload
        + struct.pack("<I", mask(_core.crc32c(payload)))
    )


def entry(id, dim):
    dump = EntryDump(id=id, num=[float(id)] * dim, last_update_ts_sec=NOW)
    dump.opt.dump.add().adagrad.norm.extend([0.5] * dim)
    return framed(dump.SerializeToString())


def monolith_model(folder):
    """A model directory as two of the original's parameter servers leave it."""
    assets = folder / "model.ckpt-1200.assets"
    assets.mkdir(parents=True)
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1200"\n')
    name = "c4994ee36e1c818429b92da2af0d9b38"
    for server in range(2):
        for shard in range(2):
            ids = range(server + 2 * shard, 40, 4)
            path = assets / f"MonolithHashTable_{name}_{server}-{shard:05d}-of-00002"
            path.write_bytes(b"".join(entry(id, 3) for id in ids))
        stream = b"".join(
            [*(entry(id, 2) for id in range(server, 10, 2)), *(entry(id, 4) for id in range(server, 6, 2))]
        )
        blocks = [cramjam.snappy.compress_raw(stream[i : i + 100]) for i in range(0, len(stream), 100)]
        data = b"".join(struct.pack(">I", len(block)) + bytes(block) for block in blocks)
        (assets / f"MonolithMultiHashTable_{server}-00000-of-00001").write_bytes(data)
        meta = [MultiHashTableMetadata(table_name=t, num_entries=n) for t, n in (("clicks", 5), ("shops", 3))]
        (assets / f"MonolithMultiHashTable_{server}.meta-00000-of-00001").write_bytes(
            b"".join(framed(m.SerializeToString()) for m in meta)
        )
    (assets / "hash_filter_0-00000-of-00001").write_bytes(framed(b"\x08\x01"))
    return name


@pytest.mark.parametrize("given", ["model", "model/model.ckpt-1200.assets"])
def test_from_monolith_joins_what_servers_wrote(tmp_path, capsys, given):
    name = monolith_model(tmp_path / "model")
    found = run(capsys, "from-monolith", tmp_path / given, "--out", tmp_path / "ours", "--rename", f"{name}=price_shop")
    assert found["rows"] == {"price_shop": 40, "clicks": 10, "shops": 6}
    about = run(capsys, "stat", tmp_path / "ours")
    assert (about["kind"], about["step"]) == ("chain", 1200)
    tables = [
        shoal.HashTable(d, name=n, optimizer="adagrad") for n, d in (("price_shop", 3), ("clicks", 2), ("shops", 4))
    ]
    restore_incremental(tables, tmp_path / "ours")
    assert torch.equal(tables[0].lookup(torch.arange(40)), torch.arange(40.0).view(-1, 1).expand(40, 3))
    assert [table.size() for table in tables] == [40, 10, 6]
    assert run(capsys, "verify", tmp_path / "ours")["good"]


def test_from_monolith_refuses_what_is_not_whole(tmp_path, capsys):
    name = monolith_model(tmp_path / "model")
    assets = tmp_path / "model" / "model.ckpt-1200.assets"
    out = tmp_path / "ours"
    (assets / f"MonolithHashTable_{name}_0-00000-of-00002").rename(tmp_path / "aside")
    assert "1 of 2 shards are missing" in refused(capsys, "from-monolith", tmp_path / "model", "--out", out)
    (assets / f"MonolithHashTable_{name}_0-00001-of-00002").unlink()
    assert "but none of [0]" in refused(capsys, "from-monolith", tmp_path / "model", "--out", out)
    (tmp_path / "model" / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-7"\n')
    assert "there is no folder" in refused(capsys, "from-monolith", tmp_path / "model", "--out", out)
    assert "must be OLD=NEW" in refused(capsys, "from-monolith", tmp_path / "model", "--out", out, "--rename", "x")
    assert not out.exists()


# --- broken files -----------------------------------------------------------------------------------------------------


def test_verify_finds_every_flipped_bit(tmp_path, capsys):
    table_of(40)[0].save(tmp_path / "item")
    path = tmp_path / "item-00000-of-00001"
    good = path.read_bytes()
    for place in range(0, len(good), 37):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
        verdict = run(capsys, "verify", tmp_path / "item", code=2)
        assert len(verdict["problems"]) == 1
        assert ", at byte " in verdict["problems"][0]
        assert "item-00000-of-00001: record " in verdict["problems"][0]
    path.write_bytes(good[:-7])
    [problem] = run(capsys, "verify", tmp_path / "item", code=2)["problems"]
    size = len(good) // 40
    assert f"record 39: the file is truncated inside it, at byte {39 * size}" in problem


def test_verify_goes_on_after_the_first_problem(tmp_path, capsys):
    table, _ = table_of(900)
    table.save(tmp_path / "item")
    run(capsys, "reshard", tmp_path / "item", "--shards", 3, "--out", tmp_path / "three")
    for shard in (0, 2):
        path = tmp_path / f"three-{shard:05d}-of-00003"
        path.write_bytes(path.read_bytes()[:-1])
    verdict = run(capsys, "verify", tmp_path / "three", code=2)
    assert len(verdict["problems"]) == 2
    assert verdict["files"] == 3


def test_verify_of_repeated_ids_counts_widths_and_numbers(tmp_path, capsys):
    def write(name, *records):
        (tmp_path / f"{name}-00000-of-00001").write_bytes(b"".join(records))

    write("twice", entry(7, 2), entry(8, 2), entry(7, 2))
    assert "records with a duplicate id: 1 (such as 7)" in str(
        run(capsys, "verify", tmp_path / "twice", code=2)["problems"]
    )
    write("widths", entry(7, 2), entry(8, 3))
    assert "id 8 has 3 weights, but earlier ones have 2" in str(
        run(capsys, "verify", tmp_path / "widths", code=2)["problems"]
    )
    write("nan", framed(EntryDump(id=1, num=[float("nan")]).SerializeToString()))
    verdict = run(capsys, "verify", tmp_path / "nan")
    assert "rows that hold NaN or infinity: 1 (such as id 1)" in verdict["warnings"][0]
    table, _ = table_of()
    save_incremental(table, tmp_path / "chain")
    manifest = tmp_path / "chain" / "ckpt-00000001" / "manifest.json"
    fields = read_saved(manifest).fields
    fields["content"]["tables"][0]["rows"] = 301
    write_saved(manifest, fields, read_saved(manifest).files)
    assert "has 300 rows, but its manifest says 301" in str(
        run(capsys, "verify", tmp_path / "chain", code=2)["problems"]
    )
    manifest.write_text(manifest.read_text().replace('"rows": 301', '"rows": 300'))
    assert "digest does not match" in str(run(capsys, "verify", tmp_path / "chain", code=2)["problems"])
    manifest.write_text("{")
    assert "not a JSON file" in str(run(capsys, "verify", tmp_path / "chain" / "ckpt-00000001", code=2)["problems"])


@pytest.mark.parametrize("verb", ["stat", "ls", "top", "get", "export", "reshard", "from-monolith"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"hello, I am a text file, and a rather long one at that", "not a file of records, at byte 0"),
        (framed(b"\x0a\x03abc"), "it has no id, so it is not a row of a table, at byte 0"),
        (framed(b"\xff\xff\xff"), "it is not an EntryDump message, at byte 0"),
        (entry(1, 2) + entry(2, 2)[:-3], f"truncated inside it, at byte {len(entry(1, 2))}"),
        (
            entry(1, 2) + entry(2, 2)[:-3] + b"abc",
            f"its checksum does not match its bytes; the file is corrupt, at byte {len(entry(1, 2))}",
        ),
    ],
    ids=["text", "other records", "no message", "truncated", "flipped"],
)
def test_damaged_and_alien_files_end_with_2_and_write_nothing(tmp_path, capsys, verb, content, words):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "t-00000-of-00001").write_bytes(content)
    extra = {
        "get": ["9"], "export": ["--parquet", tmp_path / "x.parquet"], "from-monolith": ["--out", tmp_path / "out"],
        "reshard": ["--shards", 2, "--out", tmp_path / "new" / "t"],
    }.get(verb, [])  # fmt: skip
    assert words in refused(capsys, verb, tmp_path / "in" / "t", *extra)
    left = sorted(os.path.join(folder, file) for folder, _, files in os.walk(tmp_path) for file in files)
    assert left == [str(tmp_path / "in" / "t-00000-of-00001")]


def test_a_damaged_block_of_a_multi_table(tmp_path, capsys):
    multi, _ = multi_of({"a": 2, "b": 3})
    multi.save(tmp_path / "m")
    path = tmp_path / "m-00000-of-00002"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    [problem] = run(capsys, "verify", tmp_path / "m", code=2)["problems"]
    assert "byte " in problem
    (tmp_path / "m.meta-00001-of-00002").unlink()
    assert "shards are missing" in refused(capsys, "stat", tmp_path / "m")


def test_what_is_not_there(tmp_path, capsys):
    assert "there is no checkpoint" in refused(capsys, "stat", tmp_path / "absent")
    assert "there is no checkpoint in" in refused(capsys, "stat", tmp_path)
    assert "there is no checkpoint" in refused(capsys, "verify", tmp_path / "absent")
    (tmp_path / "file.txt").write_text("x")
    assert "is not a file of a checkpoint" in refused(capsys, "stat", tmp_path / "file.txt")
    table_of()[0].save(tmp_path / "item")
    assert "exactly one of --parquet FILE and --csv FILE" in refused(capsys, "export", tmp_path / "item")
    assert "at least 1, got 0" in refused(capsys, "reshard", tmp_path / "item", "--shards", 0, "--out", tmp_path / "y")
    assert "exist already" in refused(capsys, "reshard", tmp_path / "item", "--shards", 2, "--out", tmp_path / "item")
