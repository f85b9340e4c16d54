"""Versions: all sub-graphs of a prediction have one version, and models are served while they change."""

import threading
import uuid
from pathlib import Path

import grpc
import pytest
import torch

from shoal.cli.serve import Options, models_of
from shoal.errors import ConfigError
from shoal.serving import (
    ExportMode,
    Feature,
    GetModelStatusRequest,
    GetModelStatusResponse,
    ModelExporter,
    ModelState,
    ReloadConfigRequest,
    ReloadConfigResponse,
    set_address_table,
)
from shoal.serving.client import sub_graphs
from shoal.serving.export.manifest import Manifest
from shoal.serving.server import loading
from shoal.table import test_hash_table
from tests.serving.helpers import eventually
from tests.serving.server.test_server import CODE, Client, config_of, export, fails, serve, value_of  # noqa: F401

SCORES = {1: 2.0, 2: 80.0, 3: 900.0}  # weight times row; any mix of versions gives another number
WEIGHTS = {1: 1.0, 2: 8.0, 3: 30.0}


class Scale(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight))

    def forward(self, user):
        return {"score": user.sum(1) * self.weight}


def export_version(path, version, remote_net=False, dense_only=False, weight=None):
    shards = []
    for shard in range(2):
        table = test_hash_table(1, name_suffix=uuid.uuid4().hex)
        table.assign(torch.arange(shard, 10, 2), torch.full((5, 1), SCORES[version] / WEIGHTS[version]))
        table.name = f"T{shard}"
        shards.append({"u": table})
    net = Scale(weight or WEIGHTS[version])
    tool = ModelExporter(path, model_name="m", net=net, features={"user": Feature(slot="u")})
    return tool.export(
        shards, global_step=version, mode=ExportMode.DISTRIBUTED, timestamp=version, with_remote_gpu=remote_net,
        dense_only=dense_only,
    )  # fmt: skip


def subs_of(path, policy="latest", remote_net=False):
    base = path / "exported_models"
    models = {"m:entry": (base / "entry", "latest")}
    models |= {f"m:{sub}": (base / sub, policy) for sub in ("ps_0", "ps_1")}
    if remote_net:
        models["m:dense_0"] = (base / "dense_0", "latest")
    return config_of(**models)


def route_to(*servers):
    names = ("m:entry", "m:ps_0", "m:ps_1", "m:dense_0")
    set_address_table({name: [f"127.0.0.1:{each.port}" for each in servers] for name in names})


def score(client, *ids):
    return client.predict("m:entry", "", {"user": torch.tensor([[each] for each in ids or (3, 4)])})["score"].tolist()


def status_of(client, model, version):
    request = GetModelStatusRequest()
    request.model_spec.name = model
    answer = client.call("ModelService", "GetModelStatus", request, GetModelStatusResponse)
    return next(each for each in answer.model_version_status if each.version == version)


# --- sub-graphs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remote_net", [False, True])
def test_every_prediction_is_of_one_version_while_versions_switch(serve, tmp_path, remote_net):  # noqa: F811
    export_version(tmp_path, 1, remote_net)
    server, client = serve(subs_of(tmp_path, remote_net=remote_net), poll=0.05)
    route_to(server)
    stop, failures, answers = threading.Event(), [], []

    def ask_all():
        own = Client(server)
        while not stop.is_set():
            try:
                answers.append(tuple(score(own)))
            except grpc.RpcError as error:
                failures.append(error)

    threads = [threading.Thread(target=ask_all) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for version in (2, 3):
            eventually(lambda version=version: (SCORES[version - 1],) * 2 in answers[-5:] or failures)
            export_version(tmp_path, version, remote_net)
            eventually(lambda version=version: (SCORES[version],) * 2 in answers[-5:] or failures)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not failures
    assert set(answers) == {(value, value) for value in SCORES.values()}
    assert score(client) == [900.0, 900.0]


def test_shoal_serve_follows_exports_with_all_sub_graphs(serve, tmp_path):  # noqa: F811
    export_version(tmp_path, 1)
    config, _, bindings = models_of(Options(model_dir=Path(tmp_path)))
    alone = Path(config.model_config_list.config[1].base_path)
    assert models_of(Options(model_dir=alone, sub_graph=("ps_0",)))[2][0][1] == "ps_0"
    with pytest.raises(ConfigError, match=r"one model without sub-graphs \['entry'\]; leave --sub-graph out"):
        models_of(Options(model_dir=alone, sub_graph=("entry",)))
    assert [sub for _, sub, _ in bindings] == ["entry", "ps_0", "ps_1"]
    server, client = serve(config, poll=0.05)
    route_to(server)
    assert score(client) == [2.0, 2.0]
    export_version(tmp_path, 2)
    eventually(lambda: score(client) == [80.0, 80.0])


def test_an_entry_waits_for_shards_that_are_loaded_once(serve, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(sub_graphs, "ASK_SECS", 60.0)
    export_version(tmp_path, 1)
    shards, _ = serve(subs_of(tmp_path, "latest_once"), poll=0.05)
    entries, client = serve(subs_of(tmp_path, "latest_once"), poll=0)
    route_to(shards)
    assert score(client) == [2.0, 2.0]
    export_version(tmp_path, 2)
    for _ in range(3):
        entries.refresh()
        assert score(client) == [2.0, 2.0]
    waiting = status_of(client, "m:entry", 2)
    assert waiting.state == ModelState.LOADING
    assert "ps_0" in waiting.status.error_message
    assert "does not have version 2" in waiting.status.error_message


def test_an_entry_does_not_wait_for_shards_whose_rows_are_pushed(serve, tmp_path):  # noqa: F811
    export_version(tmp_path, 1)
    shards, pusher = serve(subs_of(tmp_path, "latest_once"), poll=0.05)
    entries, client = serve(subs_of(tmp_path), poll=0)
    route_to(shards)
    assert score(client) == [2.0, 2.0]
    for shard in range(2):
        ids = torch.arange(shard, 10, 2)
        push = {f"T{shard}_id": ids, f"T{shard}_value": torch.full((5, 1), 10.0)}
        pusher.predict(f"m:ps_{shard}", "hashtable_assign", push)
    export_version(tmp_path, 2)
    eventually(lambda: entries.refresh() or score(client) == [80.0, 80.0])
    assert status_of(client, "m:entry", 2).status.error_message == ""


def test_an_entry_that_starts_before_its_shards_have_its_version_says_so(serve, tmp_path):  # noqa: F811
    export_version(tmp_path, 1)
    shards, _ = serve(subs_of(tmp_path), poll=0)
    export_version(tmp_path, 2)
    _, client = serve(subs_of(tmp_path), poll=0)
    route_to(shards)
    with fails(CODE.UNAVAILABLE, "does not have version 2"):
        score(client)
    shards.refresh()
    assert score(client) == [80.0, 80.0]


def test_a_replica_without_the_version_is_passed_over(serve, tmp_path):  # noqa: F811
    export_version(tmp_path, 1)
    old = [serve(subs_of(tmp_path), poll=0)[0] for _ in range(4)]
    export_version(tmp_path, 2)
    new, client = serve(subs_of(tmp_path), poll=0)
    route_to(*old, new)
    for _ in range(10):
        assert score(client) == [80.0, 80.0]


def test_live_tables_are_used_by_any_version(serve, tmp_path):  # noqa: F811
    export_version(tmp_path, 2)
    _, client = serve(subs_of(tmp_path))
    live, _ = serve()
    for shard in range(2):
        table = test_hash_table(1, name_suffix=f"live{shard}")
        table.assign(torch.arange(shard, 10, 2), torch.full((5, 1), 1.0))
        live.serve_tables(f"m:ps_{shard}", {"u": table})
    route_to(live)
    assert score(client) == [8.0, 8.0]


def test_a_dense_only_export_is_served_with_the_newest_shards(serve, tmp_path):  # noqa: F811
    export_version(tmp_path, 1)
    export_version(tmp_path, 3, dense_only=True, weight=5.0)
    program = Manifest.read(tmp_path / "exported_models/entry/3").program
    assert program["shard_version"] == 1
    server, client = serve(subs_of(tmp_path), poll=0)
    route_to(server)
    assert score(client) == [10.0, 10.0]


def test_a_version_that_entries_ask_for_is_kept_until_they_do_not(serve, tmp_path, monkeypatch):  # noqa: F811
    export_version(tmp_path, 1)
    shards, pusher = serve(subs_of(tmp_path), poll=0)
    _, client = serve(subs_of(tmp_path), poll=0)
    route_to(shards)
    score(client)
    export_version(tmp_path, 2)
    shards.refresh()
    assert pusher.status("m:ps_0") == {1: ModelState.AVAILABLE, 2: ModelState.AVAILABLE}
    assert score(client) == [2.0, 2.0]
    monkeypatch.setattr(loading, "LINGER_SECS", 0.0)
    shards.refresh()
    assert pusher.status("m:ps_0") == {1: ModelState.END, 2: ModelState.AVAILABLE}


# --- reloads ----------------------------------------------------------------------------------------------------------


def reload(client, **models):
    request = ReloadConfigRequest(config=config_of(**models))
    client.call("ModelService", "HandleReloadConfigRequest", request, ReloadConfigResponse)


def test_a_model_is_served_from_its_old_path_until_the_new_one_is_loaded(serve, tmp_path, monkeypatch):  # noqa: F811
    export(tmp_path / "a", 5, 5)
    export(tmp_path / "b", 5, 50)
    server, client = serve(config_of(m=(tmp_path / "a",)), model_root=tmp_path)
    load, inside, gate = loading.load_servable, threading.Event(), threading.Event()

    def slow(*arguments):
        inside.set()
        assert gate.wait(60)
        return load(*arguments)

    monkeypatch.setattr(loading, "load_servable", slow)
    thread = threading.Thread(target=reload, args=(client,), kwargs={"m": (tmp_path / "b",)})
    thread.start()
    assert inside.wait(60)
    assert value_of(client) == 5
    gate.set()
    thread.join(60)
    assert value_of(client) == 50
    reload(client, m=(tmp_path / "c",))  # nothing is there yet
    assert value_of(client) == 50
    (tmp_path / "c" / "7").mkdir(parents=True)
    (tmp_path / "c" / "7" / "manifest.json").write_text("{}")
    server.refresh()
    assert value_of(client) == 50
    assert "could not load version" in status_of(client, "m", 7).status.error_message
    export(tmp_path / "c", 8, 80)
    server.refresh()
    assert value_of(client) == 80
    reload(client, m=(tmp_path / "missing",))
    reload(client, m=(tmp_path / "c",))  # back to the previous choice
    server.refresh()
    assert value_of(client) == 80


def test_no_request_fails_while_the_path_changes_under_load(serve, tmp_path):  # noqa: F811
    for name, value in (("a", 1), ("b", 2)):
        export(tmp_path / name, 1, value)
    server, client = serve(config_of(m=(tmp_path / "a",)), model_root=tmp_path)
    stop, failures, answers = threading.Event(), [], []

    def ask_all():
        own = Client(server)
        while not stop.is_set():
            try:
                answers.append(value_of(own))
            except grpc.RpcError as error:
                failures.append(error)

    threads = [threading.Thread(target=ask_all) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(10):
        reload(client, m=(tmp_path / "ab"[turn % 2],))
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failures, failures[0].details()
    assert set(answers) <= {1, 2}


def test_a_version_is_loaded_any_number_of_times(serve, tmp_path):  # noqa: F811
    for version in (1, 2):
        export(tmp_path, version, version)
    server, client = serve()
    for turn in range(20):
        version = 1 + turn % 2
        server.reload(config_of(m=(tmp_path, "specific", version)))
        assert value_of(client) == version


def test_a_reload_over_the_network_names_paths_inside_of_roots_only(serve, tmp_path):  # noqa: F811
    export(tmp_path / "model" / "exported_models", 1, 1)
    export(tmp_path / "other", 1, 2)
    server, client = serve(config_of(m=(tmp_path / "model" / "exported_models",)))
    with fails(CODE.INVALID_ARGUMENT, "must be inside"):
        reload(client, m=(tmp_path / "other",))
    with fails(CODE.INVALID_ARGUMENT, "must be inside"):
        reload(client, m=(tmp_path / "model" / ".." / "other",))
    assert value_of(client) == 1
    export(tmp_path / "model" / "again", 1, 3)
    reload(client, m=(tmp_path / "model" / "again",))
    assert value_of(client) == 3
    _, empty = serve()
    with fails(CODE.INVALID_ARGUMENT, "model_root"):
        reload(empty, m=(tmp_path / "other",))
    server.reload(config_of(m=(tmp_path / "other",)))  # a call in the program may
    assert value_of(client) == 2
