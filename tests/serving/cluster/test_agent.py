"""The agent: configuration, filters, helpers, its service and its container."""

import grpc
import pytest
import torch

from shoal.errors import ConfigError
from shoal.serving import (
    AgentConfig,
    AgentDataProvider,
    AgentService,
    FakeKazooClient,
    GetReplicasRequest,
    GetReplicasResponse,
    GetResourceRequest,
    GetResourceResponse,
    HeartBeatRequest,
    HeartBeatResponse,
    LayoutFilters,
    ModelServer,
    NodeAliveChecker,
    ReplicaMeta,
    ReplicaMirror,
    SavedModel,
    SavedModelDeployConfig,
    ServerType,
    ServingAgent,
    UnifiedAgent,
    ZKBackend,
    check_port_open,
    concat_ip_and_port,
    export_ps,
    find_free_port,
    gen_model_config,
    gen_model_spec,
    get_local_ip,
    is_ipv6_address,
    normalize_regex,
    parse_sub_model_name,
    pasre_sub_model_name,
)
from shoal.table import test_hash_table
from tests.serving.helpers import eventually, free_port


def write(tmp_path, text, name="agent.conf"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_a_config_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("TCE_INTERNAL_IDC", "DC1")
    monkeypatch.setenv("TCE_CLUSTER", "Blue")
    write(tmp_path, "num_ps = 7\n", "more.conf")
    config = AgentConfig.from_file(
        write(
            tmp_path,
            "# a comment\nbzid   shopfeed\nbase_name=movie\ndeploy_type unified # note\nagent_version\t3\n"
            "include more.conf\nload_retry_interval_micros 60 * 1000 * 1000\nper_process_gpu_memory_fraction 1 / 4\n"
            "dc_aware yes\nuse_metrics f\nssl_config_file none\nlayout_pattern blue\n"
            "layout_filters ps_{i};i % 3 == 0\nlayout_filters entry;True\nlayout_filters dense_{i};i < 2\n",
        )
    )
    assert config.deploy_type == "unified"
    assert (config.bzid, config.base_name, config.num_ps) == ("shopfeed", "movie", 7)
    assert config.load_retry_interval_micros == 60_000_000
    assert config.per_process_gpu_memory_fraction == 0.25
    assert (config.dc_aware, config.use_metrics, config.ssl_config_file) == (True, False, None)
    assert config.layout_filters == ["ps_{i};i % 3 == 0", "entry;True", "dense_{i};i < 2"]
    assert config.layout_path == "/shopfeed/layouts/blue"
    assert config.location == "dc1:blue"
    assert config.path_prefix == "/shopfeed/service/movie/dc1:blue"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense 1", "unknown key"),
        ("num_ps __import__('os')", "must be a number"),
        ("num_ps 1.5", "whole number"),
        ("dc_aware maybe", "must be one of true"),
        ("bzid", "no value"),
        ("bzid a\nbzid b", "one value"),
        ("deploy_type x", "deploy_type"),
        ("num_ps 1e300 * 1e300", "num_ps"),
        ("include agent.conf", "includes itself"),
    ],
)
def test_broken_config_files_say_what_is_wrong(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        AgentConfig.from_file(write(tmp_path, text))


def test_several_versions_may_be_named(tmp_path):
    config = AgentConfig.from_file(write(tmp_path, "version_policy specific\nversion_data 3\nversion_data 2 * 4\n"))
    assert config.version_data == [3, 8]
    model = gen_model_config("m", "/x", config.version_policy, config.version_data)
    assert list(model.model_version_policy.specific.versions) == [3, 8]


def test_server_type_is_another_name_of_deploy_type(tmp_path):
    assert AgentConfig.from_file(write(tmp_path, "server_type ps")).deploy_type == "ps"
    assert AgentConfig(deploy_type="entry", stand_alone_serving=True).deploy_type == "mixed"


def test_ports_come_from_the_environment_or_are_free_ones(monkeypatch):
    for number in range(11):
        monkeypatch.setenv(f"PORT{number or ''}", str(1000 + number))
    mixed = AgentConfig(deploy_type="mixed")
    assert (mixed.tfs_entry_archon_port, mixed.tfs_entry_port, mixed.tfs_entry_http_port) == (1000, 1003, 1004)
    assert (mixed.tfs_ps_port, mixed.tfs_ps_http_port, mixed.tfs_ps_archon_port) == (1005, 1006, 1007)
    assert (mixed.tfs_dense_port, mixed.tfs_dense_http_port, mixed.tfs_dense_archon_port) == (1008, 1009, 1010)
    assert mixed.agent_port == 1002
    ps = AgentConfig(deploy_type="ps", agent_port=5)
    assert (ps.tfs_ps_port, ps.tfs_entry_port, ps.agent_port) == (1003, None, 5)
    for number in range(11):
        monkeypatch.delenv(f"PORT{number or ''}")
    assert AgentConfig(deploy_type="ps").tfs_ps_port > 0


def test_layout_filters():
    assert LayoutFilters([]).accepts("anything")
    filters = LayoutFilters([" ps_{i} ; i % ${shard_num} == ${shard_id} ", "entry;True"], shard_id=2, shard_num=3)
    assert [i for i in range(7) if filters.accepts(f"ps_{i}")] == [2, 5]
    assert filters.accepts("entry")
    assert not filters.accepts("entry_2")
    assert not filters.accepts("xps_2")
    assert LayoutFilters(["ps_{i};i % ${shard_num} == ${shard_id}"], shard_id=-1, shard_num=0).accepts("ps_4")
    assert LayoutFilters(["{a}_{b};not (a == 1 and 1 < b <= 3) or False"]).accepts("1_1")
    assert not LayoutFilters(["{a}_{b};not (a == 1 and 1 < b <= 3)"]).accepts("1_2")
    assert normalize_regex("ps_{i}x{") == r"ps_(?P<i>\d+)x{"
    filters = LayoutFilters([r"(?P<kind>ps|dense)_{i}(?:_{j})?;i < 2", "x_{i}?;i == 1"])
    assert [filters.accepts(name) for name in ("ps_1", "dense_1_7", "ps_2", "x_1", "x_")] == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert not filters.accepts("ps_" + "1" * 5000)


@pytest.mark.parametrize(
    "text",
    [
        "ps_{i}",
        "ps_{i};" + "-" * 990 + "1",
        "ps_{i};i ** 2 == 4",
        "ps_{i};__import__('os')",
        "ps_{i};i.real",
        "ps_{i};",
        "a;1.5 == 1",
        "a;x == 1",
    ],
)
def test_bad_layout_filters_are_refused_when_built(text):
    with pytest.raises(ValueError, match=r"filter|condition|expression"):
        LayoutFilters([text])


def test_model_specs_and_configs():
    assert gen_model_spec("m", 3, "s").version.value == 3
    assert gen_model_spec("m", "stable").version_label == "stable"
    assert gen_model_spec("m").WhichOneof("version_choice") is None
    assert gen_model_config("m", "/x", "LATEST", 2).model_version_policy.latest.num_versions == 2
    assert gen_model_config("m", "/x", "latest_once").model_version_policy.latest_once.num_versions == 1
    assert list(gen_model_config("m", "/x", "specific", 4).model_version_policy.specific.versions) == [4]
    assert list(gen_model_config("m", "/x", "specific", [4, 5]).model_version_policy.specific.versions) == [4, 5]
    assert gen_model_config("m", "/x", "all").model_version_policy.HasField("all")
    assert gen_model_config("m", "/x", version_labels={"a": 1}).version_labels["a"] == 1
    assert gen_model_config("m", "/x").model_platform == "tensorflow"
    assert gen_model_config("m", "/x", "latest_once", 2).SerializeToString().hex() == (
        "0a016d" "12022f78" "220a74656e736f72666c6f77" "3a05ba06021002".replace("1002", "0802")
    )  # fmt: skip
    with pytest.raises(ValueError, match="newest"):
        gen_model_config("m", "/x", "newest")


def test_sub_model_names():
    assert parse_sub_model_name(" Dense_7 ") == ("dense", 7)
    assert parse_sub_model_name("entry") == ("entry", 0)
    assert pasre_sub_model_name is parse_sub_model_name
    for bad in ("", "  ", "ps_x"):
        with pytest.raises(ValueError, match="name"):
            parse_sub_model_name(bad)


def test_network_helpers(monkeypatch, refused):
    assert is_ipv6_address("2::1")
    assert is_ipv6_address("fe80::1%eth0")
    assert not is_ipv6_address("[::1]")
    assert not is_ipv6_address("localhost")
    assert concat_ip_and_port("[::1]", 5) == "[::1]:5"
    assert concat_ip_and_port("localhost", "5") == "localhost:5"
    assert not is_ipv6_address("1.2.3.4")
    assert concat_ip_and_port("2::1", 5) == "[2::1]:5"
    assert concat_ip_and_port("1.2.3.4", 5) == "1.2.3.4:5"
    monkeypatch.setenv("MY_HOST_IP", "10.0.0.9")
    assert get_local_ip() == "10.0.0.9"
    assert 0 < find_free_port() < 65536
    closed = refused()
    assert not check_port_open(int(closed.rpartition(":")[2]))
    server = ModelServer().start()
    assert check_port_open(server.port)
    checker = NodeAliveChecker([f"127.0.0.1:{server.port}", closed, "nonsense"], timeout=60)
    assert checker.get_alive_nodes() == [f"127.0.0.1:{server.port}"]
    assert checker.get_dead_nodes() == [closed, "nonsense"]
    assert not checker.all_nodes_alive()
    assert len(checker.get_addrs()) == 3
    server.stop(0)


def test_the_net_runs_in_several_processes_of_a_host(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARD_ID", "0")
    monkeypatch.setenv("PORT8", "4008")
    zk = FakeKazooClient()
    zk.start()
    config = AgentConfig(
        bzid="b",
        base_name="m",
        base_path=str(tmp_path),
        deploy_type="mixed",
        num_ps=1,
        replica_id=2,
        dense_alone=True,
        agent_port=free_port(),
    )
    agent = ServingAgent(config, zk, agent_address="127.0.0.1:0")
    names = [each.name for each in agent.servers()]
    assert names == ["ps", "dense 0", "dense 1", "dense 2", "entry"]
    ports = [each.config.tfs_dense_port for each in agent.servers()[1:4]]
    assert ports[0] == 4008
    assert len(set(ports)) == 3
    command = agent.command("dense", agent.servers()[2].config)
    assert command[command.index("--port") + 1] == str(ports[1])
    assert command[-2:] == ["--sub-graph", "dense_0"]
    assert agent.command("ps")[-2:] == ["--sub-graph", "ps_0"]
    agent.replicas.updater.register()
    for updater in agent.dense:
        updater.register()
    assert sorted(zk.get_children("/b/service/m/dense:0")) == ["6", "7", "8"]
    assert zk.get_children("/b/service/m/ps:0") == ["2"]
    assert len(agent._registrations()) == 5
    assert ReplicaMeta.deserialize(zk.get("/b/service/m/dense:0/7")[0]).address.endswith(f":{ports[1]}")
    agent.end()


def rpc(port, method, request, response):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        path = f"/monolith.serving.agent_service.AgentService/{method}"
        return channel.unary_unary(path, type(request).SerializeToString, response.FromString)(request, timeout=60)


def test_the_agent_of_a_unified_cluster_knows_no_replicas_by_task():
    service = AgentService(AgentDataProvider(lambda: {"m:ps_0": ["a:1"]}), AgentConfig(replica_id=2), port=0).start()
    with pytest.raises(grpc.RpcError) as caught:
        rpc(service.port, "GetReplicas", GetReplicasRequest(), GetReplicasResponse)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    resource = rpc(service.port, "GetResource", GetResourceRequest(), GetResourceResponse)
    assert resource.memory > 0
    assert (resource.cpu, resource.network, resource.work_load) == (-1.0, -1.0, -1.0)
    assert (resource.shard_id, resource.replica_id) == (-1, 2)
    service.stop(0)


def test_the_mirror_of_many_models():
    mirror = ReplicaMirror()
    mirror.update("m", ServerType.PS, 3, ["a:1", "b:1"])
    mirror.update("m", ServerType.ENTRY, 0, ["c:1"])
    service = AgentService(mirror, port=0).start()
    request = GetReplicasRequest(server_type=ServerType.PS, task=3, model_name="m")
    assert list(rpc(service.port, "GetReplicas", request, GetReplicasResponse).address_list.address) == ["a:1", "b:1"]
    assert mirror.get_all_replicas(ServerType.PS) == {"m:ps:3": ["a:1", "b:1"]}
    for method, wrong, response in (
        ("GetReplicas", GetReplicasRequest(server_type=7), GetReplicasResponse),
        ("HeartBeat", HeartBeatRequest(server_type=7), HeartBeatResponse),
    ):
        with pytest.raises(grpc.RpcError, match="server_type must be one of 0") as caught:
            rpc(service.port, method, wrong, response)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    service.stop(0)


def test_a_unified_container_serves_what_its_layout_names(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_HOST_IP", "127.0.0.1")
    table = test_hash_table(2, name_suffix="t")
    table.assign(torch.tensor([1]), torch.ones(1, 2))
    for sub in ("ps_0", "ps_1"):
        export_ps(tmp_path / sub / "5", {"u": table}, model_name="movie", sub_graph=sub, global_step=1)
    tree = FakeKazooClient().tree
    operator = ZKBackend("b", zk_client=FakeKazooClient(tree=tree))
    operator.start()
    config = AgentConfig(
        bzid="b", agent_version=3, layout_pattern="blue", layout_filters=["ps_{i};i == 0"], agent_port=find_free_port()
    )
    server = ModelServer().start()
    agent = UnifiedAgent(
        config, ZKBackend("b", zk_client=FakeKazooClient(tree=tree)), server, agent_address="127.0.0.1:0"
    )
    agent.start()
    try:
        for name, path, policy in (("none", None, "latest"), ("list", ["/x"], "latest"), ("policy", "/x", 5)):
            operator.decl_saved_model(SavedModel(name, "ps_0"), SavedModelDeployConfig(path, policy))
            operator.add_to_layout("blue", SavedModel(name, "ps_0"))  # not a declaration of a model: skipped
        for sub in ("ps_0", "ps_1"):
            operator.decl_saved_model(
                SavedModel("movie", sub), SavedModelDeployConfig(str(tmp_path / sub), "latest_once")
            )
            operator.add_to_layout("blue", SavedModel("movie", sub))
        eventually(lambda: operator.bzid_info()["model_info"].get("movie", {}).get("sub_graphs_available"))
        assert [model.name for model in server.models()] == ["movie:ps_0"]
        operator.subscribe_model("movie")
        assert operator.get_sync_targets("ps_0") == ("movie:ps_0", [f"127.0.0.1:{server.port}"])
        from shoal.serving import AgentHeartbeat

        table = AgentHeartbeat(f"127.0.0.1:{agent.agent_port}", 1000)
        eventually(lambda: table.addresses or table.refresh(), what="the agent's answer")
        assert table.addresses == {"movie:ps_0": [f"127.0.0.1:{server.port}"]}
        table.stop()
        agent.write_model_config(tmp_path / "models.txt")
        assert 'name: "movie:ps_0"' in (tmp_path / "models.txt").read_text()
        operator.remove_from_layout("blue", SavedModel("movie", "ps_0"))
        eventually(lambda: not server.models())
    finally:
        agent.stop()
        server.stop(0)
