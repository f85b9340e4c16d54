"""`Network`: hosts as network namespaces, joined by a switch that can drop, delay and repeat packets.

Each host has an address, ``lo`` and one interface; commands started on it see nothing else. Their frames go through
this process, so that a test can partition two hosts, or delay or duplicate their packets; the rest is the kernel's own
network. Needs root and ``ip`` (Debian's iproute2).

    with Network("a", "b") as network:
        server = subprocess.Popen(network["a"].command("shoal", "ps", "--host", network["a"].address, ...))
        network.cut("a", "b")
        network.heal()
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from shoal.errors import UnsupportedError

T = TypeVar("T")

_numbers = itertools.count()
_ETH_P_ALL = 3
_SIOCETHTOOL = 0x8946
# Transmit checksums, GSO, TSO, GRO: frames are as on a wire.
_OFFLOADS = (0x00000017, 0x00000024, 0x0000001F, 0x0000002C)
_FRAME_BYTES = 1 << 16
_NETNS = "/run/netns"


def network_unavailable() -> str | None:
    """Why `Network` cannot be used here; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip`; install iproute2"
    tried = subprocess.run(["ip", "netns", "add", f"shoal-try-{os.getpid()}"], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces cannot be created ({tried.stderr.strip()})"
    subprocess.run(["ip", "netns", "del", f"shoal-try-{os.getpid()}"], capture_output=True)
    return None


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace."""

    name: str
    space: str
    address: str

    def command(self, *words: object) -> list[str]:
        """Return the command line that runs ``words`` on this host, with the same process id."""
        return ["nsenter", f"--net={_NETNS}/{self.space}", "--", *map(str, words)]


@dataclass(slots=True)
class Link:
    """The faults of frames from one host to another."""

    cut: bool = False
    delay_s: float = 0.0
    jitter_s: float = 0.0
    repeat: float = 0.0
    """The share of frames that arrive twice."""
    drop: float = 0.0


@dataclass(slots=True)
class Counts:
    """Frames so far."""

    passed: int = 0
    dropped: int = 0
    repeated: int = 0
    delayed: int = 0


class Network:
    """Hosts by name, with addresses 10.77.N.1, .2, ….

    Args:
        seed: random seed for drops, repeats and delays.
    """

    def __init__(self, *names: str, seed: int = 0) -> None:
        if why := network_unavailable():
            raise UnsupportedError(why)
        number = next(_numbers)
        base = f"shoal-{os.getpid()}-{number}"
        net = (os.getpid() * 7 + number) % 250
        self._spaces = [f"{base}-switch"]
        self.hosts: dict[str, Host] = {}
        self.counts = Counts()
        self._rng = random.Random(seed)
        self._links: dict[tuple[str, str], Link] = {}
        self._later: list[tuple[float, int, str, bytes]] = []
        self._order = itertools.count()
        self._ended = threading.Event()
        self._sockets: dict[str, socket.socket] = {}
        self._of_mac: dict[bytes, str] = {}
        try:
            _ip("netns", "add", self._spaces[0])
            for place, name in enumerate(names, start=1):
                self._add(name, f"{base}-{name}", f"10.77.{net}.{place}", place)
            self._in_space(self._spaces[0], self._listen)
        except BaseException:
            self._remove()
            raise
        self._thread = threading.Thread(target=self._pass, name="shoal-switch", daemon=True)
        self._thread.start()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    # --- faults -------------------------------------------------------------------------------------------------------

    def link(self, one: str, other: str) -> Link:
        """Return the faults of frames from one host to another, whose fields you can change."""
        return self._links[one, other]

    def cut(self, one: str, *others: str) -> None:
        """Silently drop all frames between a host and others (default: all), in both directions."""
        for other in others or [name for name in self.hosts if name != one]:
            self._links[one, other].cut = self._links[other, one].cut = True

    def shape(self, **fields: float) -> None:
        """Set fields of all links: ``shape(delay_s=0.05, repeat=0.1)``."""
        for link in self._links.values():
            for name, value in fields.items():
                setattr(link, name, value)

    def heal(self) -> None:
        """Reset all links to their initial state."""
        for link in self._links.values():
            link.cut, link.delay_s, link.jitter_s, link.repeat, link.drop = False, 0.0, 0.0, 0.0, 0.0

    def inside(self, name: str, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread on a host, with all threads and processes that it starts; return its result."""
        return self._in_space(self.hosts[name].space, work)

    def close(self) -> None:
        """Remove the hosts; processes on them lose their network."""
        self._ended.set()
        self._thread.join(10)
        self._remove()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- making -------------------------------------------------------------------------------------------------------

    def _add(self, name: str, space: str, address: str, place: int) -> None:
        self._spaces.append(space)
        switch, port, mac = self._spaces[0], f"port{place}", f"02:00:00:00:00:{place:02x}"
        _ip("netns", "add", space)
        _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", space, "link", "set", "eth0", "address", mac)
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        for each, device in ((space, "lo"), (space, "eth0"), (switch, port)):
            _ip("-n", each, "link", "set", device, "up")
        self._in_space(space, lambda: _plain_frames("eth0"))
        for other in self.hosts:
            self._links[name, other], self._links[other, name] = Link(), Link()
        self._of_mac[bytes.fromhex(mac.replace(":", ""))] = name
        self.hosts[name] = Host(name, space, address)

    def _listen(self) -> None:
        for place, name in enumerate(self.hosts, start=1):
            one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
            one.bind((f"port{place}", 0))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
            one.setblocking(False)
            self._sockets[name] = one

    def _in_space(self, space: str, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread that is in a namespace; sockets that it opens stay there."""

        def run() -> T:
            with open(f"{_NETNS}/{space}") as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            return work()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run).result()

    def _remove(self) -> None:
        for one in self._sockets.values():
            one.close()
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    # --- passing ------------------------------------------------------------------------------------------------------

    def _pass(self) -> None:
        poll = select.epoll()
        names = {one.fileno(): name for name, one in self._sockets.items()}
        for number in names:
            poll.register(number, select.EPOLLIN)
        while not self._ended.is_set():
            wait = min(0.1, max(0.0, self._later[0][0] - time.monotonic())) if self._later else 0.1
            for number, _ in poll.poll(wait):
                self._take(names[number])
            now = time.monotonic()
            while self._later and self._later[0][0] <= now:
                _, _, to, frame = heapq.heappop(self._later)
                self._send(to, frame)
        poll.close()

    def _take(self, name: str) -> None:
        """Pass on the frames that one host has sent."""
        one = self._sockets[name]
        for _ in range(64):
            try:
                frame, (_, _, kind, _, _) = one.recvfrom(_FRAME_BYTES)
            except BlockingIOError:
                return
            except OSError:  # the interface is gone
                return
            if kind == 4:  # PACKET_OUTGOING: sent by this switch itself
                continue
            to = self._of_mac.get(frame[:6])
            if to is not None:
                self._give(name, to, frame)
            elif frame[0] & 1:
                for other in self.hosts:
                    if other != name:
                        self._give(name, other, frame)

    def _give(self, name: str, to: str, frame: bytes) -> None:
        link = self._links.get((name, to))
        if link is None:
            return
        if link.cut or (link.drop and self._rng.random() < link.drop):
            self.counts.dropped += 1
            return
        copies = 1
        if link.repeat and self._rng.random() < link.repeat:
            copies, self.counts.repeated = 2, self.counts.repeated + 1
        for _ in range(copies):
            wait = link.delay_s + (self._rng.random() * link.jitter_s if link.jitter_s else 0.0)
            if wait:
                self.counts.delayed += 1
                heapq.heappush(self._later, (time.monotonic() + wait, next(self._order), to, frame))
            else:
                self._send(to, frame)

    def _send(self, to: str, frame: bytes) -> None:
        try:
            self._sockets[to].send(frame)
            self.counts.passed += 1
        except OSError:  # its queue is full, or it is gone: the frame is lost, as on a wire
            self.counts.dropped += 1


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)} failed: {done.stderr.strip()}")


def _plain_frames(device: str) -> None:
    """Make the kernel compute checksums and split segments, because no hardware does it here."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for command in _OFFLOADS:
            value = bytearray(struct.pack("II", command, 0))
            held = (ctypes.c_char * len(value)).from_buffer(value)
            request = struct.pack("16sQ16x", device.encode(), ctypes.addressof(held))
            try:
                fcntl.ioctl(one, _SIOCETHTOOL, request)
            except OSError:  # a kernel without that offload
                continue
