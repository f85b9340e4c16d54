"""Security flags that commands share."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """TLS and tokens of a port. Off loopback it needs TLS, and tokens or a client CA."""

    tls_cert: Path | None = None
    """The server's certificate chain (PEM)."""
    tls_key: Path | None = None
    """The server's private key (PEM)."""
    tls_client_ca: Path | None = None
    """CA (PEM) that must have signed the certificates of callers."""
    tokens: Path | None = None
    """File with lines 'identity token'; callers must send one of the tokens."""

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
    """TLS and tokens of a port, with a way to go without."""

    allow_insecure: bool = False
    """Listen off loopback even without TLS or tokens."""

    def build(self):  # pyrefly: ignore
        return super().build(allow_insecure=self.allow_insecure)


@dataclass(frozen=True, kw_only=True)
class ServeSecurity(Certificates):
    """TLS and tokens of a model server."""

    pusher: tuple[str, ...] = ()
    """Identities that are allowed to push rows; by default every accepted caller is."""
    allow_insecure: bool = False
    """Listen off loopback even without TLS or tokens."""

    def build(self):  # pyrefly: ignore
        return super().build(allow_insecure=self.allow_insecure, pushers=self.pusher)


@dataclass(frozen=True, kw_only=True)
class CallSecurity:
    """Credentials that this process presents to servers."""

    tls_ca: Path | None = None
    """CA (PEM) to verify servers' certificates with."""
    tls_cert: Path | None = None
    """Client certificate (PEM), if servers require one."""
    tls_key: Path | None = None
    """Its private key (PEM)."""
    token_file: Path | None = None
    """File with the bearer token."""
    server_name: str = ""
    """Name in the servers' certificates, if it differs from the address."""
    allow_insecure: bool = False
    """Send the token off loopback even without TLS."""

    def build(self):
        from shoal.observe.security import bearer_token
        from shoal.serving.security import ClientSecurity

        if not any((self.tls_ca, self.tls_cert, self.token_file)):
            return None
        return ClientSecurity(
            ca=self.tls_ca,
            certificate=self.tls_cert,
            key=self.tls_key,
            token=bearer_token(self.token_file) if self.token_file else "",
            server_name=self.server_name,
            allow_insecure=self.allow_insecure,
        )
