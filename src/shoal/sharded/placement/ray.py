"""Servers and trainers on a Ray cluster. Ray places and restarts them; rows stay on ZeroMQ."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from shoal.errors import ConfigError, DeadlineError, PeerError, missing_extra
from shoal.host import HeldPorts
from shoal.sharded.ps.security import ServerKeys


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise missing_extra("ray", "ray") from None
    return ray


class _Server:
    """An actor with one shard. Ray restarts it when its process dies; it then loads its rows from its directory."""

    def __init__(self, shard: int, of: int, options: dict[str, Any]) -> None:
        from shoal.sharded.ps.server.engine import Engine
        from shoal.sharded.ps.server.server import ParameterServer
        from shoal.sharded.ps.server.shard import Shard

        options = dict(options)
        directory, durability = options.pop("directory"), options.pop("durability")
        ports, host = options.pop("ports"), options.pop("host")
        folder = None if directory is None else f"{directory}/shard-{shard:05d}"
        engine = Engine(Shard(shard, of), durability, folder)
        self._server = ParameterServer(engine, host=host, port=ports[shard], **options).start()
        self._host = host

    def address(self) -> str:
        name = self._host if self._host not in ("0.0.0.0", "::") else socket.gethostbyname(socket.gethostname())
        return f"tcp://{name}:{self._server.address.rsplit(':', 1)[1]}"

    def status(self) -> dict[str, Any]:
        return self._server.health()[1]

    def checkpoint(self) -> str:
        return self._server.checkpoint()

    def stop(self) -> None:
        self._server.stop()


class RayServers:
    """``count`` parameter servers as Ray actors, restarted when they die.

    >>> with RayServers(2) as servers:  # doctest: +SKIP
    ...     client = PsClient(servers.addresses)

    Args:
        durability: what survives a restart, if ``directory`` is on storage that every node can reach.
        host: ``127.0.0.1`` on one machine; ``0.0.0.0`` with ``keys`` (or ``insecure``) on a cluster.
        ports: one port per shard, which a server keeps when it restarts; by default free ports of this machine.
        resources: the resources that Ray reserves for each actor, such as ``{"num_cpus": 2}``.
    """

    def __init__(
        self,
        count: int,
        *,
        durability: str = "none",
        directory: str | None = None,
        host: str = "127.0.0.1",
        ports: Sequence[int] | None = None,
        keys: ServerKeys | None = None,
        insecure: bool = False,
        checkpoint_every: timedelta | None = None,
        resources: dict[str, Any] | None = None,
        start_within: timedelta = timedelta(minutes=2),
    ) -> None:
        ray = _ray()
        if not ray.is_initialized():
            raise ConfigError("RayServers: connect to a cluster first, with ray.init()")
        self._start_within = start_within
        self._held = HeldPorts(count if ports is None else 0)
        ports = list(ports) if ports is not None else self._held.numbers
        options = {
            "durability": durability, "directory": directory, "host": host, "ports": ports, "keys": keys,
            "insecure": insecure, "checkpoint_every": checkpoint_every,
        }  # fmt: skip
        try:
            actor = ray.remote(_Server).options(max_restarts=-1, max_task_retries=-1, **(resources or {"num_cpus": 1}))
            self.actors = [actor.remote(i, count, options) for i in range(count)]
            self.addresses: list[str] = self._ask("address")
        except BaseException:
            self._held.close()
            raise

    def _ask(self, method: str) -> list[Any]:
        ray = _ray()
        calls = [getattr(actor, method).remote() for actor in self.actors]
        try:
            return ray.get(calls, timeout=self._start_within.total_seconds())
        except ray.exceptions.GetTimeoutError:
            raise DeadlineError(
                f"RayServers: {method} was not answered within {self._start_within}; does the cluster have room for "
                f"{len(self.actors)} actors?"
            ) from None
        except ray.exceptions.RayActorError as error:
            raise PeerError(f"RayServers: a server could not be started: {error}") from error

    def status(self) -> list[dict[str, Any]]:
        """Each server's health."""
        return self._ask("status")

    def kill(self, i: int) -> None:
        """Kill a server's process, for tests; Ray restarts it."""
        _ray().kill(self.actors[i], no_restart=False)

    def run(self, trainer: Callable[..., Any], workers: int, *args: Any, **resources: Any) -> list[Any]:
        """Call ``trainer(addresses, rank, workers, *args)`` in ``workers`` tasks; tasks that die are restarted."""
        ray = _ray()
        task = ray.remote(trainer).options(max_retries=3, retry_exceptions=False, **resources)
        return ray.get([task.remote(self.addresses, rank, workers, *args) for rank in range(workers)])

    def close(self) -> None:
        """Stop the servers, after they have finished their requests."""
        ray = _ray()
        calls = [actor.stop.remote() for actor in self.actors]
        ray.wait(calls, num_returns=len(calls), timeout=30)
        for actor in self.actors:
            ray.kill(actor)
        self._held.close()

    def __enter__(self) -> RayServers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
