"""`shoal top`: metrics of real servers and of other processes, and processes that do not answer."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import shoal
from shoal.cli.main import main
from shoal.cli.top import discover, registered, url_of, view
from shoal.errors import ConfigError, DataError
from shoal.observe.scrape import Reading, Sample, Status, parse_metrics, quantile, rate, summarise


@contextlib.contextmanager
def endpoint(text, status=200):
    """Serves ``text()`` as /metrics; the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = text().encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


def once(capsys, *argv, code=0):
    assert main(["top", *argv, "--once", "--interval", "0.2", "--timeout", "60", "--json"]) == code
    return {status["address"]: status for status in json.loads(capsys.readouterr().out)}


def reading(text, at=0.0):
    return Reading(at=at, samples=parse_metrics(text))


def test_the_text_format_with_its_corners():
    text = """# HELP x y
# TYPE x counter
x 1
x_total{a="b",c="d \\"e\\" \\\\ \\n{},="} 2.5e3 1700000000000
nan_gauge NaN
inf{le="+Inf",} +Inf
"""
    samples = parse_metrics(text)
    assert samples[0] == Sample("x", {}, 1.0)
    assert samples[1] == Sample("x_total", {"a": "b", "c": 'd "e" \\ \n{},='}, 2500.0)
    assert samples[2].value != samples[2].value
    assert samples[3] == Sample("inf", {"le": "+Inf"}, float("inf"))
    assert parse_metrics("") == []
    assert parse_metrics("x 1\nsome nonsense here <<<") == [Sample("x", {}, 1.0)]
    with pytest.raises(DataError, match="not Prometheus metrics"):
        parse_metrics("<html>hello</html>")


def test_rates_and_quantiles_of_two_readings():
    assert rate(30.0, 10.0, 4.0) == 5.0
    assert rate(3.0, 10.0, 1.0) == 3.0  # the process was restarted
    assert rate(None, 1.0, 1.0) is None
    now, before = {0.1: 100.0, 1.0: 110.0, float("inf"): 110.0}, {0.1: 100.0, 1.0: 100.0, float("inf"): 100.0}
    assert quantile(now, before, 0.5) == 1.0  # of the ten new ones
    assert quantile(now, now, 0.5) == 0.1  # no new ones: of all
    assert quantile({}, {}, 0.5) is None


def test_any_trainers_metrics_are_understood():
    before = reading("shoal_train_samples_total 1000\nshoal_train_bad_rows_total 1\n", at=1.0)
    now = reading(
        "shoal_train_samples_total 5000\nshoal_train_bad_rows_total 3\nshoal_train_rows 77\nshoal_train_auc 0.75\n",
        at=3.0,
    )
    status = summarise("t", now, before)
    assert (status.kind, status.per_second, status.rows, status.errors) == ("train", 2000.0, 77.0, 3.0)
    assert status.errors_per_second == 1.0
    assert status.notes == {"auc": 0.75}
    other = summarise("x", reading("go_goroutines 7\n"), None)
    assert (other.kind, other.up, other.rows, other.per_second) == ("other", True, None, None)


def test_a_sync_process():
    text = (
        'parameter_sync_fid_count_total{{target="a"}} {n}\nparameter_sync_freshness_seconds_count {c}\n'
        "parameter_sync_freshness_seconds_sum {s}\nparameter_sync_replicas 2\n"
        'parameter_sync_waiting_rows{{target="b"}} 1200\n'
    )
    before, now = reading(text.format(n=100, c=10, s=50), 0.0), reading(text.format(n=300, c=12, s=51), 1.0)
    status = summarise("s", now, before)
    assert (status.kind, status.per_second, status.lag_s, status.staleness) == ("sync", 200.0, 0.5, "1,200 rows wait")


def test_real_servers_and_one_that_is_down(capsys):
    from shoal.serving import ModelServer
    from shoal.sharded import PsClient, ps_table
    from shoal.sharded.ps.server.engine import Engine
    from shoal.sharded.ps.server.server import ParameterServer
    from shoal.sharded.ps.server.shard import Shard

    ps = ParameterServer(Engine(Shard(0, 1)))
    ps.start()
    replica = ModelServer(rest_address="127.0.0.1:0")
    replica.start()
    try:
        table = shoal.HashTable(4, name="top_u").assign(torch.arange(10), torch.ones(10, 4))
        replica.serve_tables("live", {"u": table})
        with PsClient([ps.address]) as client:
            remote = ps_table(client, 4, name="item", optimizer="sgd", lr=1.0, initializer="zeros")
            remote.apply_gradients(torch.arange(123), torch.ones(123, 4), 0)
            remote.as_op()
            found = once(capsys, ps.http_address, f"127.0.0.1:{replica.rest_port}", "127.0.0.1:1", code=1)
    finally:
        replica.stop(0)
        ps.stop()
    of_ps, of_replica = found[ps.http_address], found[f"127.0.0.1:{replica.rest_port}"]
    assert (of_ps["kind"], of_ps["rows"], of_ps["errors"]) == ("ps", 123, 0)
    assert of_ps["p99_s"] is not None
    assert (of_replica["kind"], of_replica["rows"]) == ("serve", 10)
    assert found["127.0.0.1:1"]["up"] is False
    assert "refused" in found["127.0.0.1:1"]["why"]


def test_a_directory_of_files_is_read_again_and_again(tmp_path, capsys):
    with endpoint(lambda: "requests_total 5\nerrors_total 2\n") as address:
        (tmp_path / "ps-0.json").write_text(json.dumps({"shard": 0, "address": "x", "http": address}) + "\nlog line\n")
        (tmp_path / "half.json").write_text('{"http": "127.')
        (tmp_path / "empty").write_text("")
        assert discover(tmp_path) == [address]
        assert once(capsys, "--discover", str(tmp_path))[address]["errors"] == 2
    assert main(["top", "--discover", str(tmp_path / "absent"), "--once"]) == 2
    assert "there is no such directory" in capsys.readouterr().err


def test_replicas_of_a_registry(tmp_path):
    from shoal.serving import Container, ContainerServiceInfo, ZKBackend

    backend = ZKBackend("shoal", f"dir:{tmp_path}")
    backend.start()
    try:
        container = Container("shoal", "127.0.0.1:8500")
        backend.report_service_info(container, ContainerServiceInfo(grpc="127.0.0.1:8500", http="127.0.0.1:8501"))
        assert registered(f"dir:{tmp_path}", "shoal") == ["127.0.0.1:8501"]
    finally:
        backend.stop()


@pytest.mark.parametrize("argv", [["top", "--once", "--registry", "{}"], ["predict", "{}", "{}", "--model", "m"]])
def test_a_registry_that_does_not_exist_is_named_and_not_created(tmp_path, capsys, argv):
    address = f"dir:{tmp_path / 'typo'}"
    assert main([each.replace("{}", address, 1) if each == "{}" else each for each in argv]) == 2
    assert f"registry {address} does not exist" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(("status", "text", "why"), [(500, "x 1\n", "HTTP 500"), (200, "<html>", "not Prometheus")])
def test_an_endpoint_that_answers_nonsense_is_down(capsys, status, text, why):
    with endpoint(lambda: text, status) as address:
        found = once(capsys, address, code=1)[address]
    assert found["up"] is False
    assert why in found["why"]


def test_a_line_of_the_live_view_is_json_even_for_an_infinite_quantile(capsys, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    slow = 'shoal_ps_request_seconds_bucket{le="1"} 0\nshoal_ps_request_seconds_bucket{le="+Inf"} 5\n'
    monkeypatch.setattr("shoal.cli.top.time.sleep", interrupt)
    with endpoint(lambda: slow) as address:
        assert main(["top", address, "--json", "--timeout", "60"]) == 0

    def refuse(constant):
        raise AssertionError(f"JSON has no {constant}")

    (status,) = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert (status["kind"], status["p99_s"]) == ("ps", None)


def test_addresses():
    assert url_of("h:1") == "http://h:1/metrics"
    assert url_of("https://h:1/other") == "https://h:1/other"
    assert url_of("http://h:1/") == "http://h:1/metrics"
    with pytest.raises(ConfigError, match="host:port or an http"):
        url_of("file:///etc/passwd")


def test_the_table_for_people(capsys):
    from rich.console import Console

    statuses = [
        Status(address="a:1", kind="ps", up=True, rows=1_234_567.0, bytes=2.5e9, per_second=12.5, p99_s=0.0025,
               errors=3.0, errors_per_second=0.5, staleness="2 updates"),
        Status(address="b:2", why="connection refused"),
    ]  # fmt: skip
    Console(width=160).print(view(statuses))
    out = capsys.readouterr().out
    for text in ("1 up, 1 down", "1,234,567", "2.5 GB", "12.5", "2.5 ms", "3 (+0.5/s)", "connection refused"):
        assert text in out


def test_wrong_usage(capsys):
    assert main(["top"]) == 2
    assert "give the addresses" in capsys.readouterr().err
    assert main(["top", "a:1", "--interval", "0"]) == 2
    assert "must be > 0" in capsys.readouterr().err
