"""``shoal up --on ray``: the same commands, started by actors on the nodes of a Ray cluster.

Ray chooses a node for each process when the system starts. The supervisor runs in the process that you started and
decides about restarts; when it exits, Ray ends the actors, and with them their processes. A process that dies restarts
on the same node and ports. Checkpoints, exports and a registry in a folder must be on storage that all nodes share.
"""

from __future__ import annotations

import os
from typing import Any

from shoal.errors import DeadlineError, PeerError, missing_extra
from shoal.host import HeldPorts
from shoal.up.config import Online
from shoal.up.files import Log
from shoal.up.local import fixed_ports
from shoal.up.plan import PORTS, Place, Places, Process, check_network, names_of

PLACE_S = 120.0
CALL_S = 30.0
_LOST = -9


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise missing_extra("ray", "ray") from None
    return ray


class _Host:
    """An actor that runs one command on its node and keeps its output until `look` is called."""

    def __init__(self, folder: str) -> None:
        os.chdir(folder)
        self._process: Any = None
        self._held: HeldPorts | None = None
        self._lines: list[str] = []

    def about(self, ports: int) -> tuple[str, str, list[int]]:
        """(address of the node, its id, ports that are free there and stay so until this actor ends)."""
        import ray

        self._held = HeldPorts(ports, "0.0.0.0")
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), self._held.numbers

    def start(self, arguments: tuple[str, ...]) -> int:
        from shoal.up.local import LocalProcess

        self._process = LocalProcess(arguments, self)  # type: ignore[arg-type]  # only `write` is called
        return self._process.pid

    def write(self, line: str) -> None:
        self._lines.append(line)

    def look(self) -> tuple[int | None, list[str]]:
        """(exit code or None, output since the last call)."""
        code = self._process.poll() if self._process is not None else None
        lines, self._lines = self._lines, []
        return code, lines

    def end(self, at_once: bool) -> None:
        if self._process is not None:
            (self._process.kill if at_once else self._process.terminate)()


class RayProcess:
    """A command on a node of the cluster."""

    def __init__(self, actor: Any, arguments: tuple[str, ...], log: Log) -> None:
        self._ray, self._actor, self._log = _ray(), actor, log
        self.pid: int | None = self._ray.get(actor.start.remote(arguments), timeout=CALL_S)

    def poll(self) -> int | None:
        try:
            code, lines = self._ray.get(self._actor.look.remote(), timeout=CALL_S)
        except self._ray.exceptions.GetTimeoutError:
            return None  # a busy node; readiness and Ray's own heartbeats decide whether it is lost
        except self._ray.exceptions.RayError as error:
            self._log.write(f"shoal up: the actor of this process is gone: {error}")
            return _LOST
        for line in lines:
            self._log.write(line)
        return code

    def terminate(self) -> None:
        self._actor.end.remote(False)

    def kill(self) -> None:
        self._actor.end.remote(True)


def _connect(ray: Any, address: str) -> None:
    """Join a cluster, or start a local one, with three tries: Ray's 15 s to start may not suffice on a busy machine."""
    local: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    if local:
        os.environ.setdefault("RAY_worker_niceness", "0")  # servers and replicas are not background work
    for last in (False, False, True):
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False, **local)
            return
        except (RuntimeError, ConnectionError, ValueError) as error:
            if last or not local or "Timed out" not in str(error):
                raise PeerError(f"the Ray cluster at {address} cannot be used: {error}") from error
            ray.shutdown()


class RayLauncher:
    """Places processes on the cluster that this process is connected to, or that ``RAY_ADDRESS`` names.

    Without either it starts a local cluster, which ends with it.
    """

    def __init__(self) -> None:
        ray = self._ray = _ray()
        self._own = not ray.is_initialized()
        if self._own:
            _connect(ray, os.environ.get("RAY_ADDRESS") or "local")
        self._actors: dict[str, Any] = {}
        self._nodes: dict[str, str] = {}
        self._cpus = 1.0

    def places(self, online: Online) -> Places:
        """Let Ray choose a node for each process, and choose free ports on that node."""
        self._cpus = online.up.cpus
        kinds = names_of(online)
        self._actors = {name: self._make(name) for name in kinds}
        alone = sum(node["Alive"] for node in self._ray.nodes()) == 1
        if not alone:
            check_network(online, "the Ray cluster has several nodes")
        found = {}
        for name, kind in kinds.items():
            address, self._nodes[name], free = self._ask(name, len(PORTS[kind]))
            fixed = fixed_ports(online, name, kind)
            ports = {port: fixed.get(port) or number for port, number in zip(PORTS[kind], free, strict=True)}
            found[name] = Place(ports=ports) if alone else Place(listen="0.0.0.0", host=address, ports=ports)
        return found

    def _make(self, name: str) -> Any:
        ray = self._ray
        options: dict[str, Any] = {"num_cpus": self._cpus, "max_restarts": 0}
        if name in self._nodes:  # other processes use its address
            options["scheduling_strategy"] = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                self._nodes[name], soft=False
            )
        return ray.remote(_Host).options(**options).remote(os.getcwd())

    def _ask(self, name: str, ports: int) -> tuple[str, str, list[int]]:
        try:
            return self._ray.get(self._actors[name].about.remote(ports), timeout=PLACE_S)
        except self._ray.exceptions.GetTimeoutError:
            raise DeadlineError(
                f"Ray found no place for {name} within {PLACE_S:g} s; does the cluster have {self._cpus:g} CPUs for "
                f"each of the {len(self._actors)} processes? Set [up] cpus to reserve fewer"
            ) from None
        except self._ray.exceptions.RayError as error:
            raise PeerError(f"Ray could not place {name}: {error}") from error

    def start(self, process: Process, log: Log) -> RayProcess:
        """Start a process on its node; `OSError` if the node is gone. It cannot move: others use its address."""
        ray, name = self._ray, process.name
        try:
            return RayProcess(self._actors[name], process.arguments, log)
        except ray.exceptions.RayError:
            self._actors[name] = self._make(name)
        try:
            return RayProcess(self._actors[name], process.arguments, log)
        except ray.exceptions.RayError as error:
            raise OSError(f"the node of {name} is gone ({error}); restart the system to use another node") from error

    def close(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        if self._own:
            self._ray.shutdown()
