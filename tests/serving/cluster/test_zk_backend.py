"""The unified registry: containers, operators, trainers; on the fake, on files and on a real ZooKeeper."""

import json
import threading

import pytest

from shoal.serving import (
    ClientConfig,
    Container,
    ContainerServiceInfo,
    FakeKazooClient,
    SavedModel,
    SavedModelDeployConfig,
    SyncBackend,
    ZKBackend,
    declare_saved_model,
    map_model_to_layout,
    refresh_sync_config,
)
from shoal.serving.cluster.zookeeper import ConnectionClosedError
from tests.serving.cluster.test_registry import Directories, Fakes, Real, registry  # noqa: F401  (the fixture)
from tests.serving.helpers import eventually

pytestmark = pytest.mark.timeout(600)  # starts a ZooKeeper, next to other tests


@pytest.fixture
def backends(registry):  # noqa: F811
    """Makes started backends of one business id."""
    made = []

    def make():
        backend = ZKBackend(registry.root[1:], zk_client=registry())
        backend.start()
        made.append(backend)
        return backend

    make.expire = lambda backend: registry.expire(backend._registry)
    make.client = registry
    make.bzid = registry.root[1:]
    yield make
    for backend in made:
        backend.stop()


CONTAINER = Container("psm;dc1;blue", "pod:7")


def info(port):
    return ContainerServiceInfo(grpc=f"10.0.0.1:{port}")


def test_value_types_print_hash_and_serialize():
    assert str(SavedModel("m", "ps_0")) == "m:ps_0"
    assert str(CONTAINER) == "psm;dc1;blue:pod:7"
    assert len({SavedModel("m", "a"), SavedModel("m", "a")}) == 1
    record = ContainerServiceInfo(grpc="1.2.3.4:5", idc="dc1")
    assert record.serialize() == (
        b'{"grpc": "1.2.3.4:5", "http": null, "archon": null, "agent": null, "idc": "dc1", "debug_info": null}'
    )
    assert ContainerServiceInfo.deserialize(b'{"idc": "dc1", "new": 1, "grpc": "1.2.3.4:5"}') == record
    deploy = SavedModelDeployConfig(model_base_path="/x")
    assert deploy.serialize() == b'{"model_base_path": "/x", "version_policy": null}'


def test_a_trainer_sees_replicas_come_change_and_go(backends):
    trainer, serving = backends(), backends()
    trainer.subscribe_model("movie_ctr")
    trainer.subscribe_model("movie_ctr")
    with pytest.raises(ValueError, match="movie_ctr"):
        trainer.subscribe_model("other")
    assert trainer.get_sync_targets("ps_4") == ("movie_ctr:ps_4", [])
    # the binding comes before the service info
    serving.sync_available_saved_models(CONTAINER, {SavedModel("movie_ctr", "ps_4")})
    serving.report_service_info(CONTAINER, info(1))
    eventually(lambda: trainer.get_sync_targets("ps_4")[1] == ["10.0.0.1:1"])
    serving.report_service_info(CONTAINER, info(2))
    eventually(lambda: trainer.get_sync_targets("ps_4")[1] == ["10.0.0.1:2"])
    config = ClientConfig.FromString(refresh_sync_config(trainer, 4))
    assert config.model_name == "movie_ctr:ps_4"
    assert list(config.targets) == ["10.0.0.1:2"]
    assert not config.targets_extra_info
    assert (config.signature_name, config.timeout_in_ms) == ("hashtable_assign", 3000)
    serving.sync_available_saved_models(CONTAINER, set())
    eventually(lambda: trainer.get_sync_targets("ps_4")[1] == [])


def test_a_container_that_stops_disappears(backends):
    trainer, serving = backends(), backends()
    trainer.subscribe_model("m")
    serving.report_service_info(CONTAINER, info(1))
    serving.sync_available_saved_models(CONTAINER, {SavedModel("m", "ps_0")})
    eventually(lambda: trainer.get_sync_targets("ps_0")[1])
    serving.stop()
    eventually(lambda: not trainer.get_sync_targets("ps_0")[1])


def test_bindings_are_written_again_after_a_lost_session(backends):
    trainer, serving = backends(), backends()
    trainer.subscribe_model("m")
    models = {SavedModel("m", "ps_0")}
    serving.report_service_info(CONTAINER, info(1))
    serving.sync_available_saved_models(CONTAINER, models)
    eventually(lambda: trainer.get_sync_targets("ps_0")[1])
    backends.expire(serving)
    eventually(serving._lost.is_set)
    eventually(lambda: not trainer.get_sync_targets("ps_0")[1])
    serving.sync_available_saved_models(CONTAINER, models)  # only starts a new session; writes nothing
    assert not trainer.get_sync_targets("ps_0")[1]
    serving.sync_available_saved_models(CONTAINER, models)
    serving.report_service_info(CONTAINER, info(3))
    eventually(lambda: trainer.get_sync_targets("ps_0")[1] == ["10.0.0.1:3"])


def test_a_trainer_whose_session_is_lost_goes_on(backends):
    trainer, serving = backends(), backends()
    trainer.subscribe_model("m")
    serving.report_service_info(CONTAINER, info(1))
    serving.sync_available_saved_models(CONTAINER, {SavedModel("m", "ps_0")})
    eventually(lambda: trainer.get_sync_targets("ps_0")[1])
    backends.expire(trainer)
    eventually(trainer._lost.is_set)
    eventually(lambda: trainer.get_sync_targets("ps_0")[1] == ["10.0.0.1:1"])
    serving.sync_available_saved_models(CONTAINER, set())
    eventually(lambda: trainer.get_sync_targets("ps_0")[1] == [])


def test_a_backend_can_be_stopped_and_started_again(backends):
    backend = backends()
    models = {SavedModel("m", "ps_0")}
    backend.subscribe_model("m")
    for port in (1, 2):
        backend.report_service_info(CONTAINER, info(port))
        backend.sync_available_saved_models(CONTAINER, models)
        eventually(lambda port=port: backend.get_sync_targets("ps_0")[1] == [f"10.0.0.1:{port}"])
        backend.stop()
        backend.start()


def test_a_restart_for_the_trainers_sake_writes_the_containers_bindings_again():
    zk = FakeKazooClient()
    backend = ZKBackend("b", zk_client=zk)
    backend.start()
    backend.subscribe_model("m")
    models = {SavedModel("m", "ps_0")}
    backend.sync_available_saved_models(CONTAINER, models)
    zk.set_state("LOST")
    assert backend.get_sync_targets("ps_0") == ("m:ps_0", [])
    backend.sync_available_saved_models(CONTAINER, models)
    assert zk.get_children("/b/binding/m") == [f"ps_0:{CONTAINER}"]
    backend.stop()


def test_a_restart_does_not_wait_for_a_watch_that_waits_for_the_backend():
    class Joins(FakeKazooClient):
        """Like kazoo, ``restart`` waits for a watch function that is running."""

        def restart(self):
            other = threading.Thread(target=backend._on_bindings, args=("m", []))
            other.start()
            other.join(60)
            assert not other.is_alive()
            super().restart()

    zk = Joins()
    backend = ZKBackend("b", zk_client=zk)
    backend.start()
    zk.set_state("LOST")
    backend.sync_available_saved_models(CONTAINER, set())
    assert not backend._lost.is_set()
    backend.stop()


def test_a_layout_can_change_while_bindings_are_written():
    """The fake calls watches while it holds the lock that writes need; one thread must not wait for the other."""
    writing, told = threading.Event(), threading.Event()

    class Telling(FakeKazooClient):
        def create(self, *args, **options):
            writing.set()
            return super().create(*args, **options)

    tree = FakeKazooClient().tree
    operator, serving = (ZKBackend("b", zk_client=kind(tree=tree)) for kind in (FakeKazooClient, Telling))
    operator.start()
    serving.start()
    first = FakeKazooClient(tree=tree)
    first.start()
    first.ensure_path("/b/layouts/blue")
    calls = []

    def wait_for_the_write(children):
        if children:
            told.set()
            assert writing.wait(60)

    first.ChildrenWatch("/b/layouts/blue", wait_for_the_write)
    serving.register_layout_callback("blue", calls.append)
    writing.clear()
    operator.decl_saved_model(SavedModel("m", "ps_0"), SavedModelDeployConfig("/x", "latest"))
    adding = threading.Thread(target=operator.add_to_layout, args=("blue", SavedModel("m", "ps_0")), daemon=True)
    adding.start()
    assert told.wait(60)
    binding = threading.Thread(
        target=serving.sync_available_saved_models, args=(CONTAINER, {SavedModel("m", "ps_0")}), daemon=True
    )
    binding.start()
    for thread in (adding, binding):
        thread.join(60)
        assert not thread.is_alive()
    assert len(calls[-1]) == 1
    assert tree.children("/b/binding/m") == [f"ps_0:{CONTAINER}"]


def test_a_subscription_that_failed_can_be_made_again():
    backend = ZKBackend("b", zk_client=FakeKazooClient())
    with pytest.raises(ConnectionClosedError):
        backend.subscribe_model("m")
    backend.start()
    backend.subscribe_model("m")
    backend.report_service_info(CONTAINER, info(1))
    backend.sync_available_saved_models(CONTAINER, {SavedModel("m", "ps_0")})
    assert backend.get_sync_targets("ps_0") == ("m:ps_0", ["10.0.0.1:1"])
    backend.stop()


def test_containers_without_readable_service_info_are_skipped():
    zk = FakeKazooClient()
    backend = ZKBackend("b", zk_client=zk)
    backend.start()
    backend.subscribe_model("m")
    good, silent, broken = Container("c", "1"), Container("c", "2"), Container("c", "3")
    for container, sub_graph in ((good, "ps_0"), (broken, "ps_0"), (silent, "ps_1")):
        zk.create(f"/b/binding/m/{sub_graph}:{container}", b"", makepath=True)
    backend.report_service_info(good, info(1))
    for data in (b"[1]", b"{", b"7", b'{"grpc": 7}', b'{"grpc": ["10.0.0.1:2"]}'):
        zk.ensure_path(f"/b/container_service/{broken}")
        zk.set(f"/b/container_service/{broken}", data)
        assert backend.get_sync_targets("ps_0") == ("m:ps_0", ["10.0.0.1:1"])
        assert backend.get_service_map() == {"m": {"ps_0": [info(1)]}}
    backend.stop()


def test_asking_before_subscribing_is_an_error(backends):
    with pytest.raises(ValueError, match="subscribe_model"):
        backends().get_sync_targets("ps_0")


@pytest.mark.parametrize("form", ["path", "name"])
def test_a_layout_is_followed_and_undeclared_models_are_skipped(backends, form):
    operator, serving = backends(), backends()
    operator.decl_saved_model(SavedModel("m", "entry"), SavedModelDeployConfig("/x/entry", "latest"))
    operator.decl_saved_model(SavedModel("m", "ps_0"), SavedModelDeployConfig("/x/ps_0", "latest_once"))
    assert sorted(map(str, operator.list_saved_models("m"))) == ["m:entry", "m:ps_0"]
    assert operator.list_saved_models("nothing") == []
    seen = []
    path = f"/{backends.bzid}/layouts/blue" if form == "path" else "blue"
    serving.register_layout_callback(path, lambda models: seen.append({str(m): d for m, d in models}) and None)
    assert seen == [{}]
    operator.add_to_layout("blue", SavedModel("m", "ps_0"))
    operator.add_to_layout("blue", SavedModel("ghost", "ps_0"))
    eventually(lambda: len(seen) > 1 and list(seen[-1]) == ["m:ps_0"])
    assert seen[-1]["m:ps_0"].model_base_path == "/x/ps_0"
    serving.report_service_info(CONTAINER, info(1))
    serving.sync_available_saved_models(CONTAINER, {SavedModel("m", "ps_0"), SavedModel("hidden", "ps_0")})
    eventually(lambda: serving.get_service_map().get("m", {}).get("ps_0"))
    assert set(serving.get_service_map()) == {"m"}
    assert serving.get_service_map()["m"]["ps_0"] == [info(1)]
    operator.remove_from_layout("blue", SavedModel("m", "ps_0"))
    operator.remove_from_layout("blue", SavedModel("m", "never"))
    eventually(lambda: seen[-1] == {})
    eventually(lambda: serving.get_service_map() == {})
    operator.add_to_layout("blue", SavedModel("m", "ps_0"))
    eventually(lambda: serving.get_service_map().get("m", {}).get("ps_0"))


def test_paths_and_payloads_are_the_specified_ones():
    zk = FakeKazooClient()
    backend = ZKBackend("shop", zk_client=zk)
    backend.start()
    backend.report_service_info(CONTAINER, info(1))
    backend.sync_available_saved_models(CONTAINER, {SavedModel("m", "ps_0")})
    backend.decl_saved_model(SavedModel("m", "ps_0"), SavedModelDeployConfig("/x", "latest"))
    backend.add_to_layout("blue", SavedModel("m", "ps_0"))
    backend.add_to_layout("/elsewhere", SavedModel("m", "ps_0"))
    assert zk.get("/shop/container_service/psm;dc1;blue:pod:7")[0] == info(1).serialize()
    assert zk.get("/shop/container_service/psm;dc1;blue:pod:7")[1].ephemeralOwner
    assert zk.get("/shop/binding/m/ps_0:psm;dc1;blue:pod:7")[0] == b""
    assert zk.get("/shop/saved_models/m/ps_0")[0] == b'{"model_base_path": "/x", "version_policy": "latest"}'
    assert not zk.get("/shop/saved_models/m/ps_0")[1].ephemeralOwner
    assert zk.exists("/shop/layouts/blue/m:ps_0")
    assert zk.exists("/elsewhere/m:ps_0")


def test_bzid_info_tells_everything_and_leaves_out_what_is_empty():
    backend = ZKBackend("shop", zk_client=FakeKazooClient())
    backend.start()
    assert backend.bzid_info() == {"model_info": {}, "container_info": {}, "layout_info": {}}
    backend.decl_saved_model(SavedModel("m", "ps_0"), SavedModelDeployConfig("/x", "latest"))
    backend.decl_saved_model(SavedModel("m", "ps_1"), SavedModelDeployConfig("/y", "latest"))
    backend.report_service_info(Container("c", "1"), info(1))
    backend.report_service_info(Container("c", "2"), info(2))
    backend.sync_available_saved_models(Container("c", "1"), {SavedModel("m", "ps_0")})
    backend.add_to_layout("l", SavedModel("m", "ps_1"))
    backend.add_to_layout("l", SavedModel("m", "ps_0"))
    got = backend.bzid_info()
    assert got["model_info"] == {
        "m": {
            "sub_graphs_total": 2,
            "sub_graphs_available": 1,
            "ps_0": {"deploy_config": '{"model_base_path": "/x", "version_policy": "latest"}', "bindings": ["c:1"]},
            "ps_1": {"deploy_config": '{"model_base_path": "/y", "version_policy": "latest"}'},
        }
    }
    assert got["container_info"]["c"]["1"]["saved_models"] == ["m:ps_0"]
    assert json.loads(got["container_info"]["c"]["2"]["service_info"])["grpc"] == "10.0.0.1:2"
    assert "saved_models" not in got["container_info"]["c"]["2"]
    assert got["layout_info"] == {"l": ["m:ps_0", "m:ps_1"]}


def test_a_binding_that_could_not_be_written_is_tried_again():
    class Failing(FakeKazooClient):
        fail = True

        def create(self, path, *args, **kwargs):
            if self.fail and "/binding/" in path:
                raise RuntimeError("no")
            return super().create(path, *args, **kwargs)

    zk = Failing()
    backend = ZKBackend("b", zk_client=zk)
    backend.start()
    backend.sync_available_saved_models(CONTAINER, {SavedModel("m", "ps_0")})
    zk.fail = False
    backend.sync_available_saved_models(CONTAINER, {SavedModel("m", "ps_0")})
    assert zk.exists("/b/binding/m/ps_0:psm;dc1;blue:pod:7")


def test_refresh_takes_lists_and_dicts_in_order():
    class Fixed(SyncBackend):
        def __init__(self, replicas):
            self.replicas = replicas

        def subscribe_model(self, model_name): ...
        def start(self): ...
        def stop(self): ...
        def get_sync_targets(self, sub_graph):
            return sub_graph, self.replicas

    assert list(ClientConfig.FromString(refresh_sync_config(Fixed(["b:1", "a:1"]), 2)).targets) == ["b:1", "a:1"]
    infos = {"z:1": ClientConfig.TargetExtraInfo(replica_id=2), "a:1": ClientConfig.TargetExtraInfo(replica_id=1)}
    config = ClientConfig.FromString(refresh_sync_config(Fixed(infos), 0))
    assert config.model_name == "ps_0"
    assert [(t, i.replica_id) for t, i in zip(config.targets, config.targets_extra_info, strict=True)] == [
        ("z:1", 2),
        ("a:1", 1),
    ]


def test_operators_declare_and_publish(tmp_path):
    from shoal.serving import Manifest

    for sub, version, name in (
        ("entry", 9, "old"),
        ("entry", 10, "movie"),
        ("ps_0", 10, "movie"),
        ("ps_1", 10, "movie"),
    ):
        directory = tmp_path / sub / str(version)
        directory.mkdir(parents=True)
        Manifest(model_name=name, sub_graph=sub, version=version, global_step=1).write(directory)
    backend = ZKBackend("b", zk_client=FakeKazooClient())
    backend.start()
    assert declare_saved_model(backend, tmp_path) == "movie"
    assert sorted(map(str, backend.list_saved_models("movie"))) == ["movie:entry", "movie:ps_0", "movie:ps_1"]
    info = backend.bzid_info()["model_info"]["movie"]
    assert json.loads(info["entry"]["deploy_config"]) == {
        "model_base_path": f"{tmp_path}/entry",
        "version_policy": "latest",
    }
    assert json.loads(info["ps_1"]["deploy_config"])["version_policy"] == "latest_once"
    with pytest.raises(ValueError, match="overwrite"):
        declare_saved_model(backend, tmp_path)
    declare_saved_model(backend, tmp_path, overwrite=True)
    map_model_to_layout(backend, "movie:ps_*", "blue", "pub")
    assert backend.bzid_info()["layout_info"] == {"blue": ["movie:ps_0", "movie:ps_1"]}
    map_model_to_layout(backend, "movie:ps_1", "blue", "unpub")
    assert backend.bzid_info()["layout_info"] == {"blue": ["movie:ps_0"]}
