"""Hosts in network namespaces: packets pass, are cut, delayed, lost and doubled (root, processes)."""

import socket
import threading
import time

import pytest

from shoal.testing.network import Network, network_unavailable

pytestmark = pytest.mark.skipif(network_unavailable() is not None, reason=str(network_unavailable()))


@pytest.fixture
def network():
    with Network("a", "b", "c") as made:
        yield made


@pytest.fixture
def echo(network):
    """A server on host b that sends back what it gets; a function that asks it from host a."""
    server = network.inside("b", lambda: socket.create_server((network["b"].address, 0)))

    def serve():
        while True:
            try:
                connected, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connected,), daemon=True).start()

    def answer(connected):
        with connected:
            while data := connected.recv(1 << 16):
                connected.sendall(data)

    def ask(data, timeout=10.0, host="a"):
        def work():
            with socket.create_connection(server.getsockname(), timeout) as one:
                one.sendall(data)
                got = b""
                while len(got) < len(data):
                    got += one.recv(1 << 16)
                return got

        return network.inside(host, work)

    threading.Thread(target=serve, daemon=True).start()
    yield ask
    server.close()


def test_bytes_pass_whatever_happens_to_packets(network, echo):
    data = bytes(range(256)) * 400
    assert echo(data) == data
    network.shape(repeat=0.5, drop=0.02, jitter_s=0.002)
    assert echo(data, 60.0) == data
    counts = network.counts
    assert min(counts.repeated, counts.dropped, counts.delayed) > 0
    network.heal()
    network.link("a", "b").delay_s = 0.1
    begin = time.monotonic()
    assert echo(b"x") == b"x"
    assert time.monotonic() - begin >= 0.2  # for the connection's first packet and for the byte


def test_hosts_that_are_cut_off_hear_nothing(network, echo):
    network.cut("a", "b")
    with pytest.raises(TimeoutError):
        echo(b"x", 0.5)
    assert echo(b"x", host="c") == b"x"
    network.heal()
    assert echo(b"x") == b"x"


def test_a_host_sees_only_its_own_network(network):
    with socket.create_server(("127.0.0.1", 0)) as here:

        def outside():
            return socket.create_connection(here.getsockname(), 2)

        with pytest.raises(ConnectionRefusedError):
            network.inside("a", outside)
