"""Parameter servers for tests, in this process; `ps(2)` returns a client of two servers."""

import contextlib
from datetime import timedelta

import pytest

from shoal.sharded import Engine, ParameterServer, PsClient, Shard
from tests.sharded.helpers import LONG


@pytest.fixture
def servers():
    """servers(n, **options) -> n running servers, stopped at the end."""
    with contextlib.ExitStack() as stack:

        def start(n, durability="none", directory=None, **options):
            started = []
            for i in range(n):
                folder = None if directory is None else directory / f"shard-{i}"
                server = ParameterServer(Engine(Shard(i, n), durability, folder), **options).start()
                stack.callback(lambda s=server: s.stop(drain=timedelta(seconds=2)) if not s.wait(0) else None)
                started.append(server)
            return started

        yield start


@pytest.fixture
def ps(servers):
    """ps(n, **client options) -> a client of n servers without durability."""
    with contextlib.ExitStack() as stack:

        def connect(n, **options):
            options.setdefault("deadline", LONG)
            addresses = [server.address for server in servers(n)]
            return stack.enter_context(PsClient(addresses, **options))

        yield connect
