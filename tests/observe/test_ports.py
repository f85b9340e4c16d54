"""What another machine can reach of every command: nothing by default, and with keys nothing without them."""

import json

import numpy as np
import pytest
import torch

from shoal.cli.main import COMMANDS, main
from shoal.serving import ExportMode, Feature, ModelExporter
from shoal.table import test_hash_table as make_table
from tests.certificates import make_certificates
from tests.observe.machines import HOME, Machines
from tests.observe.test_pages import CONFIG as UP

pytest.importorskip("zmq")
TRAIN = UP.partition("[servers]")[0]
JOIN = """
impressions = { from = "dir:impressions", key = "request" }
actions = { from = "dir:actions", key = "request", kind = "kind" }
labels.click.kinds = ["click"]
window = "5s"
state = "join-state"
out = "dir:samples"
"""
AGENT = "bzid b\nagent_version 3\nlayout_pattern blue\nzk_servers dir:registry\n"

# Commands that listen, with their arguments and the word that they print when ready.
ANSWERING = {
    "serve": ("grpc", ["serve", "model", "--port", 0, "--rest-port", 0, "--threads", 1, "--json"]),
    "ps": ("address", ["ps", "--durability", "log", "--dir", "ps", "--registry", "dir:members", "--json"]),
    "agent": ("grpc", ["agent", "--config", "agent.conf", "--json"]),
    "join": ("metrics", ["join", "join.toml", "--metrics-port", 0, "--json"]),
    "sync": (
        "metrics",
        ["sync", "--source", "SOURCE", "--model", "m", "--target", "127.0.0.1:2", "--metrics-port", 0, "--json"],
    ),
    "launch": ("metrics", ["launch", "-n", 2, "-m", "shoal", "train", "run.toml", "--json"]),
    "up": ('"up"', ["up", "online.toml", "--json"]),
}
# Commands that only ask, compute or write and then end; the ranks of `bench comm` are tested with `launch`.
NEVER = {"bench", "predict", "gather", "rollback", "export", "demo", "table", "top", "monitor", "plan"}


def test_every_command_is_tried_or_answers_nobody():
    assert ANSWERING.keys() | NEVER | {"train"} == COMMANDS.keys()  # `launch` is tested with the ranks of `train`


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the commands are started with."""
    made = tmp_path_factory.mktemp("ports")
    rng = np.random.default_rng(0)
    lines = [f"{rng.integers(2)},u{rng.integers(50)},i{rng.integers(50)}" for _ in range(500)]
    (made / "log.csv").write_text("\n".join(["click,user,item", *lines]))
    for name, text in (("run.toml", TRAIN), ("online.toml", UP), ("join.toml", JOIN), ("agent.conf", AGENT),
                       ("other.toml", JOIN.replace("join-state", "other-state"))):  # fmt: skip
        (made / name).write_text(text)
    for name in ("impressions", "actions", "samples"):
        (made / name).mkdir()
    table = make_table(1, name_suffix="t")
    table.assign(torch.arange(10), torch.ones(10, 1))
    exporter = ModelExporter(made / "model", model_name="m", net=Net(), features={"user": Feature(slot="u")})
    exporter.export([{"u": table}], global_step=1, mode=ExportMode.STANDALONE, timestamp=1)
    make_certificates(made, addresses=f"IP:{HOME},IP:127.0.0.1")
    (made / "tokens").write_text("prometheus s3cret\n")
    assert main(["ps", "keygen", "--out", str(made / "keys")]) == 0
    return made


class Net(torch.nn.Module):
    def forward(self, user):
        return {"score": user.sum(1)}


@pytest.fixture
def machines(folder):
    made = Machines(folder)
    yield made
    made.close()


# --- refusals ---------------------------------------------------------------------------------------------------------

BEYOND = {
    "serve": ["serve", "model", "--host", "0.0.0.0", "--port", 0],
    "serve, gRPC alone has keys": [
        "serve", "model", "--host", "0.0.0.0", "--port", 0, "--tls-cert", "server.pem", "--tls-key", "server.key",
    ],
    "serve, REST": ["serve", "model", "--port", 0, "--rest-port", 0, "--rest-host", "0.0.0.0"],
    "agent": ["agent", "--config", "agent.conf", "--host", "0.0.0.0"],
    "ps": ["ps", "--host", "0.0.0.0"],
    "ps, every address": ["ps", "--host", "*"],
    "ps, no address": ["ps", "--host", ""],
    "ps, IPv6": ["ps", "--host", "::"],
    "ps, page": ["ps", "--http-host", "0.0.0.0"],
    "ps, page, rows alone have keys": ["ps", "--http-host", "0.0.0.0", "--keys", "keys/server.key_secret"],
    "train": ["train", "run.toml", "--metrics", "0.0.0.0:0"],
    "join": ["join", "join.toml", "--metrics", "0.0.0.0:0"],
    "up": ["up", "open.toml"],
    "launch": ["launch", "-n", 1, "--nnodes", 2, "--rdzv-endpoint", "10.0.0.1:29400", "run.toml"],
}  # fmt: skip


@pytest.mark.parametrize("arguments", BEYOND.values(), ids=BEYOND)
def test_no_command_listens_beyond_this_machine_without_keys(arguments, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    (folder / "open.toml").write_text(UP + '[up]\npage = "0.0.0.0:0"\n')
    assert main([str(each) for each in arguments]) == 2
    said = capfd.readouterr().err
    assert "insecure" in said  # names the flag that allows it


# --- from another machine ---------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_another_machine_finds_no_port_of_any_command(machines):
    open_one = ["join", "other.toml", "--metrics", "0.0.0.0:0", "--allow-insecure", "--json"]
    started = {**ANSWERING, "open": ("metrics", open_one)}
    ready = machines.start([(name, wanted, arguments) for name, (wanted, arguments) in started.items()])
    assert len(machines.listening()) >= 15  # they listen locally
    assert machines.open_ports() == {port_of(ready["open"]["metrics"])}  # the open one is found


def port_of(address):
    return int(address.rpartition(":")[2])


WITH_KEYS = ["--tls-cert", "server.pem", "--tls-key", "server.key", "--tokens", "tokens"]
BEYOND_WITH_KEYS = {
    "serve": ("grpc", ["serve", "model", "--host", "0.0.0.0", "--port", 0, "--rest-port", 0, "--json", *WITH_KEYS]),
    "ps": (
        "address",
        ["ps", "--host", "0.0.0.0", "--http-host", "0.0.0.0", "--keys", "keys/server.key_secret", "--json", *WITH_KEYS],
    ),
    "agent": ("grpc", ["agent", "--config", "agent.conf", "--host", "0.0.0.0", "--json", *WITH_KEYS]),
    "join": ("metrics", ["join", "join.toml", "--metrics", "0.0.0.0:0", "--json", *WITH_KEYS]),
    "train": (
        "metrics",
        ["train", "run.toml", "--metrics", "0.0.0.0:0", "--json", "--set", "out.metrics_tls_cert=server.pem",
         "out.metrics_tls_key=server.key", "out.metrics_tokens=tokens"],
    ),
    "up": ('"up"', ["up", "keys.toml", "--json"]),
}  # fmt: skip

ASK = """
import http.client, json, ssl, sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
import grpc
from shoal.sharded import PsClient

host, ports, tokens = sys.argv[1], *map(json.loads, sys.argv[2:])
trusting = ssl.create_default_context()
trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
PATHS = ["/", "/metrics", "/status.json", "/targets.json", "/v1/models/m", "/v1/models/m/metadata"]
METHODS = ["PredictionService/Predict", "ModelService/GetModelStatus", "ModelService/HandleReloadConfigRequest"]

def http_answers(port, token):
    for connect in (lambda: http.client.HTTPConnection(host, port, timeout=20),
                    lambda: http.client.HTTPSConnection(host, port, timeout=20, context=trusting)):
        for path in PATHS:
            try:
                made = connect()
                made.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
                yield path, made.getresponse().status
            except (OSError, http.client.HTTPException):
                break  # nobody here speaks it

def grpc_answers(port, token):
    known = grpc.ssl_channel_credentials(open("ca.pem", "rb").read())
    for channel in (grpc.insecure_channel(f"{host}:{port}"), grpc.secure_channel(f"{host}:{port}", known)):
        for method in METHODS:
            try:
                channel.unary_unary(f"/tensorflow.serving.{method}")(
                    b"", timeout=60, metadata=[("authorization", f"Bearer {token}")] if token else [])
                yield method, "OK"
            except grpc.RpcError as error:
                yield method, error.code().name
                if error.code() == grpc.StatusCode.UNAVAILABLE:
                    break

def rows_answer(port):
    try:
        with PsClient([f"tcp://{host}:{port}"], deadline=timedelta(seconds=5)) as client:
            return client.info()
    except Exception:
        return None

def answers(asked):
    port, token = asked
    return [list(http_answers(port, token)), list(grpc_answers(port, token)), rows_answer(port)]

asked = [(port, token) for token in tokens for port in ports]
with ThreadPoolExecutor(len(asked)) as pool:
    told = list(pool.map(answers, asked))
print(json.dumps([told[i * len(ports):][:len(ports)] for i in range(len(tokens))]))
"""


@pytest.mark.timeout(600)
def test_what_listens_beyond_this_machine_with_keys_tells_nothing_to_those_without(machines, folder):
    page = '[up]\npage = "0.0.0.0:0"\ntls_cert = "server.pem"\ntls_key = "server.key"\ntokens = "tokens"\n'
    (folder / "keys.toml").write_text(TRAIN + page)
    machines.start([(name, wanted, arguments) for name, (wanted, arguments) in BEYOND_WITH_KEYS.items()])
    found = sorted(machines.open_ports())
    assert len(found) == 10  # gRPC and REST of a server; those of an agent and its own; rows and page; three pages
    strangers, known = machines.python(ASK, HOME, found, json.dumps(["", "s3cret"]))
    for port, (http, calls, rows) in zip(found, strangers, strict=True):
        assert {status for _, status in http} <= {400, 401}, port
        assert {code for _, code in calls} <= {"UNAUTHENTICATED", "UNAVAILABLE", "UNIMPLEMENTED"}, port
        assert rows is None, port
    assert any(["/metrics", 200] in http for http, _, _ in known)  # with a token they answer
    refused = {"UNAUTHENTICATED", "UNAVAILABLE", "UNIMPLEMENTED"}
    assert any(code not in refused for _, calls, _ in known for _, code in calls)
