"""TLS, tokens, the right to push, and the addresses that servers may listen on."""

import ssl
import urllib.error
import urllib.request

import grpc
import pytest
import torch

from shoal.errors import ConfigError
from shoal.serving import (
    AgentConfig,
    AgentDataProvider,
    AgentService,
    ClientConfig,
    ClientSecurity,
    ModelServer,
    ServerSecurity,
    StatusError,
    parameter_sync_client_from_config,
    remote_predict,
    set_address_table,
    set_client_security,
)
from shoal.serving.security import is_loopback, token_file
from shoal.table import test_hash_table
from tests.certificates import make_certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A CA, a server certificate for localhost and a client certificate, made by openssl."""
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def serve():
    made = []

    def start(**fields):
        server = ModelServer(**fields).start()
        made.append(server)
        table = test_hash_table(2, name_suffix=f"t{len(made)}")
        server.serve_tables("m", {"u": table})
        return server, table

    yield start
    set_client_security(None)
    for server in made:
        server.stop(0)


def lookup(server, security=None):
    set_client_security(security)
    set_address_table({"m": [f"127.0.0.1:{server.port}"], "x:ps": []})
    return remote_predict(
        ["u"], [torch.tensor([1])], ["u"], "m", 0, None, max_rpc_deadline_millis=60000, signature_name="lookup"
    )


def push(server, table, security=None):
    set_client_security(security)
    values = [torch.tensor([1]), torch.ones(1, 2)]
    set_address_table({"m": [f"127.0.0.1:{server.port}"], "x:ps": []})
    return remote_predict([f"{table.name}_id", f"{table.name}_value"], values, [f"{table.name}_result"], "m", 0, None,
                          max_rpc_deadline_millis=60000, signature_name="hashtable_assign")  # fmt: skip


def code_of(call, *arguments):
    with pytest.raises(StatusError) as caught:
        call(*arguments)
    return grpc.StatusCode((caught.value.code, _name(caught.value.code)))


def _name(code):
    return next(each.value[1] for each in grpc.StatusCode if each.value[0] == code)


def test_loopback_is_recognised():
    assert all(map(is_loopback, ("127.0.0.1:0", "127.9.9.9:1", "[::1]:5", "localhost:5", "unix:/x")))
    assert not any(map(is_loopback, ("0.0.0.0:0", "[::]:5", "10.0.0.1:5", "example.org:5")))


def test_off_loopback_without_security_is_refused_unless_asked_for_by_name(certificates):
    with pytest.raises(ConfigError, match="allow_insecure"):
        ModelServer("0.0.0.0:0")
    with pytest.raises(ConfigError, match="allow_insecure"):
        ModelServer("0.0.0.0:0", security=ServerSecurity(tokens={"a": "b"}))
    ModelServer("0.0.0.0:0", security=ServerSecurity(allow_insecure=True)).stop(0)
    secure = ServerSecurity(certificate=certificates / "server.pem", key=certificates / "server.key", tokens={"a": "b"})
    ModelServer("0.0.0.0:0", security=secure).stop(0)
    with pytest.raises(ConfigError, match="allow_insecure"):
        ModelServer(rest_address="0.0.0.0:0").start()
    with pytest.raises(ConfigError, match="must be given together"):
        ServerSecurity(certificate=certificates / "server.pem")


def test_a_taken_port_is_a_configuration_error(serve):
    server, _ = serve()
    with pytest.raises((ConfigError, RuntimeError)):
        ModelServer(f"127.0.0.1:{server.port}")


def test_tokens_are_demanded_and_pushing_is_for_pushers(serve):
    security = ServerSecurity(tokens={"reader": "r-secret", "trainer": "t-secret"}, pushers=frozenset({"trainer"}))
    server, table = serve(security=security, rest_address="127.0.0.1:0")
    assert code_of(lookup, server) == grpc.StatusCode.UNAUTHENTICATED
    assert code_of(lookup, server, ClientSecurity(token="wrong")) == grpc.StatusCode.UNAUTHENTICATED
    assert lookup(server, ClientSecurity(token="r-secret"))[0].shape == (1, 2)
    assert code_of(push, server, table, ClientSecurity(token="r-secret")) == grpc.StatusCode.PERMISSION_DENIED
    assert push(server, table, ClientSecurity(token="t-secret"))[0].item() == 1
    url = f"http://127.0.0.1:{server.rest_port}/v1/models/m"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, timeout=60)
    assert caught.value.code == 401
    caught.value.close()
    request = urllib.request.Request(url, headers={"Authorization": "Bearer r-secret"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
    assert "secret" not in repr(security)


def test_tls_protects_grpc_and_rest(serve, certificates):
    security = ServerSecurity(certificate=certificates / "server.pem", key=certificates / "server.key")
    server, _ = serve(security=security, rest_address="127.0.0.1:0")
    assert lookup(server, ClientSecurity(ca=certificates / "ca.pem"))[0].shape == (1, 2)
    assert code_of(lookup, server) == grpc.StatusCode.UNAVAILABLE
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    with urllib.request.urlopen(f"https://127.0.0.1:{server.rest_port}/healthz", context=context, timeout=60) as answer:
        assert answer.read() == b"ok\n"
    with pytest.raises((urllib.error.URLError, OSError)):
        urllib.request.urlopen(f"http://127.0.0.1:{server.rest_port}/healthz", timeout=60)


def test_client_certificates_are_identities(serve, certificates):
    security = ServerSecurity(
        certificate=certificates / "server.pem", key=certificates / "server.key", client_ca=certificates / "ca.pem",
        pushers=frozenset({"trainer"}),
    )  # fmt: skip
    server, table = serve(security=security)
    assert code_of(lookup, server, ClientSecurity(ca=certificates / "ca.pem")) == grpc.StatusCode.UNAVAILABLE
    own = {"ca": certificates / "ca.pem"}
    trainer = ClientSecurity(certificate=certificates / "trainer.pem", key=certificates / "trainer.key", **own)
    other = ClientSecurity(certificate=certificates / "server.pem", key=certificates / "server.key", **own)
    assert push(server, table, trainer)[0].item() == 1
    assert code_of(push, server, table, other) == grpc.StatusCode.PERMISSION_DENIED


def test_sync_rounds_carry_the_token(serve):
    server, replica = serve(security=ServerSecurity(tokens={"trainer": "t"}))
    handle = parameter_sync_client_from_config()
    table = test_hash_table(2, name_suffix="trained", sync_client=handle)
    replica.name = table.name
    server.serve_tables("m", {"u": replica})
    table.apply_gradients(torch.tensor([3]), torch.ones(1, 2))
    config = ClientConfig(model_name="m", signature_name="hashtable_assign", targets=[f"127.0.0.1:{server.port}"])
    config.timeout_in_ms = 60_000
    assert handle.sync(config).responses[0].status_code == 16
    handle.manager.try_replace([])
    set_client_security(ClientSecurity(token="t"))
    assert handle.sync(config).responses[0].status_code == 0
    assert replica.lookup(torch.tensor([3])).tolist() == [[-1.0, -1.0]]


def test_an_agent_demands_tokens_too():
    security = ServerSecurity(tokens={"a": "x"})
    service = AgentService(AgentDataProvider(dict), AgentConfig(), 0, address="127.0.0.1:0", security=security).start()
    from shoal.serving import HeartBeatRequest, HeartBeatResponse

    with grpc.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        path = "/monolith.serving.agent_service.AgentService/HeartBeat"
        call = channel.unary_unary(path, HeartBeatRequest.SerializeToString, HeartBeatResponse.FromString)
        with pytest.raises(grpc.RpcError) as caught:
            call(HeartBeatRequest(), timeout=60)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert call(HeartBeatRequest(), timeout=60, metadata=[("authorization", "Bearer x")]) is not None
    service.stop(0)


def test_token_files_are_lines_of_identity_and_token(tmp_path):
    (tmp_path / "tokens").write_text("# comment\ntrainer abc\n\nreader def\n")
    assert token_file(tmp_path / "tokens") == {"trainer": "abc", "reader": "def"}
    (tmp_path / "tokens").write_text("only-one\n")
    with pytest.raises(ConfigError, match="identity token"):
        token_file(tmp_path / "tokens")
