"""Sync clients, rounds, the manager, dummies; threads and servers on loopback."""

import json
import pickle
import threading

import grpc
import pytest
import torch

from shoal.serving import (
    ClientConfig,
    DummySyncServer,
    ExportMode,
    ModelServer,
    ParameterSyncClient,
    PredictRequest,
    PredictResponse,
    PushRequest,
    PushResponse,
    StatusError,
    SyncClientManager,
    create_dummy_sync_client,
    create_dummy_sync_server,
    create_parameter_sync_clients,
    enter_export_mode,
    parameter_sync_client_from_config,
)
from shoal.serving.sync.monolith.touched import TouchedPairs
from shoal.table import (
    CombineAsSegment,
    CuckooEmbeddingHashTableConfig,
    EmbeddingHashTableConfig,
    EntryConfig,
    Fp32Compressor,
    HashTableConfigInstance,
    MultiHashTable,
    SgdOptimizer,
    TouchedKeySet,
    ZerosInitializer,
    test_hash_table,
)
from tests.serving.helpers import eventually, free_port


def config_of(*targets, model="m", timeout_in_ms=60_000):
    return ClientConfig(
        model_name=model, signature_name="hashtable_assign", targets=targets, timeout_in_ms=timeout_in_ms
    )


def instance(dim):
    segment = CombineAsSegment(dim, ZerosInitializer(), SgdOptimizer(), Fp32Compressor())
    config = EmbeddingHashTableConfig(
        entry_config=EntryConfig(segments=[segment]), cuckoo=CuckooEmbeddingHashTableConfig()
    )
    return HashTableConfigInstance(config, [1.0])


def step(table, ids):
    table.apply_gradients(torch.tensor(ids), torch.ones(len(ids), table.dim_size))


def sync(handle, config):
    return json.loads(ParameterSyncClient(handle).create_sync_op(config.SerializeToString())[0])


@pytest.fixture
def server():
    server = DummySyncServer("127.0.0.1:0")
    yield server
    server.shutdown()


def address(server):
    return f"127.0.0.1:{server.get_port()[0]}"


# --- the registry of clients ------------------------------------------------------------------------------------------


def test_asking_twice_for_a_name_returns_the_same_client():
    one = parameter_sync_client_from_config(name_suffix="a")
    assert one is parameter_sync_client_from_config(ClientConfig(targets=["x:1"]), name_suffix="a")
    assert one.name == "MonolithSyncClient_a"
    assert one.manager.targets == []


def test_targets_are_taken_from_the_first_config():
    handle = parameter_sync_client_from_config(config_of("x:1", "y:2"), "first")
    assert handle.manager.targets == ["x:1", "y:2"]


def test_one_client_per_parameter_server_knows_its_device():
    assert [handle.name for handle in create_parameter_sync_clients(0)] == ["MonolithSyncClient_"]
    assert create_parameter_sync_clients(0)[0].device == ""
    handles = create_parameter_sync_clients(2)
    assert [handle.name for handle in handles] == ["MonolithSyncClient_0", "MonolithSyncClient_1"]
    assert handles[1].device == "/job:ps/task:1/device:CPU:0"
    with enter_export_mode(ExportMode.STANDALONE):
        assert create_parameter_sync_clients(2)[1].device == ""


def test_arguments_have_the_names_of_the_contract():
    (handle,) = create_parameter_sync_clients(ps_num=0)
    client = ParameterSyncClient(client=handle)
    assert client.handle is handle
    assert ParameterSyncClient(client).handle is handle
    assert client.create_sync_op(config_str=b"") == client.create_sync_op(config_bytes=b"") == ["{}"]
    assert ParameterSyncClient(handle=handle).handle is handle
    with pytest.raises(ValueError, match="client must be a sync client's handle, got None"):
        ParameterSyncClient()
    with pytest.raises(ValueError, match="ps_num must be >= 0, got -1"):
        create_parameter_sync_clients(-1)


def test_attachment_rules():
    single = parameter_sync_client_from_config(name_suffix="single")
    test_hash_table(2, name_suffix="a", sync_client=single)
    with pytest.raises(StatusError) as caught:
        MultiHashTable.from_configs({"x": instance(1)}, sync_client=single, name_suffix="m1")
    assert caught.value.code == 3
    with pytest.raises(StatusError):
        single.attach_table("MonolithHashTable_a", 2, lambda ids: ids)
    multi = parameter_sync_client_from_config(name_suffix="multi")
    MultiHashTable.from_configs({"x": instance(1)}, sync_client=ParameterSyncClient(multi), name_suffix="m2")
    with pytest.raises(StatusError) as caught:
        test_hash_table(2, name_suffix="b", sync_client=multi)
    assert caught.value.code == 3
    with pytest.raises(StatusError) as caught:
        MultiHashTable.from_configs({"x": instance(1)}, sync_client=multi, name_suffix="m3")
    assert caught.value.code == 6


def test_bytes_that_are_no_config_are_an_invalid_argument_and_no_bytes_are_an_empty_config():
    client = ParameterSyncClient(parameter_sync_client_from_config())
    with pytest.raises(StatusError, match="serialised ClientConfig") as caught:
        client.create_sync_op(b"\xff\xff")
    assert caught.value.code == 3
    assert client.create_sync_op(b"") == ["{}"]
    for nothing in (None, 7, "text"):
        with pytest.raises(StatusError, match="serialised ClientConfig") as caught:
            client.create_sync_op(nothing)
        assert caught.value.code == 3
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.code, again.message) == (3, caught.value.message)


# --- rounds ---------------------------------------------------------------------------------------------------------


def test_two_steps_and_one_round_reach_two_servers_and_a_second_round_sends_nothing():
    handle = parameter_sync_client_from_config()
    table = test_hash_table(3, name_suffix="t", sync_client=handle)
    step(table, [1, 2, 3])
    step(table, [3, 4, -5])
    replicas = []
    with torch.no_grad():
        for index in range(2):
            replica = test_hash_table(3, name_suffix=f"replica{index}")
            replica.name = table.name
            server = ModelServer()
            server.serve_tables("m", replica)
            replicas.append((server.start(), replica))
    targets = [f"127.0.0.1:{server.port}" for server, _ in replicas]
    result = sync(handle, config_of(*targets))
    assert [(r["status_code"], r["error_message"], r["update_num"]) for r in result["responses"]] == [(0, "", 5)] * 2
    assert [r["target"] for r in result["responses"]] == sorted(targets)
    assert sync(handle, config_of(*targets)) == {}
    ids = torch.tensor([1, 2, 3, 4, -5])
    for server, replica in replicas:
        assert torch.equal(replica.lookup(ids), table.lookup(ids))
        server.stop(0)
    assert set(handle.freshness) == set(targets)


def test_a_killed_server_gets_what_it_missed_after_its_restart_with_the_newest_value(server):
    handle = parameter_sync_client_from_config()
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    port = free_port()
    dead = f"127.0.0.1:{port}"
    config = config_of(address(server), dead)
    step(table, [1, 2])
    responses = {r["target"]: r for r in sync(handle, config)["responses"]}
    assert responses[dead]["status_code"] == 14
    assert responses[dead]["update_num"] == 0
    assert responses[address(server)]["status_code"] == 0
    step(table, [2, 3])
    back = DummySyncServer(dead)
    try:

        def taken():  # a refused channel waits before it tries again
            responses = {r["target"]: r for r in sync(handle, config).get("responses", [])}
            return responses.get(dead, {}).get("status_code") == 0

        eventually(taken, what="a push to the server that is back")
        assert sorted(back.requests[-1].inputs["MonolithHashTable_t_id"].int64_val) == [1, 2, 3]
        values = dict(zip(back.requests[-1].inputs["MonolithHashTable_t_id"].int64_val,
                          back.requests[-1].inputs["MonolithHashTable_t_value"].float_val, strict=True))  # fmt: skip
        assert values == {1: -1.0, 2: -2.0, 3: -1.0}
        assert sorted(server.requests[1].inputs["MonolithHashTable_t_id"].int64_val) == [2, 3]
        assert sync(handle, config) == {}
    finally:
        back.shutdown()


def test_what_a_target_missed_is_dropped_when_it_leaves_the_list(server, refused):
    handle = parameter_sync_client_from_config()
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    dead = refused()
    step(table, [1])
    sync(handle, config_of(dead))
    assert handle.waiting()[dead] == 1
    sync(handle, config_of(address(server)))
    assert sync(handle, config_of(address(server), dead)) == {}


def test_touched_keys_are_kept_while_there_is_no_target(server):
    handle = parameter_sync_client_from_config()
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    step(table, [5])
    assert sync(handle, config_of()) == {}
    assert sync(handle, config_of(address(server)))["responses"][0]["update_num"] == 1


def test_a_round_of_a_client_without_tables_sends_nothing(server):
    handle = parameter_sync_client_from_config()
    assert sync(handle, config_of(address(server))) == {}
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    step(table, [5])
    assert sync(handle, config_of(address(server)))["responses"][0]["update_num"] == 1
    assert len(server.requests) == 1


def test_only_training_marks_ids(server):
    handle = parameter_sync_client_from_config()
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    table.assign(torch.tensor([1]), torch.ones(1, 1)).assign_add(torch.tensor([2]), torch.ones(1, 1))
    table.lookup(torch.tensor([1]))
    assert sync(handle, config_of(address(server))) == {}
    table.reinitialize(torch.tensor([7, 8]))
    assert sync(handle, config_of(address(server)))["responses"][0]["update_num"] == 2


def test_tables_are_pushed_in_name_order_also_those_without_touched_ids(server):
    handle = parameter_sync_client_from_config()
    second = test_hash_table(1, name_suffix="b", sync_client=handle)
    test_hash_table(2, name_suffix="a", sync_client=handle)
    step(second, [9])
    sync(handle, config_of(address(server)))
    request = server.requests[0]
    assert request.model_spec.signature_name == "hashtable_assign"
    assert sorted(request.inputs) == [
        "MonolithHashTable_a_id", "MonolithHashTable_a_value", "MonolithHashTable_b_id", "MonolithHashTable_b_value",
    ]  # fmt: skip


def test_the_signature_of_single_tables_is_the_configs(server):
    handle = parameter_sync_client_from_config()
    step(test_hash_table(2, name_suffix="a", sync_client=handle), [9])
    for name in ("their/assign", ""):
        sync(handle, ClientConfig(model_name="m", signature_name=name, targets=[address(server)], timeout_in_ms=60_000))
        step(test_hash_table(2, name_suffix=f"b{name}", sync_client=handle), [9])
    assert [request.model_spec.signature_name for request in server.requests] == ["their/assign", ""]
    assert sorted(server.requests[0].inputs) == ["MonolithHashTable_a_id", "MonolithHashTable_a_value"]


def test_a_multi_table_is_pushed_raw_in_the_order_of_names(server):
    handle = parameter_sync_client_from_config()
    table = MultiHashTable.from_configs({"z": instance(2), "a": instance(1)}, sync_client=handle, name_suffix="3")
    table.apply_gradients({"z": (torch.tensor([4, 5]), torch.ones(2, 2))})
    result = sync(handle, config_of(address(server)))
    assert result["responses"][0]["update_num"] == 2
    request = server.requests[0]
    assert request.model_spec.signature_name == "MonolithMultiHashTable_3/raw_assign"
    assert list(request.inputs["id_split"].int64_val) == [0, 0, 2]
    assert list(request.inputs["flat_value"].float_val) == [-1.0] * 4


def test_an_evicted_id_is_pushed_as_zeros(server):
    handle = parameter_sync_client_from_config()
    table = test_hash_table(2, name_suffix="t", sync_client=handle)
    step(table, [1])
    table.clear()
    sync(handle, config_of(address(server)))
    assert list(server.requests[0].inputs["MonolithHashTable_t_value"].float_val) == [0.0, 0.0]


def test_a_failing_lookup_is_an_invalid_argument_and_loses_nothing(server):
    handle = parameter_sync_client_from_config()
    broken = [True]

    def lookup(ids):
        if broken[0]:
            raise RuntimeError("out of order")
        return torch.ones(len(ids), 1)

    keys, number = handle.attach_table("t", 1, lookup)
    keys.insert([1, 2], number)
    with pytest.raises(StatusError, match="out of order") as caught:
        handle.sync(config_of(address(server)))
    assert caught.value.code == 3
    broken[0] = False
    assert handle.sync(config_of(address(server))).responses[0].update_num == 2


def test_a_new_replica_catches_up_on_what_was_touched_since_the_export(server):
    handle = parameter_sync_client_from_config()
    handle.catch_up()
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    step(table, [1, 2])
    sync(handle, config_of(address(server)))
    late = DummySyncServer("127.0.0.1:0")
    try:
        step(table, [3])
        sync(handle, config_of(address(server), address(late)))
        assert sorted(late.requests[0].inputs["MonolithHashTable_t_id"].int64_val) == [1, 2, 3]
        assert sorted(server.requests[1].inputs["MonolithHashTable_t_id"].int64_val) == [3]
        handle.exported()
        assert sync(handle, config_of(address(server), address(late))) == {}
    finally:
        late.shutdown()


def test_large_pushes_are_split_and_arrive_whole(server):
    handle = parameter_sync_client_from_config()
    table = test_hash_table(16, name_suffix="t", sync_client=handle)
    ids = torch.arange(100_000)
    table.apply_gradients(ids, torch.ones(len(ids), 16))
    responses = sync(handle, config_of(address(server)))["responses"]
    assert len(responses) > 1
    assert sum(r["update_num"] for r in responses) == 100_000
    pushed = sorted(i for request in server.requests for i in request.inputs["MonolithHashTable_t_id"].int64_val)
    assert pushed == ids.tolist()


def test_marking_from_many_threads_during_rounds_loses_nothing(server):
    handle = parameter_sync_client_from_config()
    table = test_hash_table(1, name_suffix="t", sync_client=handle)

    def train(base):
        for i in range(50):
            step(table, list(range(base + i * 10, base + i * 10 + 10)))

    threads = [threading.Thread(target=train, args=(10_000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        sync(handle, config_of(address(server)))
    sync(handle, config_of(address(server)))
    pushed = {i for request in server.requests for i in request.inputs["MonolithHashTable_t_id"].int64_val}
    assert len(pushed) == 2000


def test_overflow_is_counted(metrics, server):
    pairs = TouchedPairs("c", capacity=5)
    assert pairs.keys.insert(list(range(10, 19)), 0) == 6
    groups, _ = pairs.steal()
    assert sorted(groups[0].tolist()) == [16, 17, 18]
    assert metrics.counters == [("touched_key_set_dropped", 6, "name=c")]


def test_overflow_is_counted_while_there_is_no_target(metrics):
    handle = parameter_sync_client_from_config()
    handle.touched = TouchedPairs("c", capacity=5)
    table = test_hash_table(1, sync_client=handle)
    step(table, list(range(8)))
    assert sync(handle, ClientConfig()) == {}
    assert metrics.counters == [("touched_key_set_dropped", 6, "name=c")]
    assert handle.waiting() == {"": 2}


def test_a_set_of_its_own_counts_what_it_drops_too(metrics):
    keys = TouchedKeySet(capacity=2, name_suffix="mine")
    for wrong in ([1.5], torch.tensor([1.5]), ["1"]):
        with pytest.raises((ValueError, TypeError)):
            keys.insert(wrong)
    assert keys.insert([]) == len(keys) == 0
    assert keys.insert([1, 2, 3]) == 0
    assert metrics.counters == []
    assert keys.insert([4, 5, 6, 7]) == 6
    assert metrics.counters == [("touched_key_set_dropped", 6, "name=TouchedKeySet_mine")]
    assert keys.steal().tolist() == [7]


# --- the manager ----------------------------------------------------------------------------------------------------


class FakeClient:
    made = []

    def __init__(self, target, code=0):
        self.target, self.code, self.closed, self.pushed = target, code, False, []
        FakeClient.made.append(self)

    def push(self, request):
        self.pushed.append(request)
        total = sum(len(delta.fids) for delta in request.delta_hash_tables)
        return PushResponse(status_code=self.code, error_message="", update_num=0 if self.code else total)

    def close(self):
        self.closed = True


def push_of(count=3, dim=2):
    request = PushRequest(model_name="m", signature_name="s")
    request.delta_hash_tables.add(unique_id="t", dim_size=dim, fids=range(count), embeddings=[0.5] * (count * dim))
    return request


def test_replacing_targets_keeps_clients_that_stay_and_closes_those_that_go():
    FakeClient.made = []
    manager = SyncClientManager(FakeClient)
    assert manager.try_replace(["b:1", "a:1", "b:1"], []) is True
    first = {client.target: client for client in FakeClient.made}
    assert sorted(first) == ["a:1", "b:1"]
    assert manager.try_replace(["b:1", "c:1"], [])
    assert first["a:1"].closed
    assert not first["b:1"].closed
    assert [client.target for client in FakeClient.made].count("b:1") == 1
    manager.close()
    assert all(client.closed for client in FakeClient.made)


def test_extra_info_needs_lists_of_one_length_and_the_first_of_duplicates_wins():
    manager = SyncClientManager(FakeClient)
    infos = [ClientConfig.TargetExtraInfo(idc=text, cluster="c", replica_id=1) for text in "xyz"]
    manager.try_replace(["a:1", "b:1", "a:1"], infos)
    assert manager.extra_info["a:1"].idc == "x"
    manager.try_replace(["a:1"], infos)
    assert manager.extra_info == {}


def test_responses_are_ordered_by_target_and_part_and_carry_their_target(monkeypatch):
    monkeypatch.setattr("shoal.serving.sync.monolith.manager.MAX_PART_BYTES", 60)
    manager = SyncClientManager(FakeClient)
    manager.try_replace(["b:1", "a:1"], [])
    result = manager.push(push_of(10), "m", "s")
    targets = [response.target for response in result.responses]
    assert targets == sorted(targets)
    assert targets.count("a:1") == targets.count("b:1") > 1
    assert sum(r.update_num for r in result.responses if r.target == "a:1") == 10


def test_a_request_without_tables_is_answered_with_the_target_only():
    FakeClient.made = []
    manager = SyncClientManager(FakeClient)
    manager.try_replace(["a:1"], [])
    (response,) = manager.push(PushRequest(model_name="m"), "m", "s").responses
    assert response.target == "a:1"
    assert not response.HasField("status_code")
    assert not FakeClient.made[0].pushed


def test_a_client_that_raises_is_a_failed_response_and_its_rows_are_kept(server):
    class Broken:
        def __init__(self, target):
            self.target = target

        def push(self, request):
            raise RuntimeError("out of order")

        def close(self):
            pass

    handle = parameter_sync_client_from_config()
    table = test_hash_table(2, sync_client=handle)
    handle.manager = SyncClientManager(Broken)
    step(table, [1, 2])
    result = sync(handle, config_of("a:1"))
    assert result == {
        "responses": [{"status_code": 13, "error_message": "out of order", "target": "a:1", "update_num": 0}]
    }
    assert handle.waiting() == {"": 0, "a:1": 2}
    manager = SyncClientManager()
    manager.try_replace([address(server)])
    request = push_of()
    del request.delta_hash_tables[0].embeddings[1:]
    assert [each.status_code for each in manager.push(request, "m", "s").responses] == [3]
    assert server.requests == []
    manager.close()


def test_a_client_may_answer_with_one_message_again_and_again():
    answer = PushResponse(status_code=0, error_message="", update_num=3)

    class Constant(FakeClient):
        def push(self, request):
            return answer

    manager = SyncClientManager(Constant)
    manager.try_replace(["b:1", "a:1"])
    assert [each.target for each in manager.push(push_of(), "m", "s").responses] == ["a:1", "b:1"]
    assert not answer.HasField("target")


def test_metrics_name_target_status_and_place(metrics):
    manager = SyncClientManager(lambda target: FakeClient(target, 14 if target == "b:1" else 0))
    infos = [ClientConfig.TargetExtraInfo(idc="dc1", cluster="blue", replica_id=6)]
    manager.try_replace(["a:1"], infos)
    manager.push(push_of(3), "m", "s")
    tags = "model_name=m|signature_name=s|target=a:1|status=OK|idc=dc1:blue|replica_id=6"
    assert ("parameter_sync_fid_count", 3, tags) in metrics.counters
    assert ("parameter_sync_byte_size", push_of(3).ByteSize(), tags) in metrics.counters
    assert metrics.timers[0][0] == "parameter_sync_latency"
    manager.try_replace(["b:1"], [])
    manager.push(push_of(3), "m", "s")
    assert metrics.counters[-1][2] == "model_name=m|signature_name=s|target=b:1|status=KO|idc=NA|replica_id=-1"


def test_a_deadline_is_applied_to_a_push():
    release = threading.Event()

    def slow(request, context):
        release.wait(100)
        return PredictResponse()

    handler = grpc.unary_unary_rpc_method_handler(slow, PredictRequest.FromString, PredictResponse.SerializeToString)
    from concurrent import futures

    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tensorflow.serving.PredictionService", {"Predict": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        manager = SyncClientManager()
        manager.try_replace([f"127.0.0.1:{port}"], [])
        request = push_of(1)
        request.timeout_in_ms = 200
        (response,) = manager.push(request, "m", "s").responses
        assert response.status_code == 4
        assert response.update_num == 0
        manager.close()
    finally:
        release.set()
        server.stop(0)


# --- dummies --------------------------------------------------------------------------------------------------------


def test_the_dummy_client_pushes_and_tracks_nothing():
    handle = create_dummy_sync_client()
    assert handle is create_dummy_sync_client()
    assert handle.name == "MonolithDummySyncClient"
    table = test_hash_table(1, name_suffix="t", sync_client=handle)
    step(table, [1])
    assert ParameterSyncClient(handle).create_sync_op(config_of("nowhere:1").SerializeToString()) == ["{}"]
    assert len(handle.touched) == 0


def test_the_dummy_server_answers_with_the_model_spec_and_refuses_other_inputs():
    server = create_dummy_sync_server("127.0.0.1:0")
    assert server.get_port().dtype == "int32"
    assert len(server.get_port()) == 1
    channel = grpc.insecure_channel(address(server))
    call = channel.unary_unary(
        "/tensorflow.serving.PredictionService/Predict", PredictRequest.SerializeToString, PredictResponse.FromString
    )
    request = PredictRequest()
    request.model_spec.name = "m"
    for alias in ("t_id", "t_value", "id", "id_split", "flat_value"):
        request.inputs[alias].dtype = 9
    assert call(request, timeout=60).model_spec.name == "m"
    assert len(server.requests) == 1
    request.inputs["other"].dtype = 9
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=60)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len(server.requests) == 1
    channel.close()
    assert server.shutdown().tolist() == [100]
    assert server.shutdown().dtype == "int64"


def test_health_and_reflection_are_on(server):
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(address(server)) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        names = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert "tensorflow.serving.PredictionService" in names
