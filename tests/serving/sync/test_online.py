"""The online loop: configuration, rounds by thread and by hook, processes that restart, the commands."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import torch

from shoal.cli.main import main
from shoal.errors import ConfigError
from shoal.serving import (
    ClientConfig,
    DummySyncServer,
    Feature,
    ModelExporter,
    ModelServer,
    OnlineTrainingConfig,
    ParameterSyncHook,
    StatusError,
    SyncBackend,
    SyncLoop,
    SyncSource,
    ZKBackend,
    create_parameter_sync_clients,
    create_sync_backend,
    export_ps,
    follow_source,
    parameter_sync_client_from_config,
    refresh_sync_config,
    remote_predict,
    set_address_table,
)
from shoal.serving.sync.monolith import online
from shoal.serving.sync.monolith.handle import SyncClientHandle
from shoal.table import MultiHashTable, test_hash_table
from shoal.testing.commands import Command
from tests.serving.helpers import eventually, free_port
from tests.serving.sync.test_sync_client import instance, step

pytestmark = pytest.mark.timeout(900)  # starts several processes, which import torch


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Rounds of this process give their pushes more time than the three seconds of a trainer."""

    def refresh(backend, index):
        config = ClientConfig.FromString(refresh_sync_config(backend, index))
        config.timeout_in_ms = 60_000
        return config.SerializeToString()

    monkeypatch.setattr(online, "refresh_sync_config", refresh)


class Fixed(SyncBackend):
    def __init__(self, *targets):
        self.targets, self.asked = list(targets), 0

    def subscribe_model(self, model_name): ...
    def start(self): ...
    def stop(self): ...
    def get_sync_targets(self, sub_graph):
        self.asked += 1
        return f"m:{sub_graph}", self.targets


@pytest.fixture
def server():
    server = DummySyncServer("127.0.0.1:0")
    server.address = f"127.0.0.1:{server.get_port()[0]}"
    yield server
    server.shutdown()


# --- configuration ----------------------------------------------------------------------------------------------------


def test_realtime_training_has_its_side_effects(monkeypatch):
    plain = OnlineTrainingConfig()
    assert plain.partial_recovery is None
    assert not plain.ps_outlives_chief
    monkeypatch.setenv("zk_servers", "z:1")
    config = OnlineTrainingConfig(enable_parameter_sync=True, bzid="b", base_name="m", metric_name="metric")
    assert config.enable_realtime_training
    assert (config.partial_recovery, config.dense_only_save_checkpoints_secs, config.tolerate_checkpoint_errors) == (
        True,
        1800,
        True,
    )
    assert config.ps_outlives_chief
    assert config.zk_server == "z:1"
    assert config.subscribed_model == "metric"
    assert not OnlineTrainingConfig(
        enable_realtime_training=True, bzid="b", base_name="m", force_shutdown_ps=True
    ).ps_outlives_chief
    with pytest.raises(ConfigError, match="bzid and base_name"):
        OnlineTrainingConfig(enable_realtime_training=True, bzid="b")


def test_the_backend_follows_the_kind_of_cluster(tmp_path):
    unified = create_sync_backend(OnlineTrainingConfig(bzid="b", base_name="m", zk_server=f"dir:{tmp_path}"))
    assert isinstance(unified, ZKBackend)
    single = create_sync_backend(
        OnlineTrainingConfig(bzid="b", base_name="m", zk_server=f"dir:{tmp_path}", unified_serving=False)
    )
    single.start()
    single.subscribe_model("m")
    assert single.get_sync_targets("ps_3") == ("ps_3", {})
    single.stop()


# --- rounds -----------------------------------------------------------------------------------------------------------


def test_freshness_counts_from_the_start_of_pushing_not_from_the_making_of_the_client(server):
    handle = create_parameter_sync_clients(0)[0]
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    handle.touched._since -= 1000  # as if the client had been created long ago
    loop = SyncLoop(Fixed(server.address), 0, handle, period_secs=0.05).start()
    step(table, [1])
    eventually(lambda: handle.freshness)
    loop.stop()
    assert handle.freshness[server.address] < 500

    handle.touched._since -= 1000
    step(table, [2])  # is already pending when the next loop starts, since an unknown time
    handle.freshness.clear()
    loop = SyncLoop(Fixed(server.address), 0, handle, period_secs=0.05).start()
    eventually(lambda: handle.freshness)
    loop.stop()
    assert handle.freshness[server.address] > 500


def test_a_loop_pushes_every_period_and_survives_errors(server):
    handle = create_parameter_sync_clients(2)[1]
    table = test_hash_table(1, name_suffix="t_1", sync_client=handle)
    backend = Fixed(server.address)
    loop = SyncLoop(backend, 1, period_secs=0.05).start()
    step(table, [1])
    eventually(lambda: server.requests)
    assert server.requests[0].model_spec.name == "m:ps_1"
    failures, good = [], backend.get_sync_targets

    def fail(sub_graph):
        failures.append(sub_graph)
        raise RuntimeError("on purpose")

    backend.get_sync_targets = fail
    eventually(lambda: len(failures) > 2)
    backend.get_sync_targets = good
    step(table, [2])
    eventually(lambda: len(server.requests) == 2)
    step(table, [3])
    loop.stop()
    pushed = sorted(i for r in server.requests for i in r.inputs["MonolithHashTable_t_1_id"].int64_val)
    assert pushed == [1, 2, 3]


def test_rows_go_to_the_targets_that_were_known_while_the_registry_is_out_of_reach(server, caplog):
    class Flaky(Fixed):
        reachable = True

        def get_sync_targets(self, sub_graph):
            if not self.reachable:
                raise ConnectionError("no registry")
            return super().get_sync_targets(sub_graph)

    backend = Flaky(server.address)
    handle = create_parameter_sync_clients(0)[0]
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    loop = SyncLoop(backend, 0, handle)
    backend.reachable = False
    with pytest.raises(ConnectionError):
        loop.run_once()  # no replica is known yet
    backend.reachable = True
    loop.run_once()
    backend.reachable = False
    step(table, [1, 2])
    assert json.loads(loop.run_once())["responses"][0]["update_num"] == 2
    assert "pushing to the last known ones" in caplog.text


def test_the_hook_shares_the_tables_client_and_never_blocks_a_step(server):
    table = test_hash_table(1, name_suffix="t", sync_client=create_parameter_sync_clients(0)[0])
    backend = Fixed(server.address)
    hook = ParameterSyncHook(backend, 3, refresh_interval=1000, sync_interval_secs=0)
    gate = threading.Event()
    real = hook.client.handle.sync
    hook.client.handle.sync = lambda config: gate.wait(100) and real(config)
    hook.begin()
    begin = time.monotonic()
    for i in range(20):
        hook.before_run()
        step(table, [i])
        hook.after_run()
    assert time.monotonic() - begin < 60
    gate.set()
    hook.end()
    assert backend.asked == 1
    assert server.requests[0].model_spec.name == "m:ps_3"
    pushed = {i for r in server.requests for i in r.inputs["MonolithHashTable_t_id"].int64_val}
    assert pushed == set(range(20))


def test_the_hook_waits_its_interval(server):
    table = test_hash_table(1, name_suffix="t", sync_client=create_parameter_sync_clients(0)[0])
    hook = ParameterSyncHook(Fixed(server.address), 0, sync_interval_secs=1000)
    step(table, [0])
    hook.after_run()
    eventually(lambda: hook.rounds == 1 and hook._idle.is_set())
    for i in range(1, 5):
        step(table, [i])
        hook.after_run()
        assert hook._idle.is_set()  # no round was requested
    hook.end()
    assert hook.rounds == 2


def test_a_hook_refreshes_its_targets_after_the_interval(server):
    table = test_hash_table(1, name_suffix="t", sync_client=create_parameter_sync_clients(0)[0])
    backend = Fixed()
    hook = ParameterSyncHook(backend, 0, refresh_interval=0.1, sync_interval_secs=0)
    step(table, [1])
    hook.after_run()
    eventually(lambda: hook.rounds == 1)
    assert not server.requests
    backend.targets = [server.address]
    eventually(lambda: hook.after_run() or server.requests)
    hook.end()


# --- across processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multi", [False, True])
def test_a_follower_pulls_touched_rows_and_a_lost_answer_loses_none(server, multi):
    trained = SyncClientHandle("trained")
    if multi:
        table = MultiHashTable.from_configs({"b": instance(2), "a": instance(1)}, sync_client=trained, name_suffix="9")
        train = lambda ids: table.apply_gradients({"b": (torch.tensor(ids), torch.ones(len(ids), 2))})  # noqa: E731
    else:
        table = test_hash_table(2, name_suffix="t", sync_client=trained)
        train = lambda ids: step(table, ids)  # noqa: E731
    source = ModelServer().start()
    SyncSource(source, trained)
    train([1, 2])
    follower_handle = SyncClientHandle("follower")
    follower = follow_source(f"127.0.0.1:{source.port}", follower_handle)
    assert follower.pull() == 2
    follower._received = 0  # its answer was lost
    train([2, 3])
    assert follower.pull() == 3
    assert follower.pull() == 0
    config = ClientConfig(model_name="m", signature_name="hashtable_assign", targets=[server.address])
    config.timeout_in_ms = 60_000
    assert follower_handle.sync(config).responses[0].update_num == 3
    (request,) = server.requests
    if multi:
        assert request.model_spec.signature_name == "MonolithMultiHashTable_9/raw_assign"
        assert sorted(request.inputs["flat_value"].float_val) == [-2, -2, -1, -1, -1, -1]
    else:
        assert sorted(request.inputs["MonolithHashTable_t_value"].float_val) == [-2, -2, -1, -1, -1, -1]
    follower.close()
    source.stop(0)


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p]), "PYTHONWARNINGS": "ignore"}


class Program:
    """`shoal ...` as a process whose first line of output is JSON."""

    def __init__(self, *arguments):
        self.process = Command(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())

    def line(self):
        watchdog = threading.Timer(300, self.process.kill)
        watchdog.start()
        text = self.process.stdout.readline()
        watchdog.cancel()
        assert text, self.process.stderr.read()
        return json.loads(text)

    def end(self, number=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=300)
        return self.process.returncode, out, err


@pytest.fixture
def commands():
    made = []

    def start(*arguments):
        made.append(Program(*arguments))
        return made[-1]

    yield start
    for each in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.process.pid, signal.SIGKILL)  # also its children, which would keep its pipes open
        each.end(signal.SIGKILL)


def predict(address, ids, price):
    set_address_table({"m": [address], "x:ps": []})
    return remote_predict(["user", "price"], [ids, price], ["score"], "m", 0, None, max_rpc_deadline_millis=60000)[0]


def test_train_serve_and_sync_as_a_user_would(tmp_path, commands, net):
    """A trainer here, `shoal serve` and `shoal sync` as processes, a directory of files between them."""
    registry = f"dir:{tmp_path}/registry"
    handle = parameter_sync_client_from_config(name_suffix="0")
    table = test_hash_table(4, name_suffix="user", sync_client=handle)
    table.assign(torch.arange(100), torch.randn(100, 4))
    tool = ModelExporter(
        tmp_path / "model",
        model_name="m",
        net=net,
        features={"user": Feature(slot="u")},
        dense={"price": torch.zeros(2, 2)},
    )
    tool.export([{"u": table}], global_step=1)
    trainer = ModelServer().start()
    SyncSource(trainer, handle)
    serving = commands(
        "serve", tmp_path / "model", "--port", 0, "--rest-port", 0, "--registry", registry, "--threads", 1, "--json"
    )
    ready = serving.line()
    assert ready["models"] == ["m"]
    ids, price = torch.tensor([[1, 2], [3, 4]]), torch.randn(2, 2)

    def expected():
        return net(user=table.lookup(ids.reshape(-1)).reshape(2, 2, 4).sum(1), price=price)["score"]

    assert torch.allclose(predict(ready["grpc"], ids, price), expected(), atol=1e-6)
    syncing = commands("sync", "--source", f"127.0.0.1:{trainer.port}", "--model", "m", "--registry", registry,
                       "--interval", 0.2, "--json")  # fmt: skip
    eventually(lambda: syncing.line()["replicas"] == 1, 300, "the replica to be found")
    before = expected()
    table.apply_gradients(torch.tensor([1, 2, 3]), torch.randn(3, 4))
    assert not torch.allclose(before, expected())
    late = 0
    while (target := eventually(lambda: syncing.line()["targets"], 300, "a push")[0])["code"] == 4:
        late += 1  # not answered within the trainer's three seconds, so pushed again
    assert (target["rows"], target["code"]) == (3, 0)
    assert 0 < target["freshness_s"] < 600
    assert torch.allclose(predict(ready["grpc"], ids, price), expected(), atol=1e-6)
    with urllib.request.urlopen(f"http://{ready['rest']}/status.json", timeout=60) as answer:
        status = json.load(answer)
    assert status["tables"][0]["pushed_rows"] in range(3, 3 * (1 + late) + 1, 3)
    assert status["tables"][0]["lag_s"] > 0
    assert syncing.end()[0] == 0
    code, _, err = serving.end()
    assert code == 0, err
    assert "Traceback" not in err
    trainer.stop(0)


def test_nothing_is_lost_across_a_replica_restart(tmp_path, commands):
    handle = parameter_sync_client_from_config(name_suffix="0")
    table = test_hash_table(2, name_suffix="t", sync_client=handle)
    export_ps(
        tmp_path / "exported_models" / "ps_0" / "1", {"u": table}, model_name="m", sub_graph="ps_0", global_step=1
    )
    port = free_port()
    arguments = ("serve", tmp_path, "--port", port, "--threads", 1, "--json")
    serving = commands(*arguments)
    target = serving.line()["grpc"]
    handle.catch_up()
    loop = SyncLoop(Fixed(target), 0, handle, period_secs=0.1).start()
    step(table, [1, 2])
    eventually(lambda: handle.freshness)
    serving.end(signal.SIGKILL)
    step(table, [3, 4])
    eventually(lambda: handle.waiting()[target] == 2, what="a round that the dead replica missed")
    serving = commands(*arguments)
    serving.line()
    step(table, [5])
    eventually(
        lambda: handle.waiting() == {"": 0, target: 0} and not json.loads(loop.last_result or "{}").get("responses"),
        300,
    )
    set_address_table({"m:ps_0": [target]})
    ids = torch.tensor([1, 2, 3, 4, 5])
    (got,) = remote_predict(
        ["u"], [ids], ["u"], "m:ps_0", 0, None, max_rpc_deadline_millis=60000, signature_name="lookup"
    )
    assert torch.equal(got, table.lookup(ids))
    loop.stop()


def test_a_broken_configuration_file_changes_nothing(tmp_path, caplog):
    from shoal.cli.serve import Options, _reload

    export_ps(tmp_path / "ps_0/1", test_hash_table(2, name_suffix="t"), model_name="m", sub_graph="ps_0", global_step=1)
    file = tmp_path / "models.conf"
    text = f'model_config_list {{ config {{ name: "m:ps_0" base_path: "{tmp_path}/ps_0" }} }}'
    file.write_text(text)
    server = ModelServer()
    options = Options(config=file)
    _reload(options, server)
    assert server.model("m:ps_0").current().number == 1
    for broken in ("model_config_list {", text.replace("m:ps_0", "")):
        file.write_text(broken)
        _reload(options, server)
        assert "is not applied" in caplog.text
        caplog.clear()
    file.unlink()
    _reload(options, server)
    assert "cannot read" in caplog.text
    assert server.model("m:ps_0").current().number == 1
    server.stop(0)


def test_a_distributed_export_is_served_by_one_process(tmp_path, commands, net):
    from shoal.serving import ExportMode

    shards = []
    for shard in range(2):
        table = test_hash_table(4, name_suffix=f"u_{shard}")
        ids = torch.arange(shard, 20, 2)
        table.assign(ids, torch.randn(len(ids), 4))
        shards.append({"u": table})
    tool = ModelExporter(
        tmp_path, model_name="m", net=net, features={"user": Feature(slot="u")}, dense={"price": torch.zeros(2, 2)}
    )
    tool.export(shards, global_step=1, mode=ExportMode.DISTRIBUTED)
    ready = commands("serve", tmp_path, "--port", 0, "--threads", 1, "--json").line()
    assert ready["models"] == ["m:entry", "m:ps_0", "m:ps_1"]
    ids, price = torch.tensor([[1], [2]]), torch.randn(2, 2)
    rows = torch.cat([shards[1]["u"].lookup(torch.tensor([1])), shards[0]["u"].lookup(torch.tensor([2]))])
    assert torch.allclose(predict(ready["grpc"], ids, price), net(user=rows, price=price)["score"], atol=1e-6)


def test_a_mixed_agent_starts_shards_then_the_entry(tmp_path, commands, net, monkeypatch):
    from shoal.serving import ExportMode

    table = test_hash_table(4, name_suffix="u_0")
    table.assign(torch.arange(5), torch.randn(5, 4))
    tool = ModelExporter(
        tmp_path / "model",
        model_name="m",
        net=net,
        features={"user": Feature(slot="u")},
        dense={"price": torch.zeros(2, 2)},
    )
    tool.export([{"u": table}], global_step=1, mode=ExportMode.DISTRIBUTED)
    entry_port, ps_port, agent_port = free_port(), free_port(), free_port()
    (tmp_path / "agent.conf").write_text(
        f"bzid b\nbase_name m\nbase_path {tmp_path}/model/exported_models\ndeploy_type mixed\nnum_ps 1\nreplica_id 0\n"
        f"zk_servers dir:{tmp_path}/registry\ntfs_entry_port {entry_port}\ntfs_ps_port {ps_port}\n"
        f"agent_port {agent_port}\n"
    )
    monkeypatch.setenv("SHARD_ID", "0")
    monkeypatch.setenv("MY_HOST_IP", "127.0.0.1")
    agent = commands("agent", "--config", tmp_path / "agent.conf", "--json")
    agent.line()
    ids, price = torch.tensor([[1], [2]]), torch.randn(2, 2)

    def answer():
        assert agent.process.poll() is None, agent.process.stderr.read()
        try:
            return _predict_entry(f"127.0.0.1:{entry_port}", ids, price)
        except StatusError:
            time.sleep(0.3)
            return None

    got = eventually(lambda: (value := answer()) is not None and (value,), 600, "the entry")[0]
    assert torch.allclose(got, net(user=table.lookup(ids.reshape(-1)), price=price)["score"], atol=1e-6)
    code, _, _ = agent.end()
    assert code == 0


def _predict_entry(address, ids, price):
    set_address_table({"entry": [address]})
    return remote_predict(["user", "price"], [ids, price], ["score"], "", 0, "entry", max_rpc_deadline_millis=60000)[0]


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["serve", "sync", "agent"])
def test_help_has_an_example_and_wrong_flags_are_usage_errors(command, capsys):
    assert main([command, "--help"]) == 0
    assert re.search(r"(?im)^\s*examples?\b", capsys.readouterr().out)
    assert main([command, "--nonsense"]) == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serve", "/nowhere"], "not a directory"),
        (["serve"], "MODEL_DIR"),
        (["serve", "EMPTY"], "no exports"),
        (["serve", "EMPTY", "--host", "0.0.0.0"], "."),
        (["sync", "--source", "127.0.0.1:1", "--model", "m"], "exactly one of --registry and --target"),
        (["agent", "--config", "/nowhere"], "cannot read"),
    ],
)
def test_mistakes_are_one_line(arguments, text, capsys, tmp_path):
    code = main([str(tmp_path) if each == "EMPTY" else each for each in arguments])
    err = capsys.readouterr().err
    assert code in (1, 2)  # 2: wrong usage
    assert text in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


def test_one_round_reports_failure_by_its_exit_code(capsys, refused):
    handle = SyncClientHandle("trained")
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    source = ModelServer().start()
    SyncSource(source, handle)
    step(table, [1])
    given = ["--source", f"127.0.0.1:{source.port}", "--model", "m", "--target", refused()]
    assert main(["sync", *given, "--once"]) == 1
    assert "failed: 14" in capsys.readouterr().out
    source.stop(0)


def test_operators_commands(tmp_path, capsys):
    export_ps(
        tmp_path / "exports" / "ps_0" / "1",
        {"u": test_hash_table(1)},
        model_name="movie",
        sub_graph="ps_0",
        global_step=1,
    )
    from shoal.serving import Manifest

    entry = tmp_path / "exports" / "entry" / "1"
    entry.mkdir(parents=True)
    Manifest(model_name="movie", sub_graph="entry", version=1, global_step=1).write(entry)
    (tmp_path / "agent.conf").write_text(
        f"bzid b\nagent_version 3\nlayout_pattern blue\nzk_servers dir:{tmp_path}/registry\n"
    )
    config = ["agent", "--config", str(tmp_path / "agent.conf")]
    assert main([*config, "--declare", str(tmp_path / "exports"), "--publish", "movie:*"]) == 0
    assert main([*config, "--show"]) == 0
    out = capsys.readouterr().out
    assert "declared movie" in out
    assert json.loads(out[out.index("{") :])["layout_info"] == {"blue": ["movie:entry", "movie:ps_0"]}
    assert main([*config, "--declare", str(tmp_path / "exports")]) == 2
