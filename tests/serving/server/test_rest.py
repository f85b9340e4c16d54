"""REST, metrics, health, and the status page in a real browser."""

import gzip
import http.client
import json
import re
import select
import socket
import threading
import time

import pytest
import torch

from shoal.errors import ConfigError
from shoal.serving import Feature, ModelExporter, ModelServer, ModelServerConfig, gen_model_config
from shoal.table import test_hash_table
from tests.observe.browser import Browser


@pytest.fixture
def served(tmp_path, net):
    table = test_hash_table(4, name_suffix="user")
    table.assign(torch.arange(10), torch.arange(40).float().reshape(10, 4))
    tool = ModelExporter(
        tmp_path, model_name="m", net=net, features={"user": Feature(slot="u")}, dense={"price": torch.zeros(2, 2)}
    )
    tool.export([{"u": table}], global_step=1, timestamp=7)
    config = ModelServerConfig()
    config.model_config_list.config.append(gen_model_config("m", str(tmp_path / "exported_models")))
    server = ModelServer(rest_address="127.0.0.1:0", config=config, poll_wait_seconds=0, max_message_bytes=100_000)
    server.start()
    server.serve_tables("live", {"u": table})
    yield server
    server.stop(0)


def ask(server, path, body=None, headers=None, raw=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.rest_port, timeout=60)
    data = raw if raw is not None else json.dumps(body).encode() if body is not None else None
    connection.request("POST" if data is not None else "GET", path, data, headers or {})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    kind = response.getheader("Content-Type", "")
    return response.status, json.loads(content) if kind == "application/json" else content


def test_rows_and_columns_give_the_same_scores(served, net):
    rows = [{"user": [1, 2], "price": [0.5, 1.0]}, {"user": [3, 3], "price": [0.0, 2.0]}]
    status, by_row = ask(served, "/v1/models/m:predict", {"signature_name": None, "instances": rows})
    assert status == 200
    columns = {"user": [[1, 2], [3, 3]], "price": [[0.5, 1.0], [0.0, 2.0]]}
    status, by_column = ask(
        served, "/v1/models/m/versions/7:predict", {"inputs": columns, "signature_name": "serving_default"}
    )
    assert by_row["predictions"] == by_column["outputs"]
    pooled = torch.tensor([[12.0, 14, 16, 18], [24.0, 26, 28, 30]])
    expected = net(user=pooled, price=torch.tensor(columns["price"]))["score"]
    assert torch.allclose(torch.tensor(by_row["predictions"]), expected, atol=1e-6)


def test_rows_with_different_numbers_of_ids_are_filled_up_with_the_padding(tmp_path, net):
    table = test_hash_table(4, name_suffix="user")
    table.assign(torch.arange(10), torch.arange(40).float().reshape(10, 4))
    features = {"user": Feature(slot="u", combiner="mean", padding=-1)}
    tool = ModelExporter(tmp_path, model_name="m", net=net, features=features, dense={"price": torch.zeros(2, 2)})
    tool.export([{"u": table}], global_step=1)
    config = ModelServerConfig()
    config.model_config_list.config.append(gen_model_config("m", str(tmp_path / "exported_models")))
    server = ModelServer(rest_address="127.0.0.1:0", config=config, poll_wait_seconds=0).start()
    try:
        rows = [{"user": [1, 2, 3], "price": [0.5, 1.0]}, {"user": [3], "price": [0.0, 2.0]}]
        rows.append({"user": [], "price": [1.0, 1.0]})
        status, together = ask(server, "/v1/models/m:predict", {"instances": rows})
        assert status == 200
        alone = [ask(server, "/v1/models/m:predict", {"instances": [row]})[1]["predictions"][0] for row in rows]
        assert together["predictions"] == pytest.approx(alone, abs=1e-6)
    finally:
        server.stop(0)


def test_a_signature_with_one_input_need_not_name_it(served):
    _, answer = ask(served, "/v1/models/live:predict", {"signature_name": "lookup", "instances": [1, 2]})
    assert answer == {"predictions": [[4, 5, 6, 7], [8, 9, 10, 11]]}
    _status, answer = ask(served, "/v1/models/live:predict", {"signature_name": "lookup", "inputs": {"u": [1]}})
    assert answer == {"outputs": [[4, 5, 6, 7]]}


def test_pushes_are_taken_over_rest_too(served):
    body = {
        "signature_name": "hashtable_assign",
        "inputs": {"MonolithHashTable_user_id": [99], "MonolithHashTable_user_value": [[1, 2, 3, 4]]},
    }
    assert ask(served, "/v1/models/live:predict", body) == (200, {"outputs": 1})
    assert ask(served, "/v1/models/live:predict", {"signature_name": "lookup", "instances": [99]})[1][
        "predictions"
    ] == [[1, 2, 3, 4]]


def test_models_are_named_with_their_sub_graph(served):
    served.serve_tables("movie:entry", {"u": test_hash_table(2, name_suffix="entry")})
    served.serve_tables("movie:ps_0", {"u": test_hash_table(2, name_suffix="ps")})
    for name in ("movie:entry", "movie:ps_0", "movie%3Aentry"):
        assert ask(served, f"/v1/models/{name}")[1]["model_version_status"][0]["state"] == "AVAILABLE"
        assert ask(served, f"/v1/models/{name}/versions/1/metadata")[1]["model_spec"]["version"] == "1"
        body = {"signature_name": "lookup", "instances": [7]}
        assert ask(served, f"/v1/models/{name}:predict", body) == (200, {"predictions": [[0, 0]]})


def test_outputs_without_a_row_per_instance_are_for_columns(served):
    tables = [test_hash_table(1, name_suffix=name) for name in ("a", "b")]
    served.serve_tables("two", tables)
    row = {f"{each.name}_id": 5 for each in tables} | {f"{each.name}_value": [1.0] for each in tables}
    status, answer = ask(
        served, "/v1/models/two:predict", {"signature_name": "hashtable_assign", "instances": [row, row]}
    )
    assert status == 400
    assert "inputs (columns)" in answer["error"]


def test_status_and_metadata(served):
    assert ask(served, "/v1/models/m")[1] == {
        "model_version_status": [
            {"version": "7", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        ]
    }
    assert ask(served, "/v1/models/m/versions/7")[0] == 200
    metadata = ask(served, "/v1/models/m/metadata")[1]
    assert metadata["model_spec"] == {"name": "m", "version": "7"}
    inputs = metadata["metadata"]["signature_def"]["signature_def"]["serving_default"]["inputs"]
    assert inputs["price"]["tensor_shape"] == {"dim": [{"size": "-1"}, {"size": "2"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/v1/models/none", None, 404, "has ['live', 'm']"),
        ("/v1/models/none:predict", {"instances": [1]}, 404, "none"),
        ("/v1/models/m/versions/8:predict", {"instances": [1]}, 404, "available versions are [7]"),
        ("/v1/models/m:predict", {"instances": []}, 400, "at least one row"),
        ("/v1/models/m:predict", {"instances": [1], "inputs": {}}, 400, "either instances"),
        ("/v1/models/m:predict", {"inputs": {"user": [[1]]}}, 400, "price"),
        ("/v1/models/m:predict", {"inputs": {"user": [["x"]], "price": [[1, 2]]}}, 400, "must be a tensor of int64"),
        ("/v1/models/m:predict", {"inputs": {"user": [[1.5]], "price": [[1, 2]]}}, 400, "fraction"),
        ("/v1/models/m:predict", {"inputs": {"user": [[2**63]], "price": [[1, 2]]}}, 400, "user"),
        (
            "/v1/models/m:predict",
            {"inputs": {"user": [[1], [1, 2]], "price": [[1, 2]]}},
            400,
            "rows must have equal lengths, got 1 to 2 values",
        ),
        ("/v1/models/m:predict", {"instances": [{"user": [1]}, {"price": [1]}]}, 400, "same keys"),
        ("/v1/models/m:predict", {"signature_name": "x", "instances": [1]}, 400, "no signature 'x'"),
        ("/v1/models/m:predict", {"signature_name": 5, "instances": [1]}, 400, "must be a string, got 5"),
        ("/v1/models/m:classify", {"instances": [1]}, 404, "predict"),
        ("/nothing", None, 404, "no route"),
        ("/v1/models/../../etc/passwd", None, 404, "no route"),
    ],
)
def test_wrong_requests_say_what_is_wrong(served, path, body, status, text):
    got, answer = ask(served, path, body)
    assert got == status
    assert text in answer["error"]


def test_bodies_are_bounded_also_when_packed(served):
    assert ask(served, "/v1/models/m:predict", raw=b"x" * 200_000)[0] == 413
    bomb = gzip.compress(b" " * 50_000_000)
    assert len(bomb) < 100_000
    assert ask(served, "/v1/models/m:predict", raw=bomb, headers={"Content-Encoding": "gzip"})[0] == 413
    packed = gzip.compress(json.dumps({"signature_name": "lookup", "instances": [1]}).encode())
    assert ask(served, "/v1/models/live:predict", raw=packed, headers={"Content-Encoding": "gzip"})[0] == 200
    assert ask(served, "/v1/models/m:predict", raw=b"{", headers={})[0] == 400
    status, answer = ask(served, "/v1/models/m:predict", raw=b"x", headers={"Content-Encoding": "br"})
    assert (status, answer["error"][:24]) == (400, "Content-Encoding must be")
    deep = b"[" * 50_000
    assert ask(served, "/v1/models/m:predict", raw=deep)[0] == 400


def test_a_client_that_is_refused_may_send_on_and_reads_the_answer(served):
    with socket.create_connection(("127.0.0.1", served.rest_port), timeout=60) as connection:
        connection.sendall(b"POST /v1/models/m:predict HTTP/1.1\r\nContent-Length: 200000\r\n\r\n")
        assert select.select([connection], [], [], 60)[0]  # it answers before it has read the body
        for _ in range(20):
            connection.sendall(b"x" * 10_000)
            time.sleep(0.005)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_the_end_of_a_request_is_never_in_doubt(served):
    body = json.dumps({"signature_name": "lookup", "instances": [1]}).encode()
    post, host = b"POST /v1/models/live:predict HTTP/1.1\r\n", b"Host: 127.0.0.1\r\n"
    right = b"Content-Length: %d\r\n" % len(body)

    def answers(request):
        with socket.create_connection(("127.0.0.1", served.rest_port), timeout=60) as connection:
            connection.sendall(request + b"GET /healthz HTTP/1.1\r\nConnection: close\r\n" + host + b"\r\n")
            received = b""
            while part := connection.recv(65536):
                received += part
        return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", received)]

    assert answers(post + host + right + b"\r\n" + body) == [200, 200]
    assert answers(b"GET /readyz HTTP/1.1\r\nContent-Length: 5\r\n" + host + b"\r\nhello") == [200]
    assert answers(b"GET /readyz HTTP/1.1\r\nContent-Length: 0\r\n" + host + b"\r\n") == [200, 200]
    assert answers(post + host + right + b"Content-Length: 1\r\n\r\n" + body) == [400]
    assert answers(post + host + right + b"Transfer-Encoding: chunked\r\n\r\n" + body) == [400]


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_both_ports_listen_on_ipv6_too():
    try:
        server = ModelServer("[::1]:0", "[::1]:0").start()
    except ConfigError:
        pytest.skip("no IPv6 loopback here")
    assert server.address == f"[::1]:{server.port}"
    connection = http.client.HTTPConnection("::1", server.rest_port, timeout=60)
    connection.request("GET", "/healthz")
    assert connection.getresponse().read() == b"ok\n"
    connection.close()
    server.stop(0)


def test_metrics_and_health(served):
    ask(served, "/v1/models/live:predict", {"signature_name": "lookup", "instances": [1]})
    status, text = ask(served, "/metrics")
    assert status == 200
    assert b'shoal_serving_latency_seconds_count{model_name="live",signature_name="lookup"}' in text
    assert ask(served, "/healthz") == (200, b"ok\n")
    status, snapshot = ask(served, "/status.json")
    assert {table["model"] for table in snapshot["tables"]} == {"m", "live"}
    assert snapshot["tables"][0]["rows"] == 10


@pytest.mark.timeout(600)
def test_the_page_shows_models_tables_and_traffic_in_a_browser(served, tmp_path):
    browser = Browser(tmp_path / "profile")
    done = threading.Event()

    def traffic():  # continues until the browser has started, because the page shows the last seconds
        while not done.wait(0.2):
            ask(served, "/v1/models/live:predict", {"signature_name": "lookup", "instances": [1]})

    asking = threading.Thread(target=traffic)
    asking.start()
    try:
        browser.open(f"http://127.0.0.1:{served.rest_port}/")
        for text in ("MonolithHashTable_user", "available", "serving_default", "requests per second", "live lookup"):
            browser.until(f"document.body.innerText.includes({json.dumps(text)})")
        assert "does not answer" not in browser.text()
    finally:
        done.set()
        asking.join(60)
        browser.close()
