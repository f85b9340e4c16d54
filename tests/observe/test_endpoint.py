"""The HTTP port of a process: its answers, its callers, and the addresses that it may listen on."""

import base64
import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.observe.endpoint import HttpPort, Shown
from shoal.observe.page import chart, page, pill, table, tile
from shoal.observe.security import ServerSecurity
from tests.certificates import make_certificates

pytest.importorskip("prometheus_client")


class Lamp(Shown):
    """A process that is on or off."""

    counters = ("clicks",)
    on = True

    def status(self):
        return {"on": self.on, "brightness": float("nan")}

    def figures(self):
        return {"clicks": 3, "brightness": 0.5}

    def health(self):
        return self.on, "application/json", b'{"secret": "detail"}'

    def ready(self):
        return "" if self.on else "it is dark"

    def page(self):
        return page(
            "Lamp", state=pill("on", "good"), tiles=[tile("clicks", 3)], charts=[chart("light", {"b": "brightness"})],
            tables=[table("Bulbs", ["name", ("watts", "n")], [["left", 4]])],
        )  # fmt: skip


@pytest.fixture
def lamp():
    shown = Lamp()
    port = HttpPort("127.0.0.1:0", shown).start()
    yield shown, port
    port.stop()


def get(url, *, headers=None, context=None):
    """(status, headers, body)"""
    request = urllib.request.Request(url, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_page_values_metrics_and_health(lamp):
    shown, port = lamp
    status, headers, body = get(port.url)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert b"<script>" in body
    found = json.loads(get(f"{port.url}status.json")[2])
    assert (found["on"], found["brightness"], found["errors"]) == (True, None, [])
    drawn = json.loads(get(f"{port.url}page.json?span=day")[2])
    assert drawn["page"]["title"] == "Lamp"
    assert drawn["history"]["times"] == []
    assert b"# TYPE" in get(f"{port.url}metrics")[2]
    assert get(f"{port.url}healthz")[2] == b'{"secret": "detail"}'
    assert get(f"{port.url}readyz")[0] == 200
    shown.on = False
    assert get(f"{port.url}healthz")[0] == 503
    assert get(f"{port.url}readyz")[0] == 503
    status, _, body = get(f"{port.url}nowhere")
    assert status == 404
    assert "/status.json" in json.loads(body)["error"]


def test_errors_of_a_page_are_told_and_do_not_end_the_port(lamp):
    shown, port = lamp
    shown.page = lambda: 1 / 0
    status, _, body = get(f"{port.url}page.json")
    assert (status, json.loads(body)["error"]) == (500, "division by zero")
    assert get(f"{port.url}status.json")[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example"])
def test_a_web_page_that_has_its_name_resolve_to_this_machine_reads_nothing(lamp, host):
    for path in ("", "status.json", "metrics"):
        assert get(f"{lamp[1].url}{path}", headers={"Host": host})[0] == 403
    assert get(f"{lamp[1].url}healthz", headers={"Host": host})[2] == b"ok\n"


@pytest.mark.parametrize("host", ["localhost", "localhost:99", "127.0.0.1:1", "[::1]:5", "10.0.0.1", "app.localhost"])
def test_names_of_this_machine_are_fine(lamp, host):
    assert get(f"{lamp[1].url}status.json", headers={"Host": host})[0] == 200


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:0", "box.example:0"])
def test_off_loopback_it_needs_tls_and_identities(address, tmp_path):
    with pytest.raises(ConfigError, match="refusing to listen"):
        HttpPort(address, Lamp())
    with pytest.raises(ConfigError, match="refusing to listen"):
        HttpPort(address, Lamp(), ServerSecurity(tokens={"me": "secret"}))


def test_tokens_are_asked_for_and_a_browser_may_send_one_as_password(tmp_path):
    made = make_certificates(tmp_path)
    security = ServerSecurity(certificate=made / "server.pem", key=made / "server.key", tokens={"me": "secret"})
    port = HttpPort("0.0.0.0:0", Lamp(), security).start()
    try:
        url = f"https://127.0.0.1:{port.port}/"
        trusts = ssl.create_default_context(cafile=made / "ca.pem")
        status, headers, _ = get(url, context=trusts)
        assert status == 401
        assert headers.get_all("WWW-Authenticate")[1].startswith("Basic")
        assert get(f"{url}healthz", context=trusts)[2] == b"ok\n"  # only that it is alive
        basic = base64.b64encode(b"anyone:secret").decode()
        for given in ("Bearer secret", f"Basic {basic}"):
            assert get(url, headers={"Authorization": given}, context=trusts)[0] == 200
            assert get(f"{url}healthz", headers={"Authorization": given}, context=trusts)[2] == b'{"secret": "detail"}'
        for given in ("Bearer wrong", "Basic wrong", "Basic " + base64.b64encode(b"secret:wrong").decode(), "secret"):
            assert get(f"{url}metrics", headers={"Authorization": given}, context=trusts)[0] == 401
        with pytest.raises(OSError):  # it accepts only TLS
            urllib.request.urlopen(f"http://127.0.0.1:{port.port}/healthz", timeout=60)
    finally:
        port.stop()


def test_files_that_are_no_certificates_are_named(tmp_path):
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("not a certificate")
    with pytest.raises(ConfigError, match=r"wrong\.pem"):
        HttpPort("127.0.0.1:0", Lamp(), ServerSecurity(certificate=wrong, key=wrong))
    with pytest.raises(ConfigError, match=r"missing\.pem"):
        HttpPort("127.0.0.1:0", Lamp(), ServerSecurity(certificate=Path(tmp_path / "missing.pem"), key=wrong))
