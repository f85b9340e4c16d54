"""The access log, audit lines and rate limits of a model server."""

import json
import subprocess
import urllib.error
import urllib.request

import grpc
import pytest
import torch

from shoal import _core
from shoal.cli.main import main
from shoal.errors import ConfigError
from shoal.observe import audit
from shoal.observe.lines import AccessLog, stamp
from shoal.proto.serving.tf_serving_pb2 import ReloadConfigRequest
from shoal.serving import (
    ClientSecurity,
    ExportMode,
    Feature,
    ModelExporter,
    ModelServer,
    ModelServerConfig,
    ServerSecurity,
    StatusError,
    gen_model_config,
    set_address_table,
    set_client_security,
)
from shoal.table import test_hash_table
from shoal.testing.commands import Command
from tests.observe.test_tracing import CONTEXT, TRACE, Scale, predict
from tests.serving.helpers import eventually
from tests.serving.server.test_security import lookup, push


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_bucket_fills_at_its_rate_and_callers_have_their_own():
    rates = _core.Rates(5.0)
    assert [rates.admit("a") for _ in range(7)] == [True] * 5 + [False] * 2
    assert rates.admit("b")
    rates.set("trainer", 0.0)
    assert all(rates.admit("trainer") for _ in range(100))
    rates.set("slow", 0.5)
    assert [rates.admit("slow") for _ in range(2)] == [True, False]
    assert rates.refused == 3


def test_failed_requests_are_logged_up_to_a_bound_and_files_may_be_moved(tmp_path):
    log = AccessLog(tmp_path / "access.log", 0.5, max_failures=3)
    assert log.every == 2
    told = [log.may_log_failure() for _ in range(50)]
    assert 3 <= sum(told) <= 6  # a new second may begin meanwhile
    assert log.left_out == 50 - sum(told)
    log.write(1793491200.1239, 0.25, model="m", error="", rows=None)
    (tmp_path / "access.log").rename(tmp_path / "access.log.1")
    log.write(1793491200.0, 0.5, model="n")
    log.close()
    assert lines_of(tmp_path / "access.log.1") == [{"time": "2026-11-01T00:00:00.123Z", "seconds": 0.25, "model": "m"}]
    assert lines_of(tmp_path / "access.log")[0]["model"] == "n"
    assert stamp(0) == "1970-01-01T00:00:00.000Z"
    with pytest.raises(ConfigError, match="cannot write the log"):
        AccessLog(tmp_path / "no/such/folder", 0.5)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        AccessLog(tmp_path / "log", 1.5)


@pytest.mark.parametrize("flag", ["fast", "trainer=", "=-1", "a=b"])
def test_wrong_rates_are_told(flag, capsys, tmp_path):
    assert main(["serve", str(tmp_path), "--rate-limit", flag]) == 2
    assert "--rate-limit must be N or CALLER=N" in capsys.readouterr().err


@pytest.fixture
def exported(tmp_path):
    table = test_hash_table(1, name_suffix=tmp_path.name)
    table.assign(torch.arange(10), torch.ones(10, 1))
    tool = ModelExporter(tmp_path / "model", model_name="m", net=Scale(), features={"user": Feature(slot="u")})
    tool.export([{"u": table}], global_step=1, mode=ExportMode.STANDALONE, timestamp=1)
    return tmp_path / "model"


@pytest.mark.parametrize("front", ["native", "python"])
def test_requests_are_logged_whoever_answers_them(exported, tmp_path, front):
    log = tmp_path / "access.log"
    command = ["serve", exported, "--port", 0, "--rest-port", 0, "--threads", 1, "--front", front, "--json"]
    server = Command(*command, "--access-log", log, "--access-share", 1, stdout=subprocess.PIPE)
    try:
        ready = json.loads(server.stdout.readline())
        for _ in range(30):
            predict(ready["grpc"], [("traceparent", CONTEXT)], user=torch.tensor([[1], [2]]))
        with pytest.raises(grpc.RpcError):
            predict(ready["grpc"], wrong=torch.tensor([1]))
        body = json.dumps({"instances": [{"user": [1]}]}).encode()
        urllib.request.urlopen(f"http://{ready['rest']}/v1/models/m:predict", body, timeout=60).close()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://{ready['rest']}/v1/models/nobody:predict", body, timeout=60)
    finally:
        server.terminate()
        assert server.wait(60) == 0
        server.stdout.close()
    found = lines_of(log)
    assert len(found) == 33
    good = [each for each in found if each["code"] == 0]
    assert len(good) == 31
    assert all(each["model"] == "m" and each["signature"] == "serving_default" for each in good)
    assert all(each["peer"].startswith("ipv4:127.0.0.1:") and 0 < each["seconds"] < 60 for each in found)
    assert [each.get("trace") for each in good].count(TRACE) == 30
    bad = {each["code"]: each["error"] for each in found if each["code"]}
    assert "missing ['user'], unexpected ['wrong']" in bad[3]
    assert "there is no model 'nobody'" in bad[5]
    in_batches = [each for each in good if "rows" in each]
    assert all(each["rows"] == 2 for each in in_batches)
    assert bool(in_batches) == (front == "native" and _core.front_available())


def test_pushes_reloads_and_loads_are_audited_with_who_did_them(exported, tmp_path):
    lines = audit.to_file(tmp_path / "audit.log")
    config = ModelServerConfig()
    config.model_config_list.config.append(gen_model_config("x", str(exported / "exported_models")))
    security = ServerSecurity(tokens={"trainer": "t1", "reader": "t2"}, pushers=frozenset({"trainer"}))
    server = ModelServer("127.0.0.1:0", config=config, security=security).start()
    try:
        table = test_hash_table(2, name_suffix="audited")
        server.serve_tables("m", {"u": table})
        push(server, table, ClientSecurity(token="t1"))
        with pytest.raises(StatusError):
            push(server, table, ClientSecurity(token="t2"))
        lookup(server, ClientSecurity(token="t2"))
        request = ReloadConfigRequest(config=config)
        method = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"
        with grpc.insecure_channel(server.address) as channel:
            call = channel.unary_unary(method, request_serializer=ReloadConfigRequest.SerializeToString)
            call(request, timeout=60, metadata=[("authorization", "Bearer t1")])
            with pytest.raises(grpc.RpcError):
                call(request, timeout=60, metadata=[("authorization", "Bearer t2")])
    finally:
        set_client_security(None)
        set_address_table(None)
        server.stop(0)
        audit.end_file(lines)
    found = {each["event"]: each for each in lines_of(tmp_path / "audit.log")}
    assert found["load"]["version"] == 1
    pushed = found["push"]
    assert (pushed["who"], pushed["model"], pushed["rows"]) == ("trainer", "m", 1)
    assert pushed["peer"].startswith("ipv4:127.0.0.1:")
    assert found["push refused"]["who"] == "reader"
    assert "may not push" in found["push refused"]["error"]
    reloads = [each for each in lines_of(tmp_path / "audit.log") if each["event"] == "reload"]
    assert [each["who"] for each in reloads] == ["trainer", "reader"]
    assert reloads[0]["models"] == {"x": str(exported / "exported_models")}
    assert "may not change" in reloads[1]["error"]


@pytest.mark.parametrize("front", ["native", "python"])
def test_a_caller_that_asks_too_often_is_refused_and_others_are_not(front):
    security = ServerSecurity(tokens={"crawler": "t1", "shop": "t2"})
    limits = {"shop": 0.0}
    server = ModelServer(
        "127.0.0.1:0", "127.0.0.1:0", security=security, front=front, rate_limit=0.05, rate_limits=limits
    ).start()
    try:
        server.serve_tables("m", {"u": test_hash_table(2, name_suffix=f"rates_{front}")})
        refused = []
        for _ in range(20):
            try:
                lookup(server, ClientSecurity(token="t1"))
            except StatusError as error:
                refused.append(error)
        assert {each.code for each in refused} == {8}
        assert all("more requests per second than" in each.message for each in refused)
        assert len(refused) >= 10
        for _ in range(20):
            lookup(server, ClientSecurity(token="t2"))
        url = f"http://127.0.0.1:{server.rest_port}/status.json"

        def status(token):
            request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return answer.status
            except urllib.error.HTTPError as error:
                return error.code

        eventually(lambda: status("t1") == 429, what="REST to refuse, too")
        assert status("t2") == 200
        assert status("guess") in (401, 429)
        assert server.rates.refused >= len(refused)
    finally:
        set_client_security(None)
        set_address_table(None)
        server.stop(0)
