"""The native front end: batches without Python, other calls, overload, clients that misbehave."""

import contextlib
import gzip
import json
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shoal import _core
from shoal.errors import ConfigError
from shoal.serving import ModelServer, ServerSecurity
from shoal.serving.export.manifest import SignatureSpec, TensorSpec
from shoal.serving.predict import PREDICT, decode_response, encode_request, model_spec
from shoal.serving.server import admission
from shoal.serving.server.front import server as front_server
from shoal.serving.server.front.calls import Refused, _decompress
from shoal.serving.server.servable import Servable, Signature
from shoal.serving.tensors import decode_tensor, encode_tensor
from tests.serving.helpers import eventually

pytestmark = pytest.mark.skipif(not _core.front_available(), reason="the extension was built without nghttp2")
CODE = grpc.StatusCode
PREDICTION = "tensorflow.serving.PredictionService"


def request_of(values, name="m", outputs=(), signature="", alias="x", version=None):
    tensor = encode_tensor(torch.as_tensor(values, dtype=torch.float32))
    return encode_request(model_spec(name, signature, version), {alias: tensor}, outputs)


def outputs_of(answer):
    return {alias: decode_tensor(value) for alias, value in decode_response(answer)[1].items()}


class Doubling:
    """A model: y is twice x, z three times; it remembers its batches, and can be made to wait or to fail."""

    def __init__(self, factor=2.0):
        self.factor, self.sizes, self.fails = factor, [], False
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Semaphore(0)

    def __call__(self, inputs):
        self.sizes.append(len(inputs["x"]))
        self.inside.release()
        assert self.gate.wait(60)
        if self.fails:
            raise RuntimeError("on purpose")
        return {"y": inputs["x"] * self.factor, "z": inputs["x"] * 3}

    def servable(self):
        spec = {"x": TensorSpec("float", [None])}
        outputs = {"y": TensorSpec("float", [None]), "z": TensorSpec("float", [None])}
        signature = Signature(SignatureSpec(spec, outputs, True), self, batch=True, samples=True)
        return Servable({"serving_default": signature})


@pytest.fixture(scope="module")
def shared():
    """One server, its model and a channel, for tests that leave both as they are."""
    model = Doubling()
    server = ModelServer(rest_address="127.0.0.1:0", front="native", max_message_bytes=1 << 20).start()
    server.publish("m", model.servable())
    with grpc.insecure_channel(server.address) as channel:
        yield server, model, channel
    server.stop(0)


@pytest.fixture
def start():
    with ThreadPoolExecutor(16) as pool:
        made = []

        def make(model, **fields):
            server = ModelServer(front="native", **fields).start()
            server.publish("m", model.servable())
            channel = grpc.insecure_channel(server.address)
            made.append((server, channel))
            return server, channel.unary_unary(PREDICT), pool

        yield make
        for server, channel in made:
            channel.close()
            server.stop(0)


def fails(call, *arguments, **fields):
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, timeout=fields.pop("timeout", 60), **fields)
    return caught.value


# --- batches ----------------------------------------------------------------------------------------------------------


def test_requests_that_ask_alike_are_answered_in_batches_with_their_own_rows(shared):
    server, model, channel = shared
    call = channel.unary_unary(PREDICT)
    assert outputs_of(call(request_of([1.0, 2.0]), timeout=60))["y"].tolist() == [2.0, 4.0]  # creates the lane
    before = server._lanes.requests
    model.sizes.clear()
    asked = [[float(n)] * (n % 4) for n in range(300)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda values: call(request_of(values), timeout=60), asked))
    for values, answer in zip(asked, answers, strict=True):
        found = outputs_of(answer)
        assert found["y"].tolist() == [2 * value for value in values]
        assert found["z"].tolist() == [3 * value for value in values]
        spec = decode_response(answer)[0]
        assert (spec.name, spec.version.value, spec.signature_name) == ("m", 1, "serving_default")
    eventually(lambda: server._lanes.requests - before >= 290, what="batches to be counted")  # after their answers
    assert len(model.sizes) < 300
    only = outputs_of(call(request_of([1.0], outputs=["z"]), timeout=60))
    assert list(only) == ["z"]
    assert list(outputs_of(call(request_of([1.0], outputs=["z"]), timeout=60))) == ["z"]  # in a separate lane


def test_a_wrong_request_in_a_lane_fails_alone_and_says_why(shared):
    _, _, channel = shared
    call = channel.unary_unary(PREDICT)
    call(request_of([1.0]), timeout=60)
    good = [call.future(request_of([float(n)]), timeout=60) for n in range(20)]
    wrong = call.future(request_of([[1.0], [2.0]]), timeout=60)
    other = call.future(request_of([1.0], alias="nothing"), timeout=60)
    good += [call.future(request_of([float(n)]), timeout=60) for n in range(20, 40)]
    assert [outputs_of(each.result())["y"].tolist() for each in good] == [[2.0 * n] for n in range(40)]
    assert wrong.code() == CODE.INVALID_ARGUMENT
    assert "must have shape" in wrong.details()
    assert other.code() == CODE.INVALID_ARGUMENT
    assert "missing ['x']" in other.details()
    unknown = fails(call, request_of([1.0], outputs=["w"]))
    assert unknown.code() == CODE.INVALID_ARGUMENT
    assert fails(call, b"\xff\xff\xff").code() == CODE.INVALID_ARGUMENT
    assert fails(call, request_of([1.0], name="nobody")).code() == CODE.NOT_FOUND


def test_a_model_that_fails_fails_its_requests_and_nothing_else(start):
    model = Doubling()
    server, call, pool = start(model)
    call(request_of([1.0]), timeout=60)
    call(request_of([1.0]), timeout=60)
    model.fails = True
    codes = list(pool.map(lambda n: fails(call, request_of([float(n)])).code(), range(16)))
    assert set(codes) == {CODE.INTERNAL}
    model.fails = False
    assert outputs_of(call(request_of([3.0]), timeout=60))["y"].tolist() == [6.0]
    assert server.traffic.failed >= 16


def test_a_lane_follows_the_version_that_its_requests_ask_for(start):
    server, call, _ = start(Doubling())
    for _ in range(3):
        assert outputs_of(call(request_of([1.0]), timeout=60))["y"].tolist() == [2.0]
    server.publish("m", Doubling(7.0).servable(), 2)
    assert outputs_of(call(request_of([1.0]), timeout=60))["y"].tolist() == [7.0]
    assert outputs_of(call(request_of([1.0], version=1), timeout=60))["y"].tolist() == [2.0]
    assert decode_response(call(request_of([1.0]), timeout=60))[0].version.value == 2


def test_outputs_that_do_not_follow_the_rows_end_the_batches(start):
    class Sum(Doubling):
        def __call__(self, inputs):
            super().__call__(inputs)
            return {"y": inputs["x"].sum()[None], "z": inputs["x"]}

    model = Sum()
    _, call, pool = start(model)
    call(request_of([1.0]), timeout=60)
    values = [[float(n), 1.0] for n in range(64)]
    for _ in range(3):
        answers = pool.map(lambda each: outputs_of(call(request_of(each), timeout=60))["y"].tolist(), values)
        assert list(answers) == [[n + 1.0] for n in range(64)]


# --- requests that Python handles -------------------------------------------------------------------------------------


def test_health_reflection_and_methods_that_are_not_there(shared):
    server, _, channel = shared
    stub = health_pb2_grpc.HealthStub(channel)
    check = health_pb2.HealthCheckRequest
    for service in ("", PREDICTION):
        assert stub.Check(check(service=service), timeout=60).status == health_pb2.HealthCheckResponse.SERVING
    assert fails(stub.Check, check(service="nothing")).code() == CODE.NOT_FOUND
    watch = stub.Watch(check(service=PREDICTION), timeout=60)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest
    names = [asked(list_services=""), asked(file_containing_symbol=PREDICTION)]
    listed, file = reflect.ServerReflectionInfo(iter(names), timeout=60)
    assert PREDICTION in {each.name for each in listed.list_services_response.service}
    assert file.file_descriptor_response.file_descriptor_proto
    missing = fails(channel.unary_unary(f"/{PREDICTION}/Nothing"), b"")
    assert missing.code() == CODE.UNIMPLEMENTED
    eventually(lambda: not server._server._calls, what="the watch to end")


def test_compression_metadata_sizes_and_deadlines(shared):
    _, model, channel = shared
    call = channel.unary_unary(PREDICT)
    large = [1.0] * 20_000
    for kind in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        answer = call(request_of(large), timeout=60, compression=kind, metadata=(("a", "b"), ("c-bin", b"\0\xff")))
        assert outputs_of(answer)["y"].tolist() == [2.0] * 20_000
    bomb = channel.unary_unary(PREDICT)
    huge = fails(bomb, b"\0" * (50 << 20), compression=grpc.Compression.Gzip)
    assert huge.code() == CODE.RESOURCE_EXHAUSTED
    refused = fails(call, b"\0" * ((1 << 20) + 1))
    assert refused.code() == CODE.RESOURCE_EXHAUSTED
    assert "larger than max" in refused.details()
    model.gate.clear()
    try:
        late = fails(call, request_of([1.0]), timeout=0.2)
        assert late.code() == CODE.DEADLINE_EXCEEDED
        gone = call.future(request_of([1.0]), timeout=60)
        gone.cancel()
    finally:
        model.gate.set()
    assert outputs_of(call(request_of([5.0]), timeout=60))["y"].tolist() == [10.0]


def test_a_compressed_message_that_is_cut_off_is_not_called_too_large():
    packed = gzip.compress(b"x" * 1000)
    assert len(_decompress(packed, "gzip", 1000)) == 1000
    for cut in (5, 12, len(packed)):
        with pytest.raises(Refused, match="not valid gzip: it is cut off") as caught:
            _decompress(packed[:-cut], "gzip", 1 << 20)
        assert caught.value.code == 13
    with pytest.raises(Refused, match="at most 999 bytes"):
        _decompress(packed, "gzip", 999)


def test_a_lane_is_for_those_who_show_a_token():
    server = ModelServer(front="native", security=ServerSecurity(tokens={"a": "secret", "b": "other"})).start()
    server.publish("m", Doubling().servable())
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(PREDICT)
        for token in ("secret", "other", "secret"):
            good = (("authorization", f"Bearer {token}"),)
            assert outputs_of(call(request_of([1.0]), timeout=60, metadata=good))["y"].tolist() == [2.0]
        for bad in ((), (("authorization", "Bearer wrong"),), (("authorization", "secret"),)):
            assert fails(call, request_of([1.0]), metadata=bad).code() == CODE.UNAUTHENTICATED
    server.stop(0)


def test_which_front_end_serves(monkeypatch, caplog):
    assert front_server.chosen_front("python", ServerSecurity()) == "python"
    monkeypatch.delenv("SHOAL_FRONT", raising=False)
    assert front_server.chosen_front("auto", ServerSecurity()) == "native"
    monkeypatch.setenv("SHOAL_FRONT", "python")
    assert front_server.chosen_front("auto", ServerSecurity()) == "python"
    assert front_server.chosen_front("native", ServerSecurity()) == "native"
    monkeypatch.delenv("SHOAL_FRONT")
    with pytest.raises(ConfigError, match="must be auto, native or python"):
        front_server.chosen_front("fast", ServerSecurity())
    monkeypatch.setattr(front_server, "why_not_native", lambda security: "it was built without nghttp2")
    assert front_server.chosen_front("auto", ServerSecurity()) == "python"
    assert "built without nghttp2" in caplog.text
    with pytest.raises(ConfigError, match="built without nghttp2"):
        front_server.chosen_front("native", ServerSecurity())


def test_a_port_that_is_taken_and_a_unix_socket(tmp_path):
    with pytest.raises(ConfigError, match="cannot listen"):
        ModelServer("256.1.1.1:0", front="native", security=ServerSecurity(allow_insecure=True))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
        ModelServer(f"127.0.0.1:{taken.getsockname()[1]}", front="native")
    address = f"unix:{tmp_path}/s"
    for _ in range(2):
        server = ModelServer(address, front="native").start()
        server.publish("m", Doubling().servable())
        with grpc.insecure_channel(address) as channel:
            assert outputs_of(channel.unary_unary(PREDICT)(request_of([1.0]), timeout=60))["y"].tolist() == [2.0]
        server.stop(0)
    assert not (tmp_path / "s").exists()


# --- overload ---------------------------------------------------------------------------------------------------------


def test_too_many_requests_are_refused_and_readiness_follows(monkeypatch):
    monkeypatch.setattr(admission, "BUSY_SECS", 0.2)
    monkeypatch.setattr(admission, "REST_SECS", 60.0)
    model = Doubling()
    server = ModelServer(rest_address="127.0.0.1:0", front="native", max_waiting=100, model_limits={"m": 4}).start()
    server.publish("m", model.servable())
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(PREDICT)
        call(request_of([1.0]), timeout=60)
        call(request_of([1.0]), timeout=60)
        stub, check = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest

        def health(service):
            return stub.Check(check(service=service), timeout=60).status

        model.gate.clear()
        while model.inside.acquire(blocking=False):
            pass
        asked = [call.future(request_of([1.0]), timeout=60)]
        assert model.inside.acquire(timeout=60)  # one runs

        def overload():
            asked.extend(call.future(request_of([1.0]), timeout=60) for _ in range(20))
            eventually(lambda: sum(not each.done() for each in asked) <= 24, what="refusals")  # 4 wait, 4 batches run
            return health(PREDICTION) == health_pb2.HealthCheckResponse.NOT_SERVING

        eventually(overload, what="health to follow")
        refused = [each for each in asked if each.done()]
        assert {each.code() for each in refused} == {CODE.RESOURCE_EXHAUSTED}
        assert "try again later" in refused[0].details()
        assert health("") == health_pb2.HealthCheckResponse.SERVING  # alive
        with pytest.raises(urllib.error.HTTPError) as not_ready:
            urllib.request.urlopen(f"http://127.0.0.1:{server.rest_port}/readyz", timeout=60)
        not_ready.value.close()
        assert not_ready.value.code == 503
        assert server.admission.refused >= len(refused)
        monkeypatch.setattr(admission, "REST_SECS", 0.2)
        model.gate.set()
        failures = [each.exception() for each in asked]  # waits for all; the last ones are refused only now
        answered = [each for each, failure in zip(asked, failures, strict=True) if failure is None]
        assert {each.code() for each in asked if each not in answered} == {CODE.RESOURCE_EXHAUSTED}
        assert answered
        assert all(outputs_of(each.result())["y"].tolist() == [2.0] for each in answered)
        eventually(lambda: health(PREDICTION) == health_pb2.HealthCheckResponse.SERVING, what="health to come back")
        url = f"http://127.0.0.1:{server.rest_port}"
        assert urllib.request.urlopen(f"{url}/readyz", timeout=60).read() == b"ready\n"
        assert b"shoal_serving_overload_refused_total" in urllib.request.urlopen(f"{url}/metrics", timeout=60).read()
    server.stop(0)


def test_rest_says_429_where_grpc_says_resource_exhausted():
    model = Doubling()
    server = ModelServer(rest_address="127.0.0.1:0", model_limits={"m": 1}).start()
    server.publish("m", model.servable())
    body = json.dumps({"inputs": {"x": [1.0]}}).encode()
    url = f"http://127.0.0.1:{server.rest_port}/v1/models/m:predict"
    model.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: urllib.request.urlopen(url, body, timeout=60).read())
        assert model.inside.acquire(timeout=60)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url, body, timeout=60)
        caught.value.close()
        assert (caught.value.code, caught.value.headers["Retry-After"]) == (429, "1")
        model.gate.set()
        assert json.loads(first.result())["outputs"]["y"] == [2.0]
    server.stop(0)


def test_limits_are_checked():
    with pytest.raises(ConfigError, match="at least 1"):
        ModelServer(max_waiting=0)
    with pytest.raises(ConfigError, match="at least 1"):
        ModelServer(model_limits={"m": 0})


# --- other clients, and the end ---------------------------------------------------------------------------------------


class RawClient:
    """HTTP/2 by hand."""

    def __init__(self, port, window=None):
        import h2.config
        import h2.connection

        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.h2.initiate_connection()
        if window is not None:
            self.h2.update_settings({4: window})  # SETTINGS_INITIAL_WINDOW_SIZE
        self.flush()

    def flush(self):
        self.socket.sendall(self.h2.data_to_send())

    def ask(self, path, message, **headers):
        stream = self.h2.get_next_available_stream_id()
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
        fields |= {"content-type": "application/grpc"} | {key.replace("_", "-"): text for key, text in headers.items()}
        self.h2.send_headers(stream, list(fields.items()))
        if message is not None:
            framed = b"\0" + len(message).to_bytes(4, "big") + message
            for begin in range(0, len(framed), 16_384):
                last = begin + 16_384 >= len(framed)
                self.h2.send_data(stream, framed[begin : begin + 16_384], end_stream=last)
        self.flush()
        return stream

    def events(self):
        """What comes next, as long as something comes."""
        while data := self.socket.recv(65536):
            for event in self.h2.receive_data(data):
                if hasattr(event, "flow_controlled_length") and event.flow_controlled_length:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                yield event
            self.flush()

    def until(self, name, stream):
        seen = []
        for event in self.events():
            seen.append(event)
            if type(event).__name__ == name and getattr(event, "stream_id", stream) == stream:
                return seen
        raise AssertionError(f"the connection ended before {name}: {seen}")


def status_of(events):
    headers = [pair for event in events for pair in getattr(event, "headers", None) or ()]
    return dict(headers).get("grpc-status")


def test_small_windows_resets_and_pings_of_a_raw_client(shared):
    pytest.importorskip("h2")
    server, _, _ = shared
    client = RawClient(server.port, window=1000)
    large = client.ask(PREDICT, request_of([1.0] * 15_000))
    events = client.until("StreamEnded", large)
    body = b"".join(event.data for event in events if type(event).__name__ == "DataReceived")
    assert status_of(events) == "0"
    assert outputs_of(body[5:])["y"].tolist() == [2.0] * 15_000
    reset = client.ask(PREDICT, None)
    client.h2.send_data(reset, b"\0\0\0\0")
    client.h2.reset_stream(reset)
    client.h2.ping(b"12345678")
    client.flush()
    assert any(type(event).__name__ == "PingAckReceived" for event in client.until("PingAckReceived", 0))
    for message, headers, code in (
        (b"\1\2", {}, "3"),
        (b"", {"grpc_timeout": "soon"}, "13"),
        (None, {}, "13"),
    ):
        stream = client.ask(PREDICT, message, **headers)
        if message is None:
            client.h2.send_data(stream, b"", end_stream=True)
            client.flush()
        assert status_of(client.until("StreamEnded", stream)) == code
    assert status_of(client.until("StreamEnded", client.ask("/a/B", b""))) == "12"
    client.socket.close()


def test_a_stop_tells_clients_to_go_and_answers_what_was_asked():
    pytest.importorskip("h2")
    model = Doubling()
    server = ModelServer(front="native").start()
    server.publish("m", model.servable())
    model.gate.clear()
    idle = RawClient(server.port)
    with grpc.insecure_channel(server.address) as channel, contextlib.closing(idle.socket):
        running = channel.unary_unary(PREDICT).future(request_of([4.0]), timeout=60)
        assert model.inside.acquire(timeout=60)
        stopping = threading.Thread(target=server.stop, args=(60,))
        stopping.start()
        assert idle.until("ConnectionTerminated", 0)
        assert not running.done()
        model.gate.set()
        assert outputs_of(running.result())["y"].tolist() == [8.0]
        stopping.join(60)
        assert not stopping.is_alive()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_h2load_is_answered(shared, tmp_path):
    if shutil.which("h2load") is None:
        pytest.skip("no h2load here; `make packages` installs Debian's nghttp2-client as root")
    server, _, _ = shared
    body = request_of([1.0])
    (tmp_path / "body").write_bytes(b"\0" + len(body).to_bytes(4, "big") + body)
    command = ["h2load", "-n", "400", "-c", "8", "-m", "10", "-d", f"{tmp_path}/body"]
    command += [
        "-H",
        "content-type: application/grpc",
        "-H",
        "te: trailers",
        f"http://127.0.0.1:{server.port}{PREDICT}",
    ]
    got = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "400 succeeded, 0 failed" in got.stdout
