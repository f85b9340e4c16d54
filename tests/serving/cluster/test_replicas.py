"""The replica registry: paths, records, watcher, updater; on the fake, on files and on a real ZooKeeper."""

import hashlib
import threading
from types import SimpleNamespace

import grpc
import pytest

from shoal.serving import (
    AgentConfig,
    AgentHeartbeat,
    AgentService,
    ClientConfig,
    FakeKazooClient,
    FakeTFServing,
    GetModelStatusRequest,
    GetModelStatusResponse,
    ModelMeta,
    ModelServerConfig,
    ModelState,
    ModelVersionStatus,
    PublishMeta,
    ReloadConfigRequest,
    ReplicaManager,
    ReplicaMeta,
    ReplicaUpdater,
    ReplicaWatcher,
    ResourceSpec,
    ServerType,
    ZKListener,
    ZKPath,
    choose_version_status,
    gen_model_config,
    refresh_sync_config,
)
from shoal.serving.cluster import replica_manager
from shoal.serving.cluster.zookeeper import KazooState
from tests.serving.cluster.test_registry import Directories, Fakes, Real, registry  # noqa: F401  (the fixture)
from tests.serving.helpers import eventually

pytestmark = pytest.mark.timeout(600)  # starts a ZooKeeper, next to other tests


def agent_config(**fields):
    given = {"bzid": "shopfeed", "base_name": "movie_ctr", "deploy_type": "ps", "num_ps": 2}
    return AgentConfig(**{**given, **fields})


def meta(port, stat=ModelState.AVAILABLE, **fields):
    return ReplicaMeta(address=f"10.0.0.1:{port}", stat=stat, **fields)


# --- records ----------------------------------------------------------------------------------------------------------


def test_paths_are_parsed_with_and_without_location():
    path = ZKPath("/shopfeed/service/movie_ctr/dc1:blue/ps:12/3")
    assert (path.bzid, path.base_name, path.idc, path.cluster) == ("shopfeed", "movie_ctr", "dc1", "blue")
    assert (path.server_type, path.index, path.replica_id, path.task, path.location) == (
        "ps",
        "12",
        "3",
        "ps:12",
        "dc1:blue",
    )
    plain = ZKPath("/shopfeed/service/movie_ctr/entry:0")
    assert (plain.task, plain.location, plain.replica_id) == ("entry:0", None, None)
    for bad in (
        "/a/b/c/ps:1/2",
        "/a/service/b/ps:x/1",
        "/a/service/b.c/ps:1/1",
        "/a/service/b/ps:1/2/3",
        "",
        "/a/service/b/ps:1/1\n",
    ):
        assert (ZKPath(bad).bzid, ZKPath(bad).task, ZKPath(bad).location) == (None, None, None)


def test_a_path_ships_in_its_location_and_anywhere_when_not_asked():
    path = ZKPath("/s/service/m/dc1:blue/ps:1/3")
    assert path.ship_in(None, "x")
    assert path.ship_in("dc1", None)
    assert path.ship_in("dc1", "blue")
    assert not path.ship_in("dc1", "red")


def test_replica_meta_json_and_path():
    record = ReplicaMeta(address="1.2.3.4:5", stat=30)
    assert record.serialize() == (
        b'{"address": "1.2.3.4:5", "address_ipv6": null, "stat": 30, "model_name": null, "server_type": null, '
        b'"task": -1, "replica": -1, "archon_address": null, "archon_address_ipv6": null}'
    )
    assert ReplicaMeta.deserialize(record.serialize()) == record
    assert record.to_json().encode() == record.serialize()
    assert ReplicaMeta.from_json(record.to_json()) == record
    named = ReplicaMeta(model_name="m", server_type="ps", task=3, replica=1)
    assert named.get_path("b") == "/b/service/m/ps:3/1"


@pytest.mark.parametrize(
    ("fields", "archon", "family", "expected"),
    [
        ({"address": "1.2.3.4:5", "address_ipv6": "[2::1]:5"}, False, "ipv4", "1.2.3.4:5"),
        ({"address": "1.2.3.4:5", "address_ipv6": "[2::1]:5"}, False, "ipv6", "[2::1]:5"),
        ({"address": "0.0.0.0:5", "address_ipv6": "[2::1]:5"}, False, "ipv4", "[2::1]:5"),
        ({"address": "1.2.3.4:5", "address_ipv6": "[::]:5"}, False, "ipv6", "1.2.3.4:5"),
        ({"address": "0.0.0.0:5", "address_ipv6": "[::]:5"}, False, "ipv4", None),
        ({"address": "1.2.3.4:5", "archon_address": "1.2.3.4:6"}, True, "ipv4", "1.2.3.4:6"),
    ],
)
def test_addresses_prefer_a_family_and_skip_wildcards(fields, archon, family, expected):
    assert ReplicaMeta(**fields).get_address(archon, family) == expected


def test_an_unknown_family_is_an_assertion_error():
    with pytest.raises(AssertionError):
        ReplicaMeta().get_address(address_family="ipx")


def test_sibling_records():
    assert ModelMeta(model_name="m").serialize() == (
        b'{"model_name": "m", "model_dir": null, "ckpt": null, "num_shard": -1, "action": "NONE", "spec_replicas": []}'
    )
    assert ResourceSpec(shard_id=1, replica_id=2).get_path("/base") == "/base/1:2"
    publish = PublishMeta(shard_id=1, model_name="m")
    assert publish.get_path("/base") == "/base/1:-1:m"
    assert PublishMeta.deserialize(publish.serialize()) == publish
    assert publish.ptype == 1


def test_the_version_status_that_stands_for_a_model():
    def status(version, state):
        return ModelVersionStatus(version=version, state=state)

    assert choose_version_status([status(3, ModelState.LOADING)]).version == 3
    several = [status(3, ModelState.AVAILABLE), status(5, ModelState.LOADING), status(4, ModelState.AVAILABLE)]
    assert choose_version_status(several).version == 4
    assert choose_version_status([status(1, ModelState.END), status(2, ModelState.LOADING)]).version == 2
    assert choose_version_status([]).state == ModelState.UNKNOWN


# --- watcher ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(registry):  # noqa: F811
    """A watcher and a client to change things with, under a business id of the test's own."""
    started = []

    class Cluster:
        bzid = registry.root[1:]
        client = registry()
        expire = staticmethod(registry.expire)

        def watcher(self, zk=None, **fields):
            watcher = ReplicaWatcher(zk or registry(), agent_config(bzid=self.bzid, **fields))
            watcher.watch_data()
            started.append(watcher)
            return watcher

        def put(self, path, record):
            path = f"/{self.bzid}/service/movie_ctr/{path}"
            value = record.serialize() if record is not None else b""
            self.client.put(path, value, ephemeral=True)

        def delete(self, path):
            self.client.delete(f"/{self.bzid}/service/movie_ctr/{path}")

    yield Cluster()
    for watcher in started:
        watcher.stop()


def test_a_watcher_on_a_missing_prefix_follows_replicas_from_birth_to_death(cluster):
    watcher = cluster.watcher()
    assert watcher.get_replicas(ServerType.PS, 0) == []
    cluster.put("ps:0/3", meta(1, ModelState.LOADING))
    cluster.put("ps:0/4", meta(2))
    eventually(lambda: watcher.get_replicas(ServerType.PS, 0) == ["10.0.0.1:2"])
    cluster.put("ps:0/3", meta(1))
    eventually(lambda: watcher.get_replicas(ServerType.PS, 0) == ["10.0.0.1:1", "10.0.0.1:2"])
    cluster.put("ps:0/3", meta(7))
    eventually(lambda: watcher.get_replicas(ServerType.PS, 0) == ["10.0.0.1:7", "10.0.0.1:2"])
    assert watcher.get_replica(ServerType.PS, 0, 3) == "10.0.0.1:7"
    assert watcher.get_replica(ServerType.PS, 0, 9) is None
    assert watcher.get_all_replicas(ServerType.PS) == {"ps:0": ["10.0.0.1:7", "10.0.0.1:2"]}
    cluster.put("ps:0/4", None)
    eventually(lambda: watcher.get_replicas(ServerType.PS, 0) == ["10.0.0.1:7"])
    cluster.delete("ps:0/3")
    cluster.delete("ps:0/4")
    eventually(lambda: watcher.replicas == {})


def test_a_task_whose_replicas_are_all_unavailable_keeps_an_empty_list(cluster):
    watcher = cluster.watcher()
    cluster.put("ps:1/0", meta(1, ModelState.UNKNOWN))
    eventually(lambda: watcher.get_all_replicas("ps") == {"ps:1": []})
    assert watcher.get_all_replicas(ServerType.ENTRY) == {}


def test_locations_are_told_apart(cluster):
    watcher = cluster.watcher(dc_aware=True)
    cluster.put("dc1:blue/ps:0/3", meta(1))
    cluster.put("dc2:red/ps:0/3", meta(2))
    eventually(lambda: len(watcher.get_replicas(ServerType.PS, 0)) == 2)
    assert watcher.get_all_replicas(ServerType.PS) == {"dc1:blue/ps:0": ["10.0.0.1:1"], "dc2:red/ps:0": ["10.0.0.1:2"]}
    assert watcher.get_replicas(ServerType.PS, 0, "dc2", "red") == ["10.0.0.1:2"]
    assert watcher.get_replica(ServerType.PS, 0, 3) == ["10.0.0.1:1", "10.0.0.1:2"]
    infos = watcher.get_replicas_with_extra_info(ServerType.PS, 0)
    assert infos["10.0.0.1:1"] == ClientConfig.TargetExtraInfo(idc="dc1", cluster="blue", replica_id=3)


def test_the_sync_wrapper_gives_bare_names_and_extra_info(cluster):
    watcher = cluster.watcher()
    backend = watcher.to_sync_wrapper()
    backend.subscribe_model("movie_ctr")
    cluster.put("ps:4/00000000006", meta(1))
    eventually(lambda: watcher.get_replicas(ServerType.PS, 4))
    config = ClientConfig.FromString(refresh_sync_config(backend, 4))
    assert config.model_name == "ps_4"
    (info,) = config.targets_extra_info
    assert info.replica_id == 6
    assert not info.HasField("idc")
    with pytest.raises(AssertionError):
        backend.get_sync_targets("entry_0")


def test_a_lost_session_of_the_watcher_does_not_blind_it(cluster, registry):  # noqa: F811
    zk = registry()
    watcher = cluster.watcher(zk)
    cluster.put("ps:0/1", meta(1))
    eventually(lambda: watcher.get_replicas(ServerType.PS, 0))
    states = []
    zk.listen(lambda state: states.append(state) and None)
    cluster.expire(zk)
    eventually(lambda: states and states[-1] == KazooState.CONNECTED)
    cluster.put("ps:0/2", meta(2))
    eventually(lambda: len(watcher.get_replicas(ServerType.PS, 0)) == 2)


def test_the_poll_heals_what_the_watches_missed_and_puts_own_nodes_back():
    zk = FakeKazooClient()
    zk.start()
    watcher = ReplicaWatcher(zk, agent_config())
    watcher.watch_data()
    own = "/shopfeed/service/movie_ctr/ps:1/2"
    watcher.own_registrations = lambda: {own: meta(5).serialize()}
    zk.tree.child_watches.clear()
    zk.create("/shopfeed/service/movie_ctr/ps:1/20", meta(6).serialize(), makepath=True)
    assert watcher.get_replicas(ServerType.PS, 1) == []
    watcher.poll()
    assert watcher.get_replicas(ServerType.PS, 1) == ["10.0.0.1:6"]
    assert zk.get(own)[0] == meta(5).serialize()
    watcher.stop()
    assert watcher.replicas == {}


def test_what_a_watch_tells_during_a_poll_is_kept():
    path = "/shopfeed/service/movie_ctr/ps:1/2"

    class Slow(FakeKazooClient):
        polled = False

        def get(self, *args, **kwargs):
            found = super().get(*args, **kwargs)
            if self.polled:
                self.polled = False
                self.set(path, meta(7).serialize())  # changes right after it was read
            return found

    zk = Slow()
    zk.start()
    watcher = ReplicaWatcher(zk, agent_config())
    watcher.watch_data()
    zk.create(path, meta(6).serialize(), makepath=True)
    zk.polled = True
    watcher.poll()
    assert watcher.get_replicas(ServerType.PS, 1) == ["10.0.0.1:7"]
    watcher.stop()


def test_broken_records_and_names_are_ignored():
    zk = FakeKazooClient()
    zk.start()
    wrong = [b"not json", b'{"address": 5, "stat": 30}', b'{"address": "a:1", "stat": "AVAILABLE"}']
    records = [
        ("x", meta(1).serialize()),
        ("-1", meta(2).serialize()),
        *((str(i), each) for i, each in enumerate(wrong)),
    ]
    for name, value in records:
        zk.create(f"/shopfeed/service/movie_ctr/ps:0/{name}", value, makepath=True)
    watcher = ReplicaWatcher(zk, agent_config())
    watcher.watch_data()
    assert watcher.get_replicas(ServerType.PS, 0) == ["10.0.0.1:2"]
    watcher.stop()


def test_a_replica_that_comes_and_goes_is_watched_once():
    zk = FakeKazooClient()
    zk.start()
    watcher = ReplicaWatcher(zk, agent_config())
    watcher.watch_data()
    path = "/shopfeed/service/movie_ctr/ps:0/1"
    for port in range(1, 6):
        zk.create(path, meta(port).serialize(), makepath=True)
        assert watcher.get_replicas(ServerType.PS, 0) == [f"10.0.0.1:{port}"]
        assert [watch.path for watch in zk.tree.data_watches] == [path]
        zk.delete(path)
        assert watcher.replicas == {}
    watcher.stop()
    watcher.watch_data()  # a new session does not trigger the watches of the old one
    zk.create(path, meta(9).serialize(), makepath=True)
    assert watcher.get_replicas(ServerType.PS, 0) == ["10.0.0.1:9"]
    assert [watch.path for watch in zk.tree.data_watches] == [path]
    watcher.stop()


def test_an_empty_address_in_the_environment_says_that_there_is_none(monkeypatch):
    from shoal.serving.cluster.replica_watcher import is_ipv6_only

    monkeypatch.setenv("MY_HOST_IP", "")
    assert is_ipv6_only()
    monkeypatch.setenv("MY_POD_IP", "10.0.0.1")
    assert not is_ipv6_only()


def test_an_ipv6_only_host_prefers_ipv6(monkeypatch):
    zk = FakeKazooClient()
    zk.start()
    monkeypatch.setenv("MY_HOST_IPV6", "2::1")
    record = ReplicaMeta(address="1.2.3.4:5", address_ipv6="[2::9]:5", stat=30)
    zk.create("/shopfeed/service/movie_ctr/ps:0/0", record.serialize(), makepath=True)
    watcher = ReplicaWatcher(zk, agent_config())
    watcher.watch_data()
    assert watcher.get_replicas(ServerType.PS, 0) == ["[2::9]:5"]
    watcher.stop()
    monkeypatch.setenv("MY_HOST_IP", "1.1.1.1")
    watcher = ReplicaWatcher(zk, agent_config())
    watcher.watch_data()
    assert watcher.get_replicas(ServerType.PS, 0) == ["1.2.3.4:5"]
    watcher.stop()


# --- updater ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tfs():
    config = ModelServerConfig()
    for name in ("ps_0", "ps_1", "entry"):
        config.model_config_list.config.append(gen_model_config(name, f"/x/{name}"))
    server = FakeTFServing(config, num_versions=2, tick_secs=None).start()
    yield server
    server.stop()


def test_the_fake_model_server_loads_a_model_again_that_came_back(tfs):
    def states(config=None):
        with grpc.insecure_channel(tfs.address) as channel:
            service = "/tensorflow.serving.ModelService"
            if config is not None:
                change = channel.unary_unary(f"{service}/HandleReloadConfigRequest")
                change(ReloadConfigRequest(config=config).SerializeToString(), timeout=60)
            request = GetModelStatusRequest()
            request.model_spec.name = "entry"
            answer = channel.unary_unary(f"{service}/GetModelStatus")(request.SerializeToString(), timeout=60)
        return [each.state for each in GetModelStatusResponse.FromString(answer).model_version_status]

    config = ModelServerConfig()
    config.model_config_list.config.append(gen_model_config("entry", "/x/entry"))
    assert states() == [10, 10]
    tfs.tick()
    assert states(ModelServerConfig()) == [40, 40]
    tfs.tick()
    assert states() == [50, 50]
    assert states(config) == [10, 10]


def test_sub_models_of_a_process(monkeypatch):
    monkeypatch.setenv("SHARD_ID", "1")
    names = lambda **fields: ReplicaUpdater(None, agent_config(num_ps=5, num_shard=2, **fields)).model_names  # noqa: E731
    assert names(deploy_type="ps") == ["ps_1", "ps_3"]
    assert names(deploy_type="entry") == ["entry"]
    assert names(deploy_type="dense") == []
    assert names(deploy_type="mixed", dense_alone=True) == ["ps_1", "ps_3", "entry", "dense_0"]


def test_registration_publishes_addresses_and_then_follows_states(monkeypatch, tfs):
    monkeypatch.setenv("SHARD_ID", "0")
    monkeypatch.setenv("MY_HOST_IP", "10.9.8.7")
    monkeypatch.setenv("MY_HOST_IPV6", "2::7")
    zk = FakeKazooClient()
    zk.start()
    config = agent_config(replica_id=3, tfs_ps_port=tfs.port, tfs_ps_archon_port=99)
    updater = ReplicaUpdater(zk, config)
    updater.register()
    path = "/shopfeed/service/movie_ctr/ps:0/3"
    record = ReplicaMeta.deserialize(zk.get(path)[0])
    assert record == ReplicaMeta(
        address=f"10.9.8.7:{tfs.port}", address_ipv6=f"[2::7]:{tfs.port}", stat=ModelState.UNKNOWN,
        archon_address="10.9.8.7:99", archon_address_ipv6="[2::7]:99",
    )  # fmt: skip
    assert zk.get(path)[1].ephemeralOwner
    state = lambda: ReplicaMeta.deserialize(zk.get(path)[0]).stat  # noqa: E731
    for expected in (ModelState.START, ModelState.LOADING, ModelState.AVAILABLE):
        updater.update()
        assert state() == expected
        tfs.tick()
    tfs.set_state("ps_0", 3, ModelState.LOADING)
    updater.update()
    assert state() == ModelState.AVAILABLE
    zk.delete(path)
    tfs.set_state("ps_0", 1, ModelState.END)
    tfs.set_state("ps_0", 2, ModelState.END)
    updater.update()
    assert state() == ModelState.LOADING  # created again after it was removed
    tfs.stop()
    updater.update()
    assert state() == ModelState.UNKNOWN
    updater.stop()


def test_entries_without_a_replica_id_get_one_from_the_sequence(monkeypatch):
    zk = FakeKazooClient()
    zk.start()
    ids = []
    for _ in range(2):
        config = agent_config(deploy_type="entry", tfs_entry_port=1, tfs_entry_archon_port=2)
        assert config.replica_id == -1
        ReplicaUpdater(zk, config).register()
        ids.append(config.replica_id)
    assert ids == [0, 1]
    assert sorted(zk.get_children("/shopfeed/service/movie_ctr/entry:0")) == ["00000000000", "00000000001"]
    given = agent_config(deploy_type="entry", replica_id=42, tfs_entry_port=1)
    ReplicaUpdater(zk, given).register()
    assert "00000000042" in zk.get_children("/shopfeed/service/movie_ctr/entry:0")


def test_one_failing_sub_model_does_not_stop_the_others(monkeypatch, tfs):
    monkeypatch.setenv("SHARD_ID", "0")
    zk = FakeKazooClient()
    zk.start()
    updater = ReplicaUpdater(zk, agent_config(num_ps=4, num_shard=1, replica_id=0, tfs_ps_port=tfs.port))
    updater.register()
    for _ in range(3):
        tfs.tick()
    updater.update()
    states = [ReplicaMeta.deserialize(zk.get(f"/shopfeed/service/movie_ctr/ps:{task}/0")[0]).stat for task in range(4)]
    assert states == [30, 30, 0, 0]
    updater.stop()


def test_a_state_that_could_not_be_written_is_written_next_time(monkeypatch, tfs):
    class Failing(FakeKazooClient):
        broken = False

        def set(self, path, value, version=-1):
            if self.broken:
                raise ConnectionError("away")
            return super().set(path, value, version)

    monkeypatch.setenv("SHARD_ID", "0")
    zk = Failing()
    zk.start()
    updater = ReplicaUpdater(zk, agent_config(num_ps=1, replica_id=0, tfs_ps_port=tfs.port))
    updater.register()
    tfs.tick()
    tfs.tick()
    state = lambda: ReplicaMeta.deserialize(zk.get("/shopfeed/service/movie_ctr/ps:0/0")[0]).stat  # noqa: E731
    zk.broken = True
    updater.update()
    assert state() == ModelState.UNKNOWN
    zk.broken = False
    updater.update()
    assert state() == ModelState.AVAILABLE
    updater.stop()


def test_a_lost_session_registers_once_with_the_last_state(monkeypatch, tfs):
    monkeypatch.setenv("SHARD_ID", "0")
    rest, rested = threading.Event(), []
    sleep = lambda seconds: rested.append(seconds) or rest.wait(60)  # noqa: E731
    monkeypatch.setattr(replica_manager, "time", SimpleNamespace(sleep=sleep))
    zk, other = FakeKazooClient(), None
    other = FakeKazooClient(tree=zk.tree)
    zk.start()
    other.start()
    config = agent_config(num_ps=1, replica_id=0, tfs_ps_port=tfs.port, update_model_status_interval=1)
    manager = ReplicaManager(zk, config)
    tfs.tick()
    tfs.tick()
    manager.start()
    manager.updater.update()
    path = "/shopfeed/service/movie_ctr/ps:0/0"
    assert ReplicaMeta.deserialize(other.get(path)[0]).stat == ModelState.AVAILABLE
    assert manager.is_ps_set_started()
    assert not manager.is_dense_set_started()
    writes = []
    other.DataWatch(path, lambda data, stat: writes.append(data) and None)
    zk.expire_session()
    eventually(lambda: other.exists(path))
    eventually(lambda: rested == [ZKListener.resume_secs])
    assert manager.watcher._lost.is_set()  # polling pauses until some time after the nodes are back
    rest.set()
    eventually(lambda: not manager.watcher._lost.is_set())
    assert ReplicaMeta.deserialize(other.get(path)[0]).stat == ModelState.AVAILABLE
    states = [ReplicaMeta.deserialize(data).stat for data in writes if data]
    assert set(states) == {ModelState.AVAILABLE}
    assert len(states) == 2  # one before the loss and one after it
    manager.stop()


def test_polling_rests_on_when_the_session_is_lost_again(monkeypatch):
    rest, rested = [threading.Event(), threading.Event()], []
    sleep = lambda seconds: rested.append(seconds) or rest[len(rested) - 1].wait(60)  # noqa: E731
    monkeypatch.setattr(replica_manager, "time", SimpleNamespace(sleep=sleep))
    watcher = ReplicaWatcher(FakeKazooClient(), agent_config())
    listener = ZKListener(watcher, None)
    recovering = []
    for expected in (1, 2):
        before = set(threading.enumerate())
        listener(KazooState.LOST)
        listener(KazooState.CONNECTED)
        recovering += [each for each in set(threading.enumerate()) - before if each.name == "shoal-zk-recover"]
        eventually(lambda expected=expected: len(rested) == expected)
    rest[0].set()
    recovering[0].join(60)
    assert watcher._lost.is_set()
    rest[1].set()
    recovering[1].join(60)
    assert not watcher._lost.is_set()


def test_versions_are_told_to_the_metrics(monkeypatch, tfs, metrics):
    monkeypatch.setenv("SHARD_ID", "0")
    zk = FakeKazooClient()
    zk.start()
    updater = ReplicaUpdater(zk, agent_config(num_ps=1, replica_id=5, tfs_ps_port=tfs.port))
    updater.register()
    tfs.tick()
    tfs.tick()
    updater.update()
    updater.emit_metrics()
    names = {name for name, _, _ in metrics.stores}
    assert names == {"serving_model.latest_version", "serving_model.update_ts", "serving_model.since_last_update"}
    assert "model_name=ps_0|idc=None|replica_id=5|shard_id=0|base_name=movie_ctr" in {
        tags for _, _, tags in metrics.stores
    }
    updater.stop()


# --- the agent over a watcher -----------------------------------------------------------------------------------------


def test_an_agent_over_a_watcher_feeds_the_address_table(cluster):
    watcher = cluster.watcher()
    cluster.put("ps:0/1", meta(1))
    cluster.put("dense:0/1", meta(9))
    eventually(lambda: watcher.get_replicas(ServerType.PS, 0) and watcher.get_replicas(ServerType.DENSE, 0))
    service = AgentService(watcher, port=0).start()
    table = AgentHeartbeat(f"127.0.0.1:{service.port}", 1000)
    eventually(lambda: len(table.addresses) == 2 or table.refresh(), what="both answers of the agent")
    assert table.addresses == {"ps:0": ["10.0.0.1:1"], "dense:0": ["10.0.0.1:9"]}
    assert table.api_version == 0
    table.stop()
    service.stop(0)


def test_replica_id_comes_from_the_pod_name(monkeypatch):
    from shoal.serving import replica_id_from_pod_name

    assert replica_id_from_pod_name() == -1
    monkeypatch.setenv("MY_POD_NAME", "pod-1")
    expected = int(hashlib.md5(b"pod-1").hexdigest()[10:20], 16)
    assert replica_id_from_pod_name() == expected == agent_config().replica_id
    monkeypatch.setenv("REPLICA_ID", "7")
    assert agent_config().replica_id == expected
    assert agent_config(agent_version=3).replica_id == 7
    assert agent_config(replica_id=0).replica_id == 0
