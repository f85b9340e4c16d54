"""Remote calls: routing, validation, deadline, failover, the address table."""

import threading
import time
from concurrent import futures

import grpc
import numpy as np
import pytest
import torch

from shoal.errors import ConfigError
from shoal.serving import (
    AgentDataProvider,
    AgentHeartbeat,
    AgentService,
    ExportContext,
    ExportMode,
    PredictRequest,
    PredictResponse,
    PrometheusSink,
    RemotePredictHelper,
    StatusError,
    enter_export_mode,
    remote_predict,
    remote_predict_async,
    remote_predict_with_status,
    set_address_table,
    tensor_to_proto,
)
from shoal.serving.client.addresses import api_version_of
from shoal.serving.client.remote import request_deadline
from shoal.serving.client.sub_graphs import SubGraphs
from tests.serving.helpers import eventually, free_port


class Recorder:
    """A PredictionService that remembers requests and echoes inputs as outputs."""

    def __init__(self, outputs=None, code=None, waits=False):
        self.requests, self.outputs, self.code = [], outputs, code
        self.goes_on = threading.Event()
        if not waits:
            self.goes_on.set()
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        handler = grpc.unary_unary_rpc_method_handler(
            self.predict, PredictRequest.FromString, PredictResponse.SerializeToString
        )
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("tensorflow.serving.PredictionService", {"Predict": handler}),)
        )
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def predict(self, request, context):
        self.requests.append(request)
        self.goes_on.wait(100)
        if self.code is not None:
            context.abort(self.code, "on purpose")
        response = PredictResponse()
        for alias, value in (self.outputs or request.inputs).items():
            response.outputs[alias].CopyFrom(value)
        return response


@pytest.fixture
def recorders():
    made = []

    def make(**arguments):
        made.append(Recorder(**arguments))
        return made[-1]

    yield make
    for each in made:
        each.goes_on.set()
        each.server.stop(0)


def call(**changes):
    arguments = {
        "input_tensor_alias": ["a"],
        "input_tensors": [torch.tensor([1, 2])],
        "output_tensor_alias": ["a"],
        "model_name": "",
        "task": 6,
        "old_model_name": "ps_6",
        "max_rpc_deadline_millis": 60000,
    }
    return remote_predict(**{**arguments, **changes})


def test_validation_comes_in_order():
    with pytest.raises(ValueError, match="model_name must be specified"):
        call(model_name=None, input_tensors=[])
    with pytest.raises(StatusError, match="1 input aliases for 0") as caught:
        call(input_tensors=[], output_types=[])
    assert caught.value.code == 3
    with pytest.raises(ValueError, match="1 output aliases for 2"):
        call(output_types=[torch.int64, torch.int64])


@pytest.mark.parametrize(
    ("key", "model", "old", "sent"),
    [
        ("ps:6", "movie_ctr:ps_6", "ps_6", "ps_6"),
        ("ps:6", "x", "", "x"),
        ("ps:6", "x", None, "x"),
        ("movie_ctr:ps_6", "movie_ctr:ps_6", "ps_6", "movie_ctr:ps_6"),
        ("dense:0", "movie_ctr:dense_0", "dense_0", "dense_0"),
    ],
)
def test_routes(recorders, key, model, old, sent):
    server = recorders()
    set_address_table({key: [server.address]})
    (out,) = call(model_name=model, old_model_name=old)
    assert out.tolist() == [1, 2]
    assert server.requests[0].model_spec.name == sent


def test_the_request_carries_signature_version_and_filter(recorders):
    server = recorders()
    set_address_table({"ps:6": [server.address]})
    call(signature_name="raw_lookup", model_version=0)
    call()
    first, second = server.requests
    assert first.model_spec.signature_name == "raw_lookup"
    assert first.model_spec.HasField("version")
    assert first.model_spec.version.value == 0
    assert list(first.output_filter) == ["a"]
    assert second.model_spec.WhichOneof("version_choice") is None
    assert second.model_spec.signature_name == "serving_default"


def test_outputs_come_in_the_order_asked_for_with_declared_dtypes(recorders):
    server = recorders(outputs={"x": tensor_to_proto([1.5]), "y": tensor_to_proto([b"s"])})
    set_address_table({"ps:6": [server.address]})
    y, x = call(output_tensor_alias=["y", "x"], output_types=[bytes, torch.float32])
    assert y.tolist() == [b"s"]
    assert x.tolist() == [1.5]
    with pytest.raises(StatusError, match="'z'") as caught:
        call(output_tensor_alias=["z"])
    assert caught.value.code == 13
    with pytest.raises(StatusError, match="declared"):
        call(output_tensor_alias=["x"], output_types=[torch.int64])


def test_an_unknown_key_and_a_key_without_addresses_are_unavailable():
    for table in ({}, {"ps:6": []}):
        set_address_table(table)
        with pytest.raises(StatusError, match=r"'ps_6'.*'lookup'") as caught:
            call(signature_name="lookup")
        assert caught.value.code == 14


def test_the_text_names_the_model_as_it_was_asked_for_too():
    set_address_table({"ps:0": []})
    with pytest.raises(StatusError, match=r"ps:6.*'ps_6' \('movie:ps_6'\), signature 'lookup'") as caught:
        remote_predict([], [], [], "movie:ps_6", 6, "ps_6", signature_name="lookup")
    assert caught.value.code == 14
    code, message, outputs = remote_predict_with_status(
        [], [], ["a", "b"], "", 3, "", fail_op_on_rpc_error=False, output_types=[torch.int32, bytes]
    )
    assert (code, "ps:3" in message) == (14, True)
    assert (outputs[0].shape, outputs[0].dtype, outputs[1].shape, outputs[1].item()) == ((), torch.int32, (), b"")


def test_failures_raise_with_their_code_or_become_zeros(recorders):
    server = recorders(code=grpc.StatusCode.FAILED_PRECONDITION)
    set_address_table({"ps:6": [server.address]})
    with pytest.raises(StatusError, match="on purpose") as caught:
        call()
    assert caught.value.code == 9
    zeros = call(fail_op_on_rpc_error=False, output_tensor_alias=["a", "b"], output_types=[torch.int32, bytes])
    assert zeros[0].shape == ()
    assert zeros[0].dtype == torch.int32
    assert zeros[1][()] == b""
    code, text, outputs = remote_predict_with_status(["a"], [[1]], ["a"], "", 6, "ps_6", -1, False, 60000)
    assert (code, len(outputs)) == (9, 1)
    assert "on purpose" in text


def test_the_deadline_is_enforced(recorders):
    server = recorders(waits=True)
    set_address_table({"ps:6": [server.address]})
    begin = time.monotonic()
    with pytest.raises(StatusError) as caught:
        call(max_rpc_deadline_millis=100)
    assert caught.value.code == 4
    assert time.monotonic() - begin < 60
    with request_deadline(0.05), pytest.raises(StatusError) as caught:
        call(max_rpc_deadline_millis=30000)
    assert caught.value.code == 4


def test_unavailable_addresses_are_passed_over_inside_the_deadline(recorders, refused):
    good = recorders()
    dead = [refused() for _ in range(2)]
    set_address_table({"ps:6": [*dead, good.address]})
    for _ in range(6):
        assert call()[0].tolist() == [1, 2]
    set_address_table({"ps:6": dead})
    with pytest.raises(StatusError) as caught:
        call()
    assert caught.value.code == 14
    set_address_table({"ps:6": [*dead, good.address]})
    codes = {
        remote_predict_with_status(["a"], [[1]], ["a"], "", 6, "ps_6", -1, False, 60000, retries=0)[0]
        for _ in range(50)
    }
    assert codes == {0, 14}


def test_other_failures_are_not_retried(recorders):
    bad, other = recorders(code=grpc.StatusCode.INTERNAL), recorders(code=grpc.StatusCode.INTERNAL)
    set_address_table({"ps:6": [bad.address, other.address]})
    with pytest.raises(StatusError):
        call()
    assert len(bad.requests) + len(other.requests) == 1


def test_shards_are_asked_side_by_side(recorders, refused):
    shards = [recorders(waits=True) for _ in range(3)]
    table = {f"m:ps_{number}": [shard.address] for number, shard in enumerate(shards)}
    table["m:ps_0"].insert(0, refused())  # skipped
    set_address_table(table)
    graphs = SubGraphs("m", dict.fromkeys(f"ps_{number}" for number in range(3)), 60000)
    asked = {f"ps_{number}": {"a": torch.tensor([number])} for number in range(3)}

    def release():
        eventually(lambda: len(shards[1].requests) == len(shards[2].requests) == 1, what="both to be asked")
        for shard in shards:
            shard.goes_on.set()

    thread = threading.Thread(target=release)
    thread.start()
    answers = graphs.call_all(asked, "lookup", ["a"], [torch.int64])
    thread.join(60)
    assert {name: value.tolist() for name, (value,) in answers.items()} == {"ps_0": [0], "ps_1": [1], "ps_2": [2]}
    assert graphs.call_all({}, "lookup", ["a"], [torch.int64]) == {}


def test_a_shard_that_fails_ends_the_wait_for_the_others(recorders):
    bad, slow = recorders(code=grpc.StatusCode.INTERNAL), recorders(waits=True)
    set_address_table({"m:ps_0": [bad.address], "m:ps_1": [slow.address]})
    graphs = SubGraphs("m", {"ps_0": None, "ps_1": None}, 60000)
    begin = time.monotonic()
    with pytest.raises(StatusError, match="on purpose"):
        graphs.call_all({"ps_0": {"a": [1]}, "ps_1": {"a": [1]}}, "lookup", ["a"], [torch.int64])
    assert time.monotonic() - begin < 50


def test_metrics_and_the_asynchronous_variant(recorders, metrics):
    server = recorders()
    set_address_table({"ps:6": [server.address]})
    result = remote_predict_async(["a"], [np.array([7])], ["a"], "", 6, "ps_6", max_rpc_deadline_millis=60000).result(
        100
    )
    assert result[0].tolist() == [7]
    tags = "model_name=|signature_name=serving_default"
    assert ("remote_predict_op_throughput", 1, tags) in metrics.counters
    assert {name for name, _, each in metrics.timers if each == tags} == {
        "serving_latency",
        "remote_predict_op_latency",
    }


# --- the address table ------------------------------------------------------------------------------------------------


def test_a_metric_that_somebody_else_has_is_not_kept_and_fails_nothing():
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    one, two = PrometheusSink(registry), PrometheusSink(registry)
    one.emit_counter("serving_thing", 1, "a=b")
    two.emit_counter("serving_thing", 5, "a=b")
    two.emit_store("serving.other", 7, "a=b|c=d")
    assert registry.get_sample_value("serving_thing_total", {"a": "b"}) == 1
    assert registry.get_sample_value("serving_other", {"a": "b", "c": "d"}) == 7


def test_api_version_follows_from_the_keys():
    assert api_version_of({"ps:7": []}) == 0
    assert api_version_of({"movie_ctr:ps_7": []}) == 1
    assert api_version_of({}) == 0


class Agent:
    """An agent whose addresses can be changed and whose port stays."""

    def __init__(self):
        self.addresses, self.port = {}, free_port()
        self.service = None

    def start(self):
        self.service = AgentService(
            AgentDataProvider(lambda: self.addresses), port=self.port, address=f"127.0.0.1:{self.port}"
        )
        self.service.start()

    def stop(self):
        self.service.stop(0)


def test_the_table_follows_the_agent_and_keeps_the_last_good_answer():
    agent = Agent()
    table = AgentHeartbeat(f"127.0.0.1:{agent.port}", interval_secs=1000)
    assert table.addresses == {}
    assert table.api_version == 0
    agent.addresses = {"m:ps_0": ["a:1"]}
    agent.start()
    try:
        eventually(lambda: table.refresh() or table.addresses, what="the agent's answer")
        assert table.addresses == {"m:ps_0": ["a:1"]}
        assert table.api_version == 1
        same = table.addresses
        table.refresh()
        assert table.addresses is same
    finally:
        agent.stop()
    table.refresh()
    assert table.addresses == {"m:ps_0": ["a:1"]}
    table.stop()


def test_the_background_thread_refreshes():
    agent = Agent()
    agent.start()
    table = AgentHeartbeat(f"127.0.0.1:{agent.port}", interval_secs=0.05)
    try:
        agent.addresses = {"ps:1": ["b:2"]}
        eventually(lambda: table.addresses == {"ps:1": ["b:2"]})
    finally:
        table.stop()
        agent.stop()


def test_a_missing_port2_is_a_configuration_error(monkeypatch):
    monkeypatch.delenv("PORT2", raising=False)
    with pytest.raises(ConfigError, match="PORT2"):
        AgentHeartbeat()


# --- the helper -------------------------------------------------------------------------------------------------------


class Named:
    def __init__(self, name):
        self.name = name


def test_the_helper_registers_a_signature_and_restores_the_structure(recorders):
    context = ExportContext()
    inputs = {"user:0": torch.tensor([1.0]), "item:0": torch.tensor([2.0])}
    with enter_export_mode(ExportMode.DISTRIBUTED, context):
        helper = RemotePredictHelper("gpu_remote_call", inputs, lambda x: {"sum": [x["user:0"] + x["item:0"]]})
    signature = context.signatures("dense_0")["gpu_remote_call"]
    assert sorted(signature.inputs) == ["item_0", "user_0"]
    (alias,) = signature.outputs
    server = recorders(outputs={alias: tensor_to_proto([3.0])})
    set_address_table({"m:ps_0": [], "m:dense_0": [server.address]})
    result = helper.call_remote_predict("m:dense_0", old_model_name="dense_0")
    assert result["sum"][0].tolist() == [3.0]
    assert sorted(server.requests[0].inputs) == ["item_0", "user_0"]
    assert server.requests[0].model_spec.signature_name == "gpu_remote_call"


def test_two_tensors_with_one_alias_are_an_assertion_error():
    with enter_export_mode(ExportMode.DISTRIBUTED), pytest.raises(AssertionError):
        RemotePredictHelper("f", {"a:0": torch.ones(1), "a_0": torch.ones(1)}, lambda x: x["a:0"])
