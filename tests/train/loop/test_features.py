"""A table per feature: configuration, learning, checkpoints. Then ranks, then servers."""

import json
import shutil

import pytest
import torch

from shoal import _core
from shoal.comm.ranks.torch_ranks import start_ranks
from shoal.data import CRITEO, Samples, Stream, make_format
from shoal.errors import ConfigError
from shoal.nn.feature_rows import Keyed
from shoal.proto.embedding_hash_table_pb2 import EntryDump
from shoal.testing import run_ranks
from shoal.train.loop.rows.rows import Rows
from shoal.train.loop.table_config import FeatureConfig, TableConfig, plan_tables
from shoal.train.loop.trainer import trainer
from shoal.trainer import load_config
from tests.cli.train_helpers import newest
from tests.train.loop.helpers import Told, open_run, run, settings

MIXED = {
    "model_dot_name": "dcn", "table_dot_features.C3.dim": 5, "table_dot_features.C3.optimizer": "adam",
    "table_dot_features.C3.lr": 0.002, "table_dot_features.C4.table": "C3", "table_dot_features.C9.admit_after": 1,
    "table_dot_features.C9.admit_capacity": 1000, "table_dot_features.C20.initializer": "zeros",
}  # fmt: skip


def rows_of(folder, unstamped=True):
    """The records of all tables of a checkpoint, in an order of their own."""
    files = [path for path in folder.glob("features*-of-*") if not path.name.startswith("filter")]
    dumps = [EntryDump.FromString(record) for path in files for record in _core.read_records(str(path))]
    for dump in dumps if unstamped else ():
        dump.ClearField("last_update_ts_sec")  # the second in which a run began
    return sorted(dump.SerializeToString(deterministic=True) for dump in dumps)


def csv(tmp_path, text, **more):
    path = tmp_path / "a.csv"
    path.write_text(text)
    given = {
        "data.train": [str(path)], "data.format": "csv", "data.label": "y", "train.batch_size": 50, "table.dim": 4,
        "model.hidden": [8], "train.threads": 1, "data.prefetch": 0, "data.shuffle_rows": 0,
    }  # fmt: skip
    return load_config(None, given | {name.replace("_dot_", "."): value for name, value in more.items()})


# --- tables of features -----------------------------------------------------------------------------------------------


def planned(features, sparse=("user", "item", "history")):
    table = TableConfig(features={name: FeatureConfig(**given) for name, given in features.items()})
    return {one.config.name: one.features for one in plan_tables(table, sparse)}


def test_features_without_settings_of_their_own_share_the_table():
    assert planned({}) == {"features": ("user", "item", "history")}
    assert planned({"user": {"combiner": "mean"}}) == {"features": ("user", "item", "history")}
    assert planned({"user": {"dim": 16}}) == {"features": ("item", "history"), "features.user": ("user",)}


def test_a_feature_takes_the_rows_of_another_wherever_those_are():
    assert planned({"history": {"table": "item"}}) == {"features": ("user", "item", "history")}
    given = {"history": {"table": "item"}, "item": {"dim": 4}}
    assert planned(given) == {"features": ("user",), "features.item": ("item", "history")}
    chain = {"user": {"table": "history"}, "history": {"table": "item"}, "item": {"lr": 0.1}}
    assert planned(chain) == {"features.item": ("user", "item", "history")}


def test_settings_of_a_feature_stand_above_those_of_the_table():
    given = FeatureConfig(optimizer="adam", combiner="mean", expire_after="never")
    table = TableConfig(
        dim=8, lr=0.1, optimizer_options={"eps": 1e-3}, expire_after="30d", combiner="firstn", max_length=3,
        features={"a": given, "b": FeatureConfig(init_scale=0.5)},
    )  # fmt: skip
    a, b = table.of_feature("a"), table.of_feature("b")
    assert (a.dim, a.lr, a.optimizer, a.optimizer_options, a.expire_after) == (8, 0.1, "adam", {}, None)
    assert (a.combiner, a.length) == ("mean", 1)
    assert (b.optimizer_options, b.expire_after, b.init_scale, b.length) == ({"eps": 1e-3}, "30d", 0.5, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"table.features.C33.dim": 4}, r"\[table.features.C33\]: there is no feature 'C33' \(did you mean 'C3'\?\)"),
        ({"table.features.C3.dmi": 4}, r"\[table.features.C3\] has no setting 'dmi' \(did you mean 'dim'\?\)"),
        ({"table.features.C3": 4}, r"\[table.features.C3\] must be a section, got 4"),
        ({"table.features": 4}, r"\[table.features\] must be a table, got 4"),
        ({"table.features.C3.dim": 0}, r"\[table.features.C3\] dim must be at least 1, got 0"),
        ({"table.features.C3.dim": "a"}, r"\[table.features.C3\] dim must be a whole number, got 'a'"),
        ({"table.features.C3.optimizer": "adm"}, r"C3\] optimizer must be one of .*did you mean 'adam'"),
        ({"table.features.C3.optimizer_options": {"beta": 1}}, r"\[table.features.C3\] optimizer_options: adagrad"),
        ({"table.features.C3.combiner": "avg"}, "combiner must be one of .* 'firstn', got 'avg'"),
        ({"table.features.C3.combiner": "firstn"}, r"features.C3\] max_length must be set with combiner = \"firstn\""),
        ({"table.features.C3.max_length": 2}, r"C3\] max_length must be used with combiner = \"firstn\""),
        ({"table.features.C3.admit_after": 15}, r"\[table.features.C3\] admit_after must be at most 14, got 15"),
        ({"table.features.C3.table": "C40"}, r"table must be another feature whose rows this one uses, got 'C40'"),
        (
            {"table.features.C3.table": "C4", "table.features.C3.dim": 4},
            r"\[table.features.C3\] uses the rows of 'C4', so dim cannot be set here; set it in \[table.features.C4\]",
        ),
        (
            {"table.features.C3.table": "C4", "table.features.C4.table": "C3"},
            r"\[table.features.C3\] table must not form a cycle, got C3 -> C4 -> C3",
        ),
        ({"table.features.C3.table": "C3"}, "must not form a cycle, got C3 -> C3"),
        ({"data.slots": {"C3": 4}, "table.features.C4.dim": 4}, "'C3' and 'C4' have the same slot, .* but they do not"),
        ({"table.device": "gpu"}, r"\[table\] device must be one of 'cpu', 'cuda', got 'gpu'"),
        ({"table.device": "cuda", "train.ps": ["127.0.0.1:1"]}, "the rows are on the servers; leave one of them out"),
    ],
)  # fmt: skip
def test_a_wrong_setting_of_a_feature_is_refused_with_its_section(given, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, {"data.train": ["a.tsv"]} | given)


def test_features_that_share_a_table_share_the_slot_of_their_ids():
    config = load_config(None, {"data.train": ["a.tsv"], "table.features.C9.table": "C3"})
    assert config.data.schema().slot("C9") == config.data.schema().slot("C3") == 3
    own = load_config(None, {"data.train": ["a.tsv"], "table.features.C9.table": "C3", "data.slots": {"C9": 40}})
    assert own.data.schema().slot("C9") == 40  # explicit slots take precedence


@pytest.mark.parametrize("model", ["deepfm", "dlrm"])
def test_models_that_multiply_rows_name_the_features_whose_dims_differ(data, model):
    given = {"model_dot_name": model, "table_dot_features.C3.dim": 5}
    given |= {"model_dot_top": [4]} if model == "dlrm" else {}
    config = settings(data, **given)
    if model == "dlrm":
        config.model.options.pop("hidden")
    with pytest.raises(ConfigError, match=rf"{model} multiplies .* dim 2: C1, C2, .* and 17 more; dim 5: C3\."):
        open_run(config)[0].__enter__()


def test_models_that_take_one_row_refuse_firstn(data):
    given = {"table_dot_features.C3.combiner": "firstn", "table_dot_features.C3.max_length": 2}
    with pytest.raises(ConfigError, match="deepfm must get one row per feature, but the combiner of C3 is firstn"):
        open_run(settings(data, **given))[0].__enter__()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_rows_on_a_gpu_need_one(data):
    config = settings(data / "nowhere", table_dot_device="cuda")  # reported before files are looked for
    with pytest.raises(ConfigError, match=r'\[table\] device is "cuda", but torch finds no GPU here'):
        open_run(config)[0].__enter__()


# --- learning ---------------------------------------------------------------------------------------------------------


def test_a_table_for_each_feature_learns_the_bits_of_one_for_all(data, tmp_path):
    every = {f"table_dot_features.{name}.dim": 2 for name in CRITEO.sparse}
    some = {f"table_dot_features.{name}.dim": 2 for name in CRITEO.sparse[::3]}
    folders = []
    for name, given in (("one", {}), ("some", some), ("every", every)):
        told = run(settings(data, tmp_path / name, **given))
        folders.append(newest(tmp_path / name))
        assert len(told.ended["tables"]) == {"one": 1, "some": 10, "every": 26}[name]
        assert sum(one["rows"] for one in told.ended["tables"].values()) == told.ended["rows"]
        assert sum(one["bytes"] for one in told.ended["tables"].values()) == told.ended["table_bytes"] > 0
    one, some, every = folders
    assert rows_of(one) == rows_of(some) == rows_of(every)
    dense = [(folder / "dense.safetensors").read_bytes() for folder in folders]
    assert dense[0] == dense[1] == dense[2]
    manifest = json.loads((every / "manifest.json").read_text())["content"]
    assert [table["name"] for table in manifest["tables"]] == [f"features.{name}" for name in CRITEO.sparse]


def test_shared_rows_are_one_row_per_category(tmp_path):
    text = "y,item,history\n" + "".join(f"{i % 2},p{i % 7},p{(i + 3) % 7}\n" for i in range(500))
    config = csv(tmp_path, text, data_dot_sparse=["item", "history"], **{"table_dot_features.history.table": "item"})
    with trainer(config) as one:
        assert one.run()["rows"] == 7
    apart = csv(tmp_path, text, data_dot_sparse=["item", "history"])
    with trainer(apart) as one:
        assert one.run()["rows"] == 14


RAGGED = "y,user,tags,path\n" + "".join(
    f"{i % 2},u{i % 5},{'red|' if i % 2 else ''}t{i % 3},{'|'.join(f'p{j}' for j in range(i % 4))}\n"
    for i in range(400)
)


def test_combiners_of_features_are_those_of_plain_torch(tmp_path):
    kinds = ["sum", "mean", "sqrtn", "max", "firstn"]
    names = [f"f{kind}" for kind in kinds]
    given = {f"table_dot_features.{name}.combiner": kind for name, kind in zip(names, kinds, strict=True)}
    given |= {"table_dot_features.ffirstn.max_length": 2, "table_dot_features.fmax.dim": 3, "model_dot_name": "dcn"}
    config = csv(tmp_path, "", data_dot_sparse=names, data_dot_raw=True, data_dot_separator="|", **given)
    rows = Rows(config, start_ranks())
    lengths = torch.tensor([2, 0, 3, 1, 3, 1, 2, 1, 3, 1])  # two samples of five features
    ids = torch.arange(int(lengths.sum())) * 7919
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    samples = Samples(label=torch.zeros(2), dense=torch.zeros(2, 0), ids=ids, offsets=offsets)
    for table in rows.tables.values():
        torch.manual_seed(3)
        table.assign(ids, torch.randn(ids.numel(), table.dim_size))
    out = rows(samples)
    assert out.shape == (2, 4 * 3 + 3 + 2 * 4)
    expected = []
    for sample in range(2):
        for place, kind in enumerate(kinds):
            own = ids[offsets[sample * 5 + place] : offsets[sample * 5 + place + 1]]
            table = rows.tables["features.fmax" if kind == "max" else "features"]
            found = table.lookup(own)
            if kind == "firstn":
                found = torch.cat([found[:2], torch.zeros(2 - min(2, len(found)), 4)]).view(-1)
            elif kind == "max":
                found = found.max(0).values if len(found) else torch.zeros(3)
            else:
                divisor = {"sum": 1, "mean": max(1, len(own)), "sqrtn": max(1, len(own)) ** 0.5}[kind]
                found = found.sum(0) / divisor
            expected.append(found)
    torch.testing.assert_close(out, torch.cat(expected).view(2, -1))


def test_samples_come_apart_by_feature():
    flat = Samples(label=torch.zeros(2), dense=torch.zeros(2, 0), ids=torch.tensor([[1, 2, 3], [4, 5, 6]]))
    keyed = Keyed.of(flat, ("a", "b", "c"))
    assert keyed.values.tolist() == [1, 4, 2, 5, 3, 6]
    ragged = Samples(
        label=torch.zeros(2), dense=torch.zeros(2, 0), ids=torch.arange(6), offsets=torch.tensor([0, 2, 2, 3, 6])
    )
    keyed = Keyed.of(ragged, ("a", "b"))
    assert (keyed.values.tolist(), keyed.offsets.tolist()) == ([0, 1, 2, 3, 4, 5], [0, 2, 3, 3, 6])
    none = Keyed.of(Samples.empty(0, 2, ragged=True), ("a", "b"))
    assert (none.values.tolist(), none.offsets.tolist()) == ([], [0])


@pytest.mark.parametrize("model", ["dcn", "two_tower"])
def test_rows_of_many_widths_are_learnt_side_by_side(tmp_path, model):
    given = {
        "table_dot_features.tags.dim": 6, "table_dot_features.tags.combiner": "mean",
        "table_dot_features.path.combiner": "firstn", "table_dot_features.path.max_length": 2,
        "model_dot_name": model, "train_dot_epochs": 8,
    }  # fmt: skip
    given |= {"model_dot_user": ["user"], "model_dot_item": ["tags", "path"]} if model == "two_tower" else {}
    config = csv(tmp_path, RAGGED, data_dot_sparse=["user", "tags", "path"], data_dot_separator="|", **given)
    with trainer(config) as one:
        result = one.run()
        assert result["window_auc"] > 0.8  # "red" determines the label
        assert {name: table["rows"] for name, table in result["tables"].items()} == {
            "features": 5 + 3,
            "features.tags": 4,
        }


def test_settings_reach_their_table(data):
    given = {
        "table_dot_features.C1.initializer": "ones", "table_dot_features.C1.optimizer": "sgd",
        "table_dot_features.C1.lr": 0.0, "table_dot_features.C2.init_scale": 0.0, "table_dot_features.C2.lr": 0.0,
        "table_dot_features.C5.admit_after": 14, "table_dot_features.C5.admit_capacity": 1000,
        "table_dot_features.C6.expire_after": "7d", "train_dot_max_steps": 2,
    }  # fmt: skip
    with trainer(settings(data, **given)) as one:
        one.run()
        tables = one.rows.tables
        ids = next(iter(Stream([str(data / "train.tsv")], make_format("criteo", CRITEO), CRITEO, batch_size=4096)))
        of = {name: ids.samples.ids[:, place].unique() for place, name in enumerate(CRITEO.sparse)}
        known = tables["features.C1"].contains(of["C1"])
        assert known.any()
        assert set(tables["features.C1"].lookup(of["C1"][known]).view(-1).tolist()) == {1.0}
        assert not tables["features.C2"].lookup(of["C2"]).any()
        assert tables["features.C5"].size() < of["C5"].numel()
        expiry = {
            name: table.table_config.slot_expire_time_config.default_expire_time for name, table in tables.items()
        }
        assert expiry["features.C6"] == 7 != expiry["features"]


def test_the_run_says_which_tables_it_has(data, tmp_path):
    class Start(Told):
        def start(self, **values):
            self.tables = values["tables"]

    given = {**MIXED, "train_dot_max_steps": 2}
    told = run(settings(data, tmp_path, **given), Start())
    assert [(one["name"], one["dim"], one["optimizer"], one["rows"]) for one in told.tables] == [
        ("features", 2, "adagrad", 0),
        ("features.C3", 5, "adam", 0),
        ("features.C9", 2, "adagrad", 0),
        ("features.C20", 2, "adagrad", 0),
    ]
    assert told.tables[1]["features"] == ["C3", "C4"]
    again = run(settings(data, tmp_path, **given), Start())
    assert [one["rows"] for one in again.tables] == [one["rows"] for one in told.ended["tables"].values()]


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_of_several_tables_ends_in_the_same_bits(data, tmp_path):
    run(settings(data, tmp_path / "whole", **MIXED))
    for steps in (7, 20, 32):
        run(settings(data, tmp_path / "parts", **MIXED, train_dot_max_steps=steps))
    whole, parts = newest(tmp_path / "whole"), newest(tmp_path / "parts")
    assert whole.name == parts.name == "ckpt-00000032"
    assert rows_of(whole) == rows_of(parts)
    for name in ("dense.safetensors", "rank-00000.safetensors"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    counts = sorted(path.name for path in whole.glob("filter-features.C9-*-of-*"))
    assert counts
    assert [(whole / name).read_bytes() for name in counts] == [(parts / name).read_bytes() for name in counts]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table_dot_features.C3.dim": 6}, r"table\.features\.C3\.dim = 5, the configuration has 6"),
        ({"table_dot_features.C3.optimizer": "sgd"}, r"features\.C3\.optimizer = 'adam', the configuration has 'sgd'"),
        (
            {"table_dot_features.C1.lr": 0.1},
            r"without settings in \[table\.features\.C1\], the configuration has some",
        ),
        ({"table_dot_features.C9.table": "C3"}, r"without schema\.slots\.C9, the configuration has 3"),
        ({"table_dot_features.C20.combiner": "mean"}, r"table\.features\.C20\.combiner = 'sum'"),
    ],
)
def test_a_checkpoint_of_other_tables_is_refused_with_what_differs(data, tmp_path_factory, change, message):
    out = tmp_path_factory.getbasetemp() / "other-tables"
    if not out.exists():
        run(settings(data, out, **MIXED, train_dot_max_steps=2))
    given = {name: value for name, value in MIXED.items() if "C9" not in name or "table" not in str(change)}
    with pytest.raises(ConfigError, match=message):
        open_run(settings(data, out, **given | change))[0].__enter__()


def test_rates_and_expiry_of_a_feature_may_change_and_fresh_begins_anew(data, tmp_path):
    run(settings(data, tmp_path, **MIXED, train_dot_max_steps=2))
    free = {"table_dot_features.C3.lr": 0.1, "table_dot_features.C3.expire_after": "9d"}
    told = run(settings(data, tmp_path, **MIXED | free, train_dot_max_steps=3))
    assert told.saves == [3]
    other = MIXED | {"table_dot_features.C3.dim": 6}
    told = run(settings(data, tmp_path, **other, train_dot_max_steps=1), fresh=True)
    assert "--fresh" in told.notes[0]
    assert told.saves == [1]


def test_damage_in_one_table_falls_back_to_the_checkpoint_before(data, tmp_path):
    run(settings(data, tmp_path, **MIXED, out_dot_every_steps=2, train_dot_max_steps=4))
    path = next((tmp_path / "ckpt-00000004").glob("features.C3-*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    opened, told = open_run(settings(data, tmp_path, **MIXED))
    with opened as one:
        assert one.at.step == 2
        assert "features.C3" in told.notes[0]
        sizes = one.rows.sizes()
    manifest = json.loads((tmp_path / "ckpt-00000002" / "manifest.json").read_text())["content"]
    assert sizes == {table["name"]: table["rows"] for table in manifest["tables"]}


# --- ranks ------------------------------------------------------------------------------------------------------------


def train_on_ranks(rank, world, *, settings):
    with trainer(load_config(None, settings)) as one:
        result = one.run()
        return result["rows"], {name: table["rows"] for name, table in result["tables"].items()}, result["samples"]


def given_to(config_settings):
    return {name.replace("_dot_", "."): value for name, value in config_settings.items()}


@pytest.mark.timeout(600)
def test_ranks_share_several_tables_and_their_checkpoint_serves_one_process(data, tmp_path):
    from tests.train.loop.helpers import SMALL

    base = SMALL | given_to(MIXED) | {"data.train": [str(data / "train.tsv")], "out.dir": str(tmp_path)}
    parts = run_ranks(2, train_on_ranks, settings=base | {"train.max_steps": 5}, timeout_s=300)
    ways = {"table.shard": "table:1", "table.features.C3.shard": "data", "table.features.C20.shard": "column"}
    whole = run_ranks(2, train_on_ranks, settings=base | ways, timeout_s=300)  # from rows that were sharded by row
    assert parts[0] == parts[1]
    assert whole[0] == whole[1]
    rows, tables, samples = whole[0]
    assert (samples, len(tables), sum(tables.values())) == (4096, 4, rows)
    manifest = json.loads((newest(tmp_path) / "manifest.json").read_text())["content"]
    assert {one["name"]: one["rows"] for one in manifest["tables"]} == tables
    assert len(rows_of(newest(tmp_path))) == rows
    with trainer(load_config(None, base)) as alone:
        assert alone.resumed is not None
        assert alone.rows.sizes() == tables


@pytest.mark.timeout(600)
def test_a_rank_whose_bags_are_all_empty_takes_part(tmp_path):
    """Rank 1's file has no tags and a few samples only, so that it is without ids, and then without samples."""
    for name, lines in (("a", 900), ("b", 60)):
        tags = (lambda i: f"t{i % 7}|t{i % 3}") if name == "a" else (lambda i: "")
        text = "y,user,tags\n" + "".join(f"{i % 2},u{i % 50},{tags(i)}\n" for i in range(lines))
        (tmp_path / f"{name}.csv").write_text(text)
    given = {
        "data.train": [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")], "data.format": "csv", "data.label": "y",
        "data.sparse": ["user", "tags"], "data.separator": "|", "train.batch_size": 50, "table.dim": 4,
        "model.name": "dcn", "model.hidden": [8], "train.threads": 1, "data.prefetch": 0,
        "table.features.tags.dim": 3, "table.features.tags.combiner": "max", "train.epochs": 2,
    }  # fmt: skip
    one, other = run_ranks(2, train_on_ranks, settings=given, timeout_s=300)
    assert one == other
    assert one[1] == {"features": 50, "features.tags": 7}
    assert one[2] == 2 * 960


# --- servers ----------------------------------------------------------------------------------------------------------


def test_several_tables_on_servers_come_back_with_the_checkpoint(data, tmp_path):
    pytest.importorskip("zmq")
    from shoal.sharded.ps import Engine, ParameterServer, Shard

    ended = []
    for name in ("whole", "parts"):
        with ParameterServer(Engine(Shard(0, 1), "checkpoint", tmp_path / name / "ps")) as server:
            given = {**MIXED, "train_dot_ps": [server.address]}
            if name == "parts":
                run(settings(data, tmp_path / name / "run", **given, train_dot_max_steps=6))
                ahead = settings(data, None, **given, train_dot_max_steps=3)
                run(ahead)  # the rows on the server are now newer than the checkpoint
            told = run(settings(data, tmp_path / name / "run", **given, train_dot_max_steps=12))
            ended.append((told.ended["tables"], told.ended["logloss"]))
    assert ended[0] == ended[1]
    assert {name: one["rows"] for name, one in ended[0][0].items()}.keys() == {
        "features", "features.C3", "features.C9", "features.C20",
    }  # fmt: skip
    one, other = (newest(tmp_path / name / "run") for name in ("whole", "parts"))
    assert (one / "dense.safetensors").read_bytes() == (other / "dense.safetensors").read_bytes()
    shutil.rmtree(tmp_path)
