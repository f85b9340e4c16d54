"""Exports of a run: a replica's answers to raw values and ids, and when exports are written."""

import json
import os
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from shoal.cli.main import main
from shoal.data.raw import InputMaker
from shoal.errors import ConfigError, UnsupportedError
from shoal.proto.serving.tf_serving_pb2 import ModelServerConfig
from shoal.serving import ModelServer
from shoal.serving.cluster.agent_utils import gen_model_config
from shoal.serving.export.manifest import Manifest
from shoal.serving.predict import PREDICT, decode_response, encode_request, model_spec
from shoal.serving.tensors import decode_tensor, encode_tensor
from shoal.sharded import ParameterServer
from shoal.sharded.ps.server.engine import Engine
from shoal.sharded.ps.server.shard import Shard
from shoal.testing import run_ranks
from shoal.train.loop.rows.features import served_features
from shoal.train.loop.trainer import trainer
from shoal.trainer import load_config
from tests.train.loop.helpers import Told

CONFIG = """
[data]
train = ["clicks.jsonl.csv"]
format = "csv"
label = "click"
shuffle_rows = 64
prefetch = 0

[features.user]
[features.zip]
kind = "id"
column = "postcode"
default = 7
[features.age]
kind = "bucket"
boundaries = [18, 25, 35.5]
default = 30
[features.visits]
kind = "log"
steps = 2
[features.country]
kind = "vocabulary"
file = "countries.txt"
[features.color]
kind = "vocabulary"
words = ["red", "green"]
unknown = "hash"
[features.tags]
separator = "|"
max_length = 3
[features.seen]
separator = "|"
kind = "vocabulary"
words = ["a", "b", "c"]
unknown = "drop"
default = "a"
[features.user_x_country]
kind = "cross"
of = ["user", "country"]
[features.tags_x_color]
kind = "cross"
of = ["tags", "color"]
[features.price]
kind = "number"
log = true
default = 2.5
[features.weight]
kind = "number"
column = "grams"
low = 1
high = 10
mean = 2
std = 3

[table]
dim = 4
init_scale = 0.5
[table.features.user]
dim = 6
optimizer = "adam"
[table.features.tags]
combiner = "mean"
[table.features.seen]
combiner = "sqrtn"
[table.features.tags_x_color]
combiner = "max"
[table.features.country]
combiner = "firstn"
max_length = 2

[model]
name = "dcn"
hidden = [8]

[train]
batch_size = 32
threads = 1
lr = 0.05
"""
ROWS = {
    "user": ["u1", "u2", None, "nobody", "Zürich", ""],
    "postcode": [8001, 3000, None, 99, 8001, 3000],
    "age": [17, 33.3, None, 18, 25, 99],
    "visits": [0, 5, None, 1000, 3, -4],
    "country": ["ch", "de", None, "xx", "fr", ""],
    "color": ["red", "blue", None, "green", "red", ""],
    "tags": [["a", "b"], [], None, ["a", "b", "c", "d"], ["new"], ["a"]],
    "seen": [["a", "zz"], [], None, ["b", "c"], ["zz"], ["c"]],
    "price": [9.5, 0.0, None, -3.0, 100.0, 1.0],
    "grams": [5, 0, None, 50, 3, 2],
}


def write_data(folder, rows=640):
    generator = np.random.default_rng(3)
    pick = lambda values: values[generator.integers(len(values))]  # noqa: E731
    lines = ["click,user,postcode,age,visits,country,color,tags,seen,price,grams"]
    for _ in range(rows):
        tags = "|".join(generator.choice(list("abcde"), generator.integers(0, 4)))
        seen = "|".join(generator.choice(["a", "b", "c", "zz"], generator.integers(0, 3)))
        lines.append(
            f"{generator.integers(2)},{pick(['u1', 'u2', 'u3', 'Zürich', ''])},{pick([8001, 3000, 99, ''])},"
            f"{pick([10, 20, 30, 40, ''])},{pick([0, 1, 5, 1000, ''])},{pick(['ch', 'de', 'fr', 'yy', ''])},"
            f"{pick(['red', 'green', 'blue', ''])},{tags},{seen},{pick([0.5, 9.5, 100, ''])},{pick([1, 5, 50, ''])}"
        )
    (folder / "clicks.jsonl.csv").write_text("\n".join(lines) + "\n")
    (folder / "countries.txt").write_text("ch\nde\nfr\n")
    path = folder / "run.toml"
    path.write_text(CONFIG)
    return path


def own_logits(one, rows):
    """What the trainer itself says of raw rows."""
    inputs = InputMaker(one.config.data.schema())(rows)
    one.model.eval(), one.rows.eval()
    try:
        with torch.no_grad():
            found = type("Found", (), {"ids": inputs.ids, "offsets": inputs.offsets, "__len__": lambda _: 6})()
            return one.model(inputs.dense, one.rows(found)), inputs
    finally:
        one.model.train(), one.rows.train()


@contextmanager
def serving(folder, name="ctr"):
    config = ModelServerConfig()
    config.model_config_list.config.append(gen_model_config(name, str(folder)))
    server = ModelServer(rest_address="127.0.0.1:0", config=config, poll_wait_seconds=0).start()
    try:
        yield server
    finally:
        server.stop(0)


def by_grpc(server, inputs, signature="", name="ctr"):
    request = encode_request(
        model_spec(name, signature), {alias: encode_tensor(value) for alias, value in inputs.items()}
    )
    with grpc.insecure_channel(server.address) as channel:
        answer = channel.unary_unary(PREDICT)(request, timeout=60)
    return {alias: decode_tensor(value) for alias, value in decode_response(answer)[1].items()}


def by_rest(server, body, name="ctr"):
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.rest_port}/v1/models/{name}:predict", json.dumps(body).encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return json.loads(error.read())["error"]


def texts(values):
    return np.array([b"" if value is None else str(value).encode() for value in values], object)


def filled(lists):
    most = max(len(one or []) for one in lists)
    return np.array([[*(v.encode() for v in one or []), *[b""] * (most - len(one or []))] for one in lists], object)


def numbers(values):
    return torch.tensor([float("nan") if value is None else value for value in values])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of every kind of feature that has ended, its trainer, and its export."""
    folder = tmp_path_factory.mktemp("run")
    path = write_data(folder)
    with trainer(load_config(path), reporter=Told()) as one:
        one.run()
        yield one, one.export(str(folder / "exports/ctr"))


def test_a_replica_gives_the_trainers_ids_and_logits_for_every_kind_of_feature(trained):
    one, path = trained
    expected, inputs = own_logits(one, ROWS)
    assert len(set(expected.tolist())) > 4
    served = served_features(one.config)
    assert torch.equal(served.makers()["serving_default"](ROWS).ids, inputs.ids)
    with serving(os.path.dirname(path)) as server:
        instances = [{name: values[row] for name, values in ROWS.items()} for row in range(6)]
        rows = by_rest(server, {"instances": instances})["predictions"]
        columns = by_rest(server, {"inputs": ROWS})["outputs"]
        raw = by_grpc(
            server,
            {
                "user": texts(ROWS["user"]), "country": texts(ROWS["country"]), "color": texts(ROWS["color"]),
                "tags": filled(ROWS["tags"]), "seen": filled(ROWS["seen"]), "postcode": texts(ROWS["postcode"]),
                **{name: numbers(ROWS[name]) for name in ("age", "visits", "price", "grams")},
            },
        )  # fmt: skip
    for got in (raw["logit"], torch.tensor(columns["logit"]), torch.tensor([row["logit"] for row in rows])):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(raw["probability"], expected.sigmoid(), rtol=1e-5, atol=1e-6)


def test_ids_give_what_raw_values_give(trained):
    one, path = trained
    expected, inputs = own_logits(one, ROWS)
    features = one.config.data.schema().sparse
    ids = {name: [] for name in features}
    for place, name in [(i, name) for i in range(6) for name in features]:
        at = place * len(features) + features.index(name)
        ids[name].append(inputs.ids[inputs.offsets[at] : inputs.offsets[at + 1]].tolist())
    with serving(os.path.dirname(path)) as server:
        given = {name: values for name, values in ids.items() if "_x_" not in name}
        rest = by_rest(server, {"inputs": given | {n: ROWS[n] for n in ("price", "grams")}, "signature_name": "ids"})[
            "outputs"
        ]
        tensors = {
            name: torch.tensor([one[0] for one in v]) for name, v in given.items() if name not in ("tags", "seen")
        }
        for name in ("tags", "seen"):
            most = max(map(len, given[name]))
            tensors[name] = torch.tensor([[*one, *[0] * (most - len(one))] for one in given[name]])
            tensors[f"{name}/lengths"] = torch.tensor([len(one) for one in given[name]])
        got = by_grpc(server, tensors | {n: numbers(ROWS[n]) for n in ("price", "grams")}, "ids")
    torch.testing.assert_close(torch.tensor(rest["logit"]), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got["logit"], expected, rtol=1e-5, atol=1e-6)


def test_what_a_request_leaves_out_is_missing(trained):
    one, path = trained
    expected, _ = own_logits(one, {name: [None] * 6 if name != "user" else values for name, values in ROWS.items()})
    with serving(os.path.dirname(path)) as server:
        got = by_grpc(server, {"user": texts(ROWS["user"])})["logit"]
        mixed = by_rest(server, {"instances": [{"user": "u1"}, {"age": 33}]})["predictions"]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert abs(mixed[0]["logit"] - float(expected[0])) < 1e-5


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"usr": ["u1"]}, "there is no input 'usr' (did you mean 'user'?)"),
        ({"user": ["u1"], "age": [1, 2]}, "one row per sample"),
        ({"user": "u1"}, "input 'user' must be a list with one value per row"),
        ({"user": [{"a": 1}]}, "a value must be a text, a number, null or a list"),
        ({"user": [["u1", "u2"]]}, "feature 'user'"),
        ({"age": ["old"]}, "feature 'age'"),
        ({"price": ["cheap"]}, "number 'price'"),
        ({"price": [[1, 2]]}, "number 'price'"),
        ({}, "at least one input"),
    ],
)
def test_a_request_that_the_model_does_not_know_is_refused_by_name(trained, inputs, message):
    with serving(os.path.dirname(trained[1])) as server:
        assert message in by_rest(server, {"inputs": inputs})
        assert by_rest(server, {"inputs": {"user": ["u1"]}})["outputs"]


def test_tensors_of_wrong_types_and_shapes_are_refused_by_name(trained):
    with serving(os.path.dirname(trained[1])) as server:
        for inputs, message in (
            ({"usr": texts(["u1"])}, "there is no input 'usr'"),
            ({"price": texts(["1"])}, "input 'price' must be one of .*, got string"),
            ({"user": torch.ones(2, dtype=torch.bool)}, "input 'user' must be one of .*, got bool"),
            ({"user": np.array([[b"a", b"b"]], object)}, r"input 'user' must have shape \[rows\], got \[1, 2\]"),
            ({"user": texts(["u1"]), "age": torch.ones(2)}, "one row per sample"),
            ({"user/lengths": torch.ones(1, dtype=torch.int64)}, "there is no input 'user/lengths'"),
            ({"tags": filled([["a"]] * 2), "tags/lengths": torch.tensor([5, 1])}, "tags/lengths"),
        ):
            with pytest.raises(grpc.RpcError, match=message) as caught:
                by_grpc(server, inputs)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError, match=r"input 'user' must be one of int64.*, got string"):
            by_grpc(server, {"user": texts(["u1"])}, "ids")


def test_metadata_tells_raw_inputs_and_id_inputs(trained):
    manifest = Manifest.read(Path(trained[1]))
    raw, ids = manifest.signatures["serving_default"].inputs, manifest.signatures["ids"].inputs
    assert (raw["user"].dtype, raw["tags"].shape, raw["age"].dtype) == ("string", [None, None], "float")
    assert {raw["postcode"].dtype, ids["zip"].dtype, ids["tags"].dtype} == {"int64"}
    assert "user_x_country" not in raw
    assert "grams" in ids
    assert manifest.stamps == {"trainer": trained[0].at.stamp}
    assert manifest.model_name == "ctr"


def test_an_export_has_its_vocabularies_and_no_optimizer_state(trained):
    path = trained[1]
    words = [(Path(path) / name).read_text() for name in Manifest.read(Path(path)).features["words"].values()]
    assert "ch\nde\nfr\n" in words
    dumps = b"".join(file.read_bytes() for file in (Path(path) / "assets").iterdir())
    assert dumps
    rows = sum(len(one) for one in trained[0].rows.local)
    width = sum(len(one) * one.dim_size for one in trained[0].rows.local)
    assert len(dumps) < 40 * rows + 5 * width  # with adagrad's state there would be twice as many floats


# --- when, and from where


def run(path, **changes):
    told = Told()
    told.exports = []
    told.exported = lambda **values: told.exports.append(values)
    config = load_config(path, {name.replace("__", "."): value for name, value in changes.items()})
    with trainer(config, reporter=told) as one:
        one.run()
        logits, _ = own_logits(one, ROWS)
    return told, logits


def versions(folder):
    return sorted(int(name) for name in os.listdir(folder) if name.isdecimal())


def served_logits(folder, **options):
    with serving(folder, **options) as server:
        return torch.tensor(by_rest(server, {"inputs": ROWS})["outputs"]["logit"])


def test_a_run_exports_at_its_end_and_its_checkpoint_gives_the_same(tmp_path, capsys):
    path = write_data(tmp_path)
    exports = tmp_path / "exports/ctr"
    told, logits = run(path, serve__dir=str(exports), out__dir=str(tmp_path / "run"))
    assert [one["step"] for one in told.exports] == [20]
    torch.testing.assert_close(served_logits(exports), logits, rtol=1e-5, atol=1e-6)
    other = tmp_path / "other"
    assert main(["export", str(tmp_path / "run"), "--out", str(other), "--model", "ctr"]) == 0
    torch.testing.assert_close(served_logits(other), logits, rtol=1e-5, atol=1e-6)
    first, second = (Manifest.read(one / str(versions(one)[0])).stamps["trainer"] for one in (exports, other))
    assert first.run == second.run
    assert 20 <= second.step <= first.step
    for wrong, message in ((tmp_path / "nowhere", "there is no checkpoint"), (tmp_path, "has no complete checkpoint")):
        assert main(["export", str(wrong), "--out", str(other)]) == 2
        assert message in capsys.readouterr().err
    (newest,) = (tmp_path / "run").glob("ckpt-*")
    dense = newest / "dense.safetensors"
    dense.write_bytes(dense.read_bytes()[:-1] + b"x")
    assert main(["export", str(newest), "--out", str(tmp_path / "damaged")]) == 1
    assert not (tmp_path / "damaged").exists() or not versions(tmp_path / "damaged")


def test_exports_come_by_time_and_the_oldest_are_removed(tmp_path):
    path = write_data(tmp_path)
    exports = tmp_path / "exports"
    (exports / ".tmp-17-abc").mkdir(parents=True)  # left by a killed run
    told, logits = run(path, serve__dir=str(exports), serve__every_s=0.000001, serve__keep=2, train__max_steps=4)
    assert [one["step"] for one in told.exports] == [1, 2, 3, 4]
    assert len(versions(exports)) == 2
    assert [name for name in os.listdir(exports) if not name.isdecimal()] == []
    torch.testing.assert_close(served_logits(exports), logits, rtol=1e-5, atol=1e-6)


def test_only_better_models_are_exported(tmp_path):
    path = write_data(tmp_path)
    data = str(tmp_path / "clicks.jsonl.csv")
    told, _ = run(
        path, serve__dir=str(tmp_path / "exports"), serve__when_better=True, data__eval=[data], eval__every_steps=5,
        serve__keep=9,
    )  # fmt: skip
    best = [one["step"] for one in told.evaluations if one["is_best"]]
    assert [one["step"] for one in told.exports] == best
    assert len(versions(tmp_path / "exports")) == len(best)


def test_a_table_without_rows_and_a_number_alone_are_exported(tmp_path):
    path = write_data(tmp_path)
    with trainer(load_config(path), reporter=Told()) as one:
        target = one.export(str(tmp_path / "empty"), model="ctr")
        logits, _ = own_logits(one, ROWS)
    assert Manifest.read(Path(target)).global_step == 0
    torch.testing.assert_close(served_logits(tmp_path / "empty"), logits, rtol=1e-5, atol=1e-6)


def test_an_export_that_fails_leaves_nothing_and_the_run_goes_on(tmp_path):
    path = write_data(tmp_path)
    exports = tmp_path / "exports"
    config = load_config(path, {"serve.dir": str(exports), "serve.every_s": 1e-6, "train.max_steps": 2})
    told = Told()
    with trainer(config, reporter=told) as one:
        one.model.forward = lambda *both: torch.zeros(len(both[0]), requires_grad=True)  # cannot be traced
        with pytest.raises(ConfigError, match="must name its two arguments"):
            one.run()
    assert "the export of step 1 failed" in told.notes[0]
    assert os.listdir(exports) == []


def test_rows_on_servers_are_exported_in_pages_and_from_a_checkpoint(tmp_path, capsys):
    path = write_data(tmp_path)
    dirs = [tmp_path / f"ps/shard-{index:05d}" for index in range(2)]
    servers = [ParameterServer(Engine(Shard(index, 2), "checkpoint", dirs[index])) for index in range(2)]
    try:
        for server in servers:
            server.start()
        config = load_config(
            path, {"train.ps": [server.address for server in servers], "out.dir": str(tmp_path / "run")}
        )
        with trainer(config, reporter=Told()) as one:
            one.run()
            target = one.export(str(tmp_path / "ctr"))
            logits, _ = own_logits(one, ROWS)
            pages = [len(ids) for ids, _ in one.rows.client.scan("features", page_bytes=16)]
            assert sum(pages) == one.rows.sizes()["features"]
            assert set(pages) == {1}
            assert sorted(Manifest.read(Path(target)).stamps) == ["ps_0", "ps_1", "trainer"]
            one.rows.client._operations = [ops - {"SCAN"} for ops in one.rows.client._operations]
            one.rows.client._take_infos = lambda infos: None
            with pytest.raises(UnsupportedError, match="does not support scan: it is older than this worker"):
                one.export(str(tmp_path / "ctr"))
        command = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "later/ctr")]
        assert main([*command, "--ps-dir", str(tmp_path / "ps")]) == 0  # the servers keep running
    finally:
        for server in servers:
            server.stop()
    torch.testing.assert_close(served_logits(tmp_path / "ctr"), logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(served_logits(tmp_path / "later/ctr"), logits, rtol=1e-5, atol=1e-6)
    later = Manifest.read(tmp_path / "later/ctr" / str(versions(tmp_path / "later/ctr")[0])).stamps
    first = Manifest.read(Path(target)).stamps
    assert {name: later[name] for name in ("ps_0", "ps_1")} == {name: first[name] for name in ("ps_0", "ps_1")}
    assert (later["trainer"].run, later["trainer"].step) == (first["trainer"].run, 20)
    capsys.readouterr()
    assert main(command) == 2
    assert "pass the folders that these were started with: --ps-dir DIR" in capsys.readouterr().err
    assert main([*command, "--ps-dir", str(tmp_path / "run")]) == 2
    assert "no parameter server has kept rows as" in capsys.readouterr().err
    for kept in dirs[1].glob("kept-*"):
        kept.rename(tmp_path / kept.name)
    assert main([*command, "--ps-dir", str(tmp_path / "ps")]) == 2
    assert "for shards [1] of 2; list all folders" in capsys.readouterr().err


def export_of_ranks(rank, world, *, path, folder):
    with trainer(load_config(path), reporter=Told()) as one:
        one.run()
        one.export(folder)
        return own_logits(one, ROWS)[0].tolist()


def test_rows_of_all_ranks_are_in_one_export(tmp_path):
    path = write_data(tmp_path)
    folder = tmp_path / "ctr"
    logits = run_ranks(2, export_of_ranks, path=str(path), folder=str(folder))
    torch.testing.assert_close(served_logits(folder), torch.tensor(logits[0]), rtol=1e-5, atol=1e-6)
    assert sorted(Manifest.read(folder / str(versions(folder)[0])).stamps) == ["trainer_0", "trainer_1"]


def test_scores_are_corrected_for_negatives_that_were_left_out(tmp_path):
    """Where the evaluation data has all of them, its calibration is that of the served scores."""
    path = write_data(tmp_path, rows=200)
    changes = {
        "data.keep_negatives": 0.25,
        "data.eval": [str(tmp_path / "clicks.jsonl.csv")],
        "eval.keep_negatives": 1.0,
    }
    with trainer(load_config(path, changes), reporter=(told := Told())) as one:
        one.run()
        expected, _ = own_logits(one, ROWS)
        one.export(str(tmp_path / "exports/ctr"))
        plain = one.config.data.schema()
    (values,) = told.evaluations
    assert values["calibration"] < 0.8  # this data contains all negatives
    assert plain.to_json()["keep_negatives"] == 0.25
    assert plain.log_odds == pytest.approx(np.log(0.25))
    with serving(tmp_path / "exports/ctr") as server:
        body = {"instances": [{name: values[row] for name, values in ROWS.items()} for row in range(2)]}
        answers = by_rest(server, body)["predictions"]
    for answer, logit in zip(answers, expected.tolist(), strict=False):
        assert answer["logit"] == pytest.approx(logit + np.log(0.25), rel=1e-5)
        assert answer["probability"] == pytest.approx(1 / (1 + np.exp(-answer["logit"])), rel=1e-5)
    with pytest.raises(ConfigError, match="keep_negatives must be above 0"):
        load_config(path, {"data.keep_negatives": 0.0})
