"""TLS and tokens for gRPC: the credentials that clients present, and ports that require them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, missing_extra
from shoal.observe.security import ServerSecurity, is_loopback, token_file  # noqa: F401  (token_file: for callers)

try:
    import grpc
except ImportError:
    raise missing_extra("grpcio", "server") from None

MAX_MESSAGE_BYTES = 2**31 - 1
PUSH_MESSAGE_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecurity:
    """A client's credentials: a CA to verify the server, its own certificate for mutual TLS, a bearer token."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: str = field(default="", repr=False)
    server_name: str = ""
    """Name that the server's certificate must have, if it is not the host name in the address."""
    allow_insecure: bool = False
    """Send the token to other machines even without TLS; anyone on the network path can read it."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("client security: certificate and key must be given together")

    @property
    def encrypts(self) -> bool:
        return self.ca is not None or self.certificate is not None

    def check_token(self, address: str) -> None:
        """Raise unless ``host:port`` may get the token: over TLS, on this machine, or explicitly allowed."""
        if not self.token or self.encrypts or self.allow_insecure or is_loopback(address):
            return
        raise ConfigError(
            f"refusing to send a token to {address} without TLS, because anyone on the network path could read it; set "
            "ca (--tls-ca), or pass allow_insecure=True (--allow-insecure)"
        )


_client_security: ClientSecurity | None = None


def set_client_security(security: ClientSecurity | None) -> None:
    """Set the credentials of this process's outgoing serving channels; ``None`` = plain channels."""
    global _client_security
    _client_security = security


def client_security() -> ClientSecurity | None:
    """The credentials that :func:`set_client_security` set."""
    return _client_security


def open_channel(address: str, max_bytes: int = MAX_MESSAGE_BYTES, security: ClientSecurity | None = None) -> Any:
    """A gRPC channel to ``address`` with ``security``, or with the credentials of :func:`set_client_security`.

    Raises:
        ConfigError: the token would leave this machine without TLS, and ``allow_insecure`` is not set.
    """
    security = security or _client_security
    if security is not None:
        security.check_token(address)
    options: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", max_bytes),
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.min_reconnect_backoff_ms", 5000),  # how long one connection attempt may take, including the handshake
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", 0),
    ]
    if security is None or not security.encrypts:
        channel = grpc.insecure_channel(address, options)
    else:
        read = {name: path and Path(path).read_bytes() for name, path in _files(security).items()}
        if security.server_name:
            options.append(("grpc.ssl_target_name_override", security.server_name))
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(**read), options)  # pyrefly: ignore
    if security is not None and security.token:
        channel = grpc.intercept_channel(channel, _AddToken(security.token))
    return channel


def _files(security: ClientSecurity) -> dict[str, Path | None]:
    return {
        "root_certificates": security.ca,
        "private_key": security.key,
        "certificate_chain": security.certificate,
    }


class _AddToken(grpc.UnaryUnaryClientInterceptor):
    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        details = _Details(client_call_details, [*(client_call_details.metadata or ()), self._header])
        return continuation(details, request)


class _Details(grpc.ClientCallDetails):
    def __init__(self, base: Any, metadata: list) -> None:
        self.method, self.timeout, self.metadata = base.method, base.timeout, metadata  # pyrefly: ignore
        self.credentials = base.credentials
        self.wait_for_ready, self.compression = base.wait_for_ready, base.compression


def caller(context: Any, security: ServerSecurity) -> str | None:
    """The identity of a gRPC call's caller; None if the call must be refused."""
    bearer = ""
    for key, value in context.invocation_metadata():
        if key == "authorization" and value.startswith("Bearer "):
            bearer = value[len("Bearer ") :]
    names = context.auth_context().get("x509_common_name", [])
    return security.identify(bearer, names[0].decode(errors="replace") if names else "")


def bind(server: Any, address: str, security: ServerSecurity) -> int:
    """Open the server's port with ``security``; returns the port."""
    security.check_bind(address)
    if hasattr(server, "bind"):  # the native front end, which handles TLS itself
        return server.bind(address)
    try:
        if security.certificate is None:
            port = server.add_insecure_port(address)
        else:
            pair = (Path(security.key).read_bytes(), Path(security.certificate).read_bytes())  # pyrefly: ignore
            roots = Path(security.client_ca).read_bytes() if security.client_ca else None
            port = server.add_secure_port(address, grpc.ssl_server_credentials([pair], roots, roots is not None))
    except RuntimeError:
        port = 0
    if not port:
        raise ConfigError(f"cannot listen on {address}: the address is in use or does not belong to this machine")
    return port
