"""Traces: the context of requests, without an SDK and with a real one that sends to a receiver on loopback."""

import gzip
import json
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
import torch

from shoal.errors import ConfigError
from shoal.observe import tracing
from shoal.observe.tracing import Span, begin, current, inside, received, start_exporting, together, trace_id
from shoal.serving import ExportMode, Feature, ModelExporter
from shoal.serving.predict import PREDICT, encode_request, model_spec
from shoal.serving.tensors import encode_tensor
from shoal.table import test_hash_table
from shoal.testing.commands import Command

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONTEXT = f"00-{TRACE}-{PARENT}-01"


def test_the_context_of_a_request_is_read_and_a_broken_one_is_left_alone():
    assert received([("x", "y"), ("traceparent", CONTEXT)]) == (("traceparent", CONTEXT),)
    with_state = received([("tracestate", "a=1"), ("traceparent", CONTEXT)])
    assert with_state == (("traceparent", CONTEXT), ("tracestate", "a=1"))
    assert trace_id(with_state) == TRACE
    assert received([("traceparent", f"01-{TRACE}-{PARENT}-00-more")])  # a later version may have more fields
    for wrong in (
        "", "nonsense", CONTEXT.upper(), f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01", f"{CONTEXT}-more", CONTEXT[:-1],
    ):  # fmt: skip
        assert received([("traceparent", wrong)]) == ()
    assert received([("traceparent", CONTEXT), ("tracestate", "a" * 1000)]) == (("traceparent", CONTEXT),)


def test_without_an_sdk_the_context_is_passed_on_as_it_came():
    headers = received([("traceparent", CONTEXT)])
    assert current() == ()
    with inside(begin("work", "SERVER", headers)) as span:
        assert current() == headers
        with together("batch", [(), headers, (("traceparent", f"00-{'a' * 32}-{PARENT}-01"),)]):
            assert current() == headers  # of the first request that has one
        span.finish(13, "it failed")
    assert current() == ()
    with inside(Span(None, ())):
        assert current() == ()


def test_the_api_without_an_sdk_is_as_no_api(monkeypatch):
    monkeypatch.setattr(tracing, "trace", None)
    test_without_an_sdk_the_context_is_passed_on_as_it_came()
    assert not tracing.recording()


@pytest.mark.parametrize(("endpoint", "share", "why"), [("localhost:4318", 1, "URL"), ("http://h:1", 2, "from 0 to 1")])
def test_wrong_settings_are_told(endpoint, share, why):
    with pytest.raises(ConfigError, match=why):
        start_exporting(endpoint, "me", share)


# --- processes --------------------------------------------------------------------------------------------------------


class Receiver:
    """An OTLP receiver over HTTP."""

    def __init__(self):
        proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        pytest.importorskip("opentelemetry.sdk")
        self.spans = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler):
                data = handler.rfile.read(int(handler.headers["Content-Length"]))
                if handler.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)
                request = proto.ExportTraceServiceRequest.FromString(data)
                for resource in request.resource_spans:
                    named = {each.key: each.value.string_value for each in resource.resource.attributes}
                    service = named["service.name"]
                    self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
                handler.send_response(200)
                handler.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def of(self, trace):
        return [(service, span) for service, span in list(self.spans) if span.trace_id.hex() == trace]

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)


@pytest.fixture
def receiver():
    made = Receiver()
    yield made
    made.close()


class Scale(torch.nn.Module):
    def forward(self, user):
        return {"score": user.sum(1)}


def export(path, mode):
    shards = []
    for shard in range(2 if mode == ExportMode.DISTRIBUTED else 1):
        table = test_hash_table(1, name_suffix=f"{path.name}{shard}")
        table.assign(torch.arange(10), torch.ones(10, 1))
        shards.append({"u": table})
    tool = ModelExporter(path, model_name="m", net=Scale(), features={"user": Feature(slot="u")})
    tool.export(shards, global_step=1, mode=mode, timestamp=1)


def serve(path, *flags):
    command = ["serve", path, "--port", 0, "--rest-port", 0, "--threads", 1, "--json", *flags]
    server = Command(*command, stdout=subprocess.PIPE)
    return server, json.loads(server.stdout.readline())


def stop(server):
    server.terminate()
    assert server.wait(60) == 0
    server.stdout.close()


CLIENT = textwrap.dedent("""
    import sys
    from opentelemetry import trace
    from shoal.observe.tracing import start_exporting
    from shoal.serving import Client

    provider = start_exporting(sys.argv[1], "shop", 1.0)
    with Client(sys.argv[2], model="m") as client, trace.get_tracer("shop").start_as_current_span("checkout") as span:
        print(client.predict({"user": [[3], [4]]}, deadline=60)["score"].tolist(), file=sys.stderr)
    provider.shutdown()
    print(f"{span.get_span_context().trace_id:032x}")
""")


@pytest.mark.parametrize("front", ["native", "python"])
def test_one_trace_goes_from_a_client_through_the_entry_to_all_shards(tmp_path, receiver, front):
    export(tmp_path, ExportMode.DISTRIBUTED)
    server, ready = serve(tmp_path, "--front", front, "--trace", receiver.url, "--trace-share", 0)
    try:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, receiver.url, ready["grpc"]], capture_output=True, text=True, timeout=250
        )
        assert done.returncode == 0, done.stderr
    finally:
        stop(server)  # which sends its last spans
    spans = receiver.of(done.stdout.strip())
    by_id = {span.span_id: (service, span) for service, span in spans}
    above = {
        (service, span.name): by_id.get(span.parent_span_id, ("", None))[1] for service, span in spans
    }  # fmt: skip
    assert above["shop", "checkout"] is None
    assert above["shop", "predict m"].name == "checkout"
    entry = next(s for _, s in spans if s.name == "Predict" and _value(s, "shoal.model") == "m")
    assert by_id[entry.parent_span_id][0] == "shop"
    asked = [span for _, span in spans if "signature 'raw_lookup'" in span.name or "signature 'lookup'" in span.name]
    assert len(asked) == 2  # at the same time, one for each shard
    for call in asked:
        answer = next(s for _, s in spans if s.parent_span_id == call.span_id)
        assert _value(answer, "shoal.model") in ("m:ps_0", "m:ps_1")
        assert call.start_time_unix_nano <= answer.start_time_unix_nano <= answer.end_time_unix_nano


def _value(span, key):
    return next((each.value.string_value for each in span.attributes if each.key == key), None)


def predict(address, headers=(), **inputs):
    payload = encode_request(model_spec("m", "", None), {key: encode_tensor(each) for key, each in inputs.items()}, ())
    with grpc.insecure_channel(address) as channel:
        return channel.unary_unary(PREDICT)(payload, timeout=60, metadata=headers)


@pytest.mark.parametrize("front", ["native", "python"])
def test_single_requests_are_spans_also_where_they_are_answered_in_batches(tmp_path, receiver, front):
    export(tmp_path, ExportMode.STANDALONE)
    server, ready = serve(tmp_path, "--front", front, "--trace", receiver.url, "--trace-share", 0)
    ids = torch.tensor([[1]])
    try:
        for _ in range(20):  # from then on the native front end answers
            predict(ready["grpc"], user=ids)
        for _ in range(5):
            predict(ready["grpc"], [("traceparent", CONTEXT)], user=ids)
        with pytest.raises(grpc.RpcError) as wrong:
            predict(ready["grpc"], [("traceparent", CONTEXT)], wrong=ids)
        assert wrong.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        body = json.dumps({"instances": [{"user": [1]}]}).encode()
        request = urllib.request.Request(
            f"http://{ready['rest']}/v1/models/m:predict", body, {"Traceparent": CONTEXT.replace(PARENT, "1" * 16)}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer) == {"predictions": [1.0]}
        predict(ready["grpc"], [("traceparent", CONTEXT[:-1] + "0")], user=ids)  # the caller does not record it
    finally:
        stop(server)
    parents = defaultdict(list)
    for _, span in receiver.spans:
        parents[span.parent_span_id.hex()].append(span)
    served = [each for each in parents[PARENT] if each.name == "Predict"]
    assert len(served) == 6
    assert sorted(each.status.code for each in served) == [0] * 5 + [2]
    assert all(each.start_time_unix_nano < each.end_time_unix_nano for each in served)
    assert [each.name for each in parents["1" * 16]] == ["Predict"]
    assert {each.trace_id.hex() for _, each in receiver.spans} == {TRACE}  # no other trace was started


def test_traces_begin_at_the_server_as_often_as_asked_for(tmp_path, receiver):
    export(tmp_path, ExportMode.STANDALONE)
    server, ready = serve(tmp_path, "--trace", receiver.url, "--trace-share", 1)
    try:
        for _ in range(30):
            predict(ready["grpc"], user=torch.tensor([[1]]))
        time.sleep(0.6)  # the front end is polled twice a second
    finally:
        stop(server)
    assert sum(span.name == "Predict" for _, span in receiver.spans) == 30
