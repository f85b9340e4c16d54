"""The credentials that servers require, and where servers may listen."""

import hmac
import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSecurity:
    """The credentials that a server requires. With nothing set it accepts anyone, which is allowed on loopback only."""

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    """Clients must present a certificate signed by this CA."""
    tokens: dict[str, str] = field(default_factory=dict, repr=False)
    """identity -> bearer token; if any are set, calls without one of them are refused."""
    pushers: frozenset[str] | None = None
    """Identities (token names or certificate common names) that may push rows; None = every accepted one."""
    allow_insecure: bool = False
    """Allow listening beyond loopback without TLS or without tokens."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("server security: certificate and key must be given together")
        if self.client_ca is not None and self.certificate is None:
            raise ConfigError("server security: client_ca needs the server's certificate and key")

    @property
    def authenticates(self) -> bool:
        return bool(self.tokens) or self.client_ca is not None

    def check_bind(
        self,
        address: str,
        options: str = "--tls-cert, --tls-key, and --tokens or --tls-client-ca, or --allow-insecure "
        "(allow_insecure=True)",
    ) -> None:
        """Raise unless ``host:port`` is loopback, TLS and identities are both set, or it is explicitly allowed.

        Args:
            options: for the message, how the user can set them.
        """
        if self.allow_insecure or is_loopback(address) or (self.certificate is not None and self.authenticates):
            return
        raise ConfigError(
            f"refusing to listen on {address}: beyond loopback a server must have TLS (a certificate and its key) and "
            f"tokens or a client CA; set {options}, or listen on 127.0.0.1"
        )

    def identify(self, bearer: str, common_name: str = "") -> str | None:
        """The caller's identity: a token's name, a certificate's common name, or "" if nothing is required."""
        if not self.authenticates:
            return ""
        found = None
        for name, token in self.tokens.items():  # compare with all of them, so that the time taken reveals nothing
            if hmac.compare_digest(token.encode(), bearer.encode()):
                found = name
        if found is None and not self.tokens:
            found = common_name or None
        return found

    def may_push(self, identity: str) -> bool:
        return self.pushers is None or identity in self.pushers

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context for Python sockets; None without a certificate."""
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:  # includes errors of OpenSSL
            files = ", ".join(str(each) for each in (self.certificate, self.key, self.client_ca) if each is not None)
            raise ConfigError(f"cannot use {files} for TLS: {error.strerror or error}") from None
        return context


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of ``host:port`` or ``[v6]:port``."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ConfigError(
            f"an address must be host:port with a port up to 65535 (and [host]:port for IPv6), got {address!r}"
        )
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` can be reached only from this machine. True for Unix sockets."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def token_file(path: Path) -> dict[str, str]:
    """identity -> token from lines ``identity token``; the file should be readable by its owner only."""
    tokens = {}
    for number, line in enumerate(_token_text(path).splitlines(), 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) != 2:
            raise ConfigError(f"{path}:{number}: each line must be 'identity token'")
        tokens[parts[0]] = parts[1]
    return tokens


def bearer_token(path: Path) -> str:
    """The token that a client sends, from its file."""
    return _token_text(path).strip()


def _token_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read the token file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the token file {path} is not UTF-8 text: {error}") from None
