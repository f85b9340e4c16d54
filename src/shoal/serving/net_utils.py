"""This machine's addresses, and checks whether other addresses answer."""

import ipaddress
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from enum import StrEnum

from shoal.observe.security import split_address


class AddressFamily(StrEnum):
    IPV4 = "ipv4"
    IPV6 = "ipv6"


def is_ipv6_address(ip: str) -> bool:
    """Whether ``ip`` is a literal IPv6 address without brackets."""
    try:
        return ipaddress.ip_address(ip).version == 6
    except ValueError:
        return False


def concat_ip_and_port(ip: str, port: int | str) -> str:
    """``ip:port``; an IPv6 address gets brackets."""
    return f"[{ip}]:{port}" if is_ipv6_address(ip) else f"{ip}:{port}"


def resolve(host: str, family: int) -> str | None:
    """A host name's first non-loopback address in a family, else its first address, else None."""
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)]
    except OSError:
        return None
    return next((ip for ip in found if not ip.startswith("127.") and ip != "::1"), found[0] if found else None)


def is_ipv4_supported() -> bool:
    """Whether this host's name resolves to an IPv4 address."""
    return resolve(socket.gethostname(), socket.AF_INET) is not None


def get_local_ip() -> str:
    """The address at which others reach this machine: ``MY_HOST_IP``, the resolved host name, or the outgoing address.

    Returns a loopback address only if there is no other.
    """
    if given := os.environ.get("MY_HOST_IP"):
        return given
    own = resolve(socket.gethostname(), socket.AF_INET) or resolve(socket.gethostname(), socket.AF_INET6)
    if own and not own.startswith("127.") and own != "::1":
        return own
    for family, outside in ((socket.AF_INET, "10.254.254.254"), (socket.AF_INET6, "2001:db8::1")):
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            try:
                probe.connect((outside, 9))  # connecting a datagram socket sends nothing
                ip = str(probe.getsockname()[0])
            except OSError:
                continue
            if not ip.startswith("127.") and ip not in ("::1", "0.0.0.0", "::"):
                return ip
    return own or "127.0.0.1"


def get_local_server_addr(port: int) -> str:
    """``ip:port`` by which others reach a port of this machine."""
    return concat_ip_and_port(get_local_ip(), port)


def find_free_port() -> int:
    """A port that was free a moment ago. Bind port 0 instead if you can."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def is_open(address: str, timeout: float = 1.0) -> bool:
    """Whether something accepts TCP connections at ``host:port``."""
    try:
        with closing(socket.create_connection(split_address(address), timeout)):
            return True
    except (OSError, ValueError):
        return False


def check_port_open(port: int) -> bool:
    """Whether something listens on a port of this machine."""
    return is_open(f"127.0.0.1:{port}") or is_open(f"[::1]:{port}")


class NodeAliveChecker:
    """Checks, once at construction, which of some addresses accept TCP connections."""

    def __init__(self, addrs: Sequence[str], timeout: float = 1, num_thread: int = 10) -> None:
        self._addrs = list(addrs)
        with ThreadPoolExecutor(max(1, num_thread)) as pool:
            answers = list(pool.map(lambda address: is_open(address, timeout), self._addrs))
        self._alive = dict(zip(self._addrs, answers, strict=True))

    def all_nodes_alive(self) -> bool:
        return all(self._alive.values())

    def get_dead_nodes(self) -> list[str]:
        return [address for address in self._addrs if not self._alive[address]]

    def get_alive_nodes(self) -> list[str]:
        return [address for address in self._addrs if self._alive[address]]

    def get_addrs(self) -> list[str]:
        return list(self._addrs)
