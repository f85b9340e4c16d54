"""Sockets that a server listens on, by address: ``host:port``, ``[v6]:port`` or ``unix:path``."""

import contextlib
import os
import socket
from pathlib import Path

from shoal.errors import ConfigError
from shoal.observe.security import split_address


def open_sockets(address: str) -> tuple[list[socket.socket], int]:
    """Bind sockets to an address without listening yet; returns them and their port. Port 0 picks a free one.

    Raises:
        ConfigError: the address is in use or does not belong to this machine.
    """
    opened: list[socket.socket] = []
    try:
        if address.startswith("unix:"):
            opened.append(_open_unix(address.removeprefix("unix:").removeprefix("//")))
            return opened, 1  # as gRPC counts
        host, port = split_address(address)
        for family, _, _, _, where in socket.getaddrinfo(
            host or None, port, 0, socket.SOCK_STREAM, 0, socket.AI_PASSIVE
        ):
            if opened and not port:  # a name's other address families use the first one's port
                where = (where[0], opened[0].getsockname()[1], *where[2:])
            try:
                opened.append(_open(family, where))
            except OSError:
                if not opened:
                    raise
        return opened, opened[0].getsockname()[1]
    except OSError as error:
        for each in opened:
            each.close()
        raise ConfigError(f"cannot listen on {address}: {error.strerror or error}") from None


def _open(family: int, where: tuple) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if where[0] == "::" else 1)
        made.bind(where)
        made.setblocking(False)
        return made
    except OSError:
        made.close()
        raise


def _open_unix(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    try:
        try:
            made.bind(path)
        except OSError:
            if not _is_abandoned(path):
                raise
            os.unlink(path)
            made.bind(path)
        made.setblocking(False)
        return made
    except OSError:
        made.close()
        raise


def _is_abandoned(path: str) -> bool:
    """Whether a socket file was left by a server that no longer runs."""
    if not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def remove_unix(address: str) -> None:
    """Remove the file of a closed Unix socket."""
    if address.startswith("unix:"):
        with contextlib.suppress(OSError):
            os.unlink(address.removeprefix("unix:").removeprefix("//"))
