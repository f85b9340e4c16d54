"""Access to a parameter server: CURVE keys, and the check of addresses that other machines can reach."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, missing_extra


def zmq_module() -> Any:
    try:
        import zmq
    except ImportError:
        raise missing_extra("pyzmq", "server") from None
    return zmq


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """A server's key, and the clients that may connect.

    ``secret`` is a key file that `generate` wrote; ``clients`` is a folder with the public keys of allowed clients.
    Without it, every client that has the server's public key may connect.
    """

    secret: str | os.PathLike[str]
    clients: str | os.PathLike[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKeys:
    """A worker's key file, ``secret``, and the servers' public key file, ``server``."""

    secret: str | os.PathLike[str]
    server: str | os.PathLike[str]


def generate(folder: str | os.PathLike[str], name: str) -> tuple[str, str]:
    """Write ``<name>.key`` (public) and ``<name>.key_secret`` (mode 0600); returns their paths."""
    zmq_module()
    import zmq.auth

    if not name or Path(name).name != name:
        raise ConfigError(f"the name of a key must be a file name without a folder, got {name!r}")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for ending in ("key", "key_secret"):
        if (Path(folder) / f"{name}.{ending}").exists():
            raise ConfigError(f"{Path(folder) / name}.{ending} exists; remove it or choose another name")
    public, secret = zmq.auth.create_certificates(folder, name)
    os.chmod(secret, 0o600)
    return str(public), str(secret)


def load_keys(path: str | os.PathLike[str], *, secret: bool) -> tuple[bytes, bytes | None]:
    import zmq.auth

    try:
        public, private = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"key file {os.fspath(path)!r} cannot be read: {error}") from error
    if secret and private is None:
        raise ConfigError(f"key file {os.fspath(path)!r} holds no secret key; give the .key_secret file")
    return public, private


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_port(port: int, what: str) -> None:
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"{what} must be 0 (any free port) to 65535, got {port}")


def check_clients(keys: ServerKeys) -> None:
    """Raise if the folder of client keys is missing or empty: the server would silently refuse everyone."""
    if keys.clients is None:
        return
    if not any(Path(keys.clients).glob("*.key")):
        raise ConfigError(
            f"the clients folder {os.fspath(keys.clients)!r} has no public key (NAME.key), so nobody could connect"
        )


def check_bind(host: str, keys: ServerKeys | None, insecure: bool) -> None:
    """Raise for an address beyond loopback without keys, unless ``insecure`` is set."""
    if keys is None and not insecure and not is_loopback(host):
        raise ConfigError(
            f"binding to {host!r} without keys would let anyone on the network read and change the tables; make keys "
            "with `shoal ps keygen` and pass --keys, or pass --allow-insecure"
        )
