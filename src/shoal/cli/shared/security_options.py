"""The security flags that commands share."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """What callers of a port must show. Beyond this machine it must have TLS, and tokens or a client CA."""

    tls_cert: Path | None = None
    """The server's certificate chain (PEM)."""
    tls_key: Path | None = None
    """Its private key (PEM)."""
    tls_client_ca: Path | None = None
    """Callers must show a certificate that this CA signed."""
    tokens: Path | None = None
    """File of lines 'identity token'; calls must carry one of the tokens."""

    def build(self, *, allow_insecure: bool = False, pushers: tuple[str, ...] = ()):
        from shoal.observe.security import ServerSecurity, token_file

        return ServerSecurity(
            certificate=self.tls_cert,
            key=self.tls_key,
            client_ca=self.tls_client_ca,
            tokens=token_file(self.tokens) if self.tokens else {},
            pushers=frozenset(pushers) if pushers else None,
            allow_insecure=allow_insecure,
        )


@dataclass(frozen=True, kw_only=True)
class PortSecurity(Certificates):
    """The same, with a way around."""

    allow_insecure: bool = False
    """Listen off loopback without TLS or tokens all the same."""

    def build(self):  # pyrefly: ignore
        return super().build(allow_insecure=self.allow_insecure)


@dataclass(frozen=True, kw_only=True)
class ServeSecurity(Certificates):
    """What callers must show."""

    pusher: tuple[str, ...] = ()
    """Identities that may push rows; without any, every accepted caller may."""
    allow_insecure: bool = False
    """Listen off loopback without TLS or tokens all the same."""

    def build(self):  # pyrefly: ignore
        return super().build(allow_insecure=self.allow_insecure, pushers=self.pusher)


@dataclass(frozen=True, kw_only=True)
class CallSecurity:
    """What this process shows to servers."""

    tls_ca: Path | None = None
    """CA that servers' certificates are checked by (PEM)."""
    tls_cert: Path | None = None
    """Own certificate, where servers want one."""
    tls_key: Path | None = None
    token_file: Path | None = None
    """File that holds the bearer token."""
    server_name: str = ""
    """Name that servers' certificates carry, when it is not the one dialled."""
    allow_insecure: bool = False
    """Send the token off loopback without TLS all the same."""

    def build(self):
        from shoal.serving.security import ClientSecurity

        if not any((self.tls_ca, self.tls_cert, self.token_file)):
            return None
        return ClientSecurity(
            ca=self.tls_ca,
            certificate=self.tls_cert,
            key=self.tls_key,
            token=self.token_file.read_text().strip() if self.token_file else "",
            server_name=self.server_name,
            allow_insecure=self.allow_insecure,
        )
