"""Nets after export: the same results for any batch size, which may be batched, and what a program file may hold."""

import io
import json
import os
import pickle
import threading
import uuid
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shoal.errors import ConfigError, DataError
from shoal.serving import Feature, ModelExporter
from shoal.serving.export.manifest import Manifest
from shoal.serving.export.program_file import load_exported
from shoal.serving.server.loader import load_servable
from shoal.serving.server.program import load_program
from shoal.table import test_hash_table
from tests.serving.server.test_server import Client, config_of, serve  # noqa: F401

ROWS = torch.arange(40).float().reshape(20, 2)


def table_of():
    table = test_hash_table(2, name_suffix=uuid.uuid4().hex)
    table.assign(torch.arange(20), ROWS)
    return table


class Calls(torch.nn.Module):
    """A net from a function of the pooled rows."""

    def __init__(self, work):
        super().__init__()
        self.work = work

    def forward(self, user):
        return self.work(user)


def export(tmp_path, work, combiner="sum", **fields):
    net = work if isinstance(work, torch.nn.Module) else Calls(work)
    features = {"user": Feature(slot="u", combiner=combiner)}
    tool = ModelExporter(tmp_path, model_name="m", net=net, features=features, **fields)
    tool.export([{"u": table_of()}], global_step=1, timestamp=1)
    return tmp_path / "exported_models" / "1"


def branch_at(limit):
    return lambda user: user.sum(1) if user.shape[0] > limit else -user.sum(1)


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (lambda user: user.sum(1) * len(user), "rows of input 'user' to 2"),
        (branch_at(5), "rows of input 'user'"),
        (branch_at(1), "differs from the net for a batch of 1 rows"),
        (branch_at(1000), "to 1000"),
        (lambda user: user.reshape(-1, 2, 2).sum((1, 2)), "any batch size"),
        (lambda user: {"score": user.sum(1), "dim": 2}, "must be a tensor"),
    ],
    ids=["len", "branch at 5", "branch at 1", "branch at 1000", "pairs", "no tensor"],
)
def test_a_net_that_export_would_change_is_refused_with_the_reason(tmp_path, work, text):
    with pytest.raises(ConfigError, match=text):
        export(tmp_path, work)
    assert not list((tmp_path / "exported_models").iterdir())


def test_a_net_is_as_it_was_after_export(tmp_path):
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, user):
            self.calls.add_(1)
            return user.sum(1)

    net = Counts()
    state = torch.random.get_rng_state()
    export(tmp_path, net)
    assert net.training
    assert net.calls.item() == 0
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("work", "row_wise", "shape"),
    [
        (lambda user: user.sum(1), True, [None]),
        (lambda user: user * 2, True, [None, 2]),
        (lambda user: user @ user.T, False, [None, None]),
        (lambda user: user.mean(), False, []),
        (lambda user: user.mean(0), False, [2]),
        (lambda user: user.sum(1).softmax(0), False, [None]),
        (lambda user: user - user.mean(0), False, [None, 2]),
        (lambda user: user.sum(1).squeeze(), False, None),
    ],
    ids=["row", "rows", "all pairs", "scalar", "mean row", "softmax over rows", "centred", "squeeze"],
)
def test_whether_samples_are_independent_is_in_the_manifest(tmp_path, work, row_wise, shape):
    where = export(tmp_path, work)
    spec = Manifest.read(where).signatures["serving_default"]
    assert spec.row_wise is row_wise
    assert spec.outputs["output"].shape == shape
    servable = load_servable(where, tmp_path)
    assert servable.signatures["serving_default"].batch is row_wise
    ids = torch.tensor([[1], [2], [3], [4], [5]])
    got = servable.signatures["serving_default"].run({"user": ids})["output"]
    assert torch.allclose(got, work(ROWS[ids.reshape(-1)]))


def test_an_export_that_does_not_say_whether_samples_are_independent_is_not_batched(tmp_path):
    where = export(tmp_path, lambda user: user.sum(1))
    manifest = Manifest.read(where)
    manifest.signatures["serving_default"].row_wise = None
    assert not load_program(where, manifest, {})[0]["serving_default"].batch


@pytest.mark.parametrize("work", [lambda user: user @ user.T, lambda user: user.sum(), lambda user: user.sum(1)])
def test_no_caller_gets_the_values_of_another(serve, tmp_path, work):  # noqa: F811
    export(tmp_path, work)
    server, _ = serve(config_of(m=(tmp_path / "exported_models",)))
    requests = [torch.randint(0, 20, (rows, 1)) for rows in (1, 2, 3) * 8]
    answers = [None] * len(requests)
    clients = [Client(server) for _ in range(8)]

    def ask(client):
        for index in range(client, len(requests), 8):
            answers[index] = clients[client].predict("m", "", {"user": requests[index]})["output"]

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for request, answer in zip(requests, answers, strict=True):
        assert torch.allclose(answer, work(ROWS[request.reshape(-1)]))


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_a_length_that_the_net_fixes_is_in_the_signature(tmp_path):
    where = export(tmp_path, lambda user: user.reshape(-1, 6).sum(1), combiner="none")
    assert Manifest.read(where).signatures["serving_default"].inputs["user"].shape == [None, 3]
    free = export(tmp_path / "free", lambda user: user.sum((1, 2)), combiner="none")
    assert Manifest.read(free).signatures["serving_default"].inputs["user"].shape == [None, None]


def test_a_length_that_the_net_limits_is_checked_when_it_runs(tmp_path):
    where = export(tmp_path, lambda user: user.sum((1, 2)) if user.shape[1] <= 6 else user[:, 0, 0], combiner="none")
    run = load_servable(where, tmp_path).signatures["serving_default"].run
    assert run({"user": torch.ones(2, 5, dtype=torch.int64)})["output"].tolist() == [25, 25]
    with pytest.raises(Exception, match="6"):
        run({"user": torch.ones(2, 9, dtype=torch.int64)})


# --- program files ----------------------------------------------------------------------------------------------------


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def rewrite(file, change):
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    records = change(records)
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)


def record(records, end):
    return next(name for name in records if name.endswith(end))


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def pickled_constant(records, trap):
    config = record(records, "model_constants_config.json")
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    where = config.replace("model_constants_config.json", "opaque_obj_0")
    return records | {config: json.dumps({"config": {"c": entry}}).encode(), where: pickle.dumps(trap)}


@pytest.mark.parametrize("kind", ["sample inputs", "constant", "legacy weights", "library", "older format"])
def test_loading_a_program_never_unpickles_objects(tmp_path, kind):
    where = export(tmp_path / "m", lambda user: user.sum(1))
    file = where / "variables" / "program.pt2"
    trap = Trap(tmp_path / "sprung")

    def change(records):
        weights = record(records, "model_weights_config.json")
        match kind:
            case "sample inputs":
                return records | {record(records, "sample_inputs/model.pt"): saved(trap)}
            case "constant":
                return pickled_constant(records, trap)
            case "legacy weights":
                return records | {weights.replace("model_weights_config.json", "model.pt"): saved({"w": trap})}
            case "library":
                return records | {weights.replace("weights/model_weights_config.json", "aotinductor/m/m.so"): b"x"}
            case _:
                names = ("serialized_state_dict.pt", "serialized_constants.pt", "serialized_example_inputs.pt")
                model = {"version": b"8.8", "serialized_exported_program.json": records[record(records, "model.json")]}
                return model | {name: saved(trap) for name in names}

    rewrite(file, change)
    with pytest.raises(DataError, match=r"program\.pt2"):
        load_exported(file)
    with pytest.raises(DataError, match=r"program\.pt2"):
        load_servable(where, tmp_path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("damage", [b"", b"nothing", None])
def test_a_broken_program_file_is_a_data_error_with_its_name(tmp_path, damage):
    file = export(tmp_path, lambda user: user.sum(1)) / "variables" / "program.pt2"
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage)
    with pytest.raises(DataError, match=r"program\.pt2"):
        load_exported(file)


def test_programs_are_loaded_by_several_threads_at_once(tmp_path):
    file = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(2, 1), (torch.ones(3, 2),)), str(file))
    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(lambda _: load_exported(file), range(32)))
    assert len({tuple(program.state_dict["weight"].flatten().tolist()) for program in programs}) == 1
