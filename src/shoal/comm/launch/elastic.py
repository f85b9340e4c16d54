"""`run_elastic`: torchrun's own agent, which says what it restarts and why, and does not wait for the lost."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.agent.server import api as agents
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.launcher import api as launcher

from shoal.comm.ranks.collectives import tcp_store
from shoal.errors import ConfigError

STOP_S = 5
"""How long the ranks of this host have to save and end when hosts come or go."""
FAILED_STOP_S = 1
"""The same when one of them has failed: the others cannot save without it."""
NOT_AGAIN = {2: "its usage or configuration is wrong", 3: "the guard ended the run"}
"""Exit codes after which starting again cannot help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is started on this host, and with how many others."""

    nproc: int
    hosts: tuple[int, int] = (1, 1)
    """The least that a run needs, and the most that it takes."""
    meet: str = ""
    """``host:port`` at which the hosts meet; the launcher on that host listens there."""
    run_id: str = ""
    """The same on all hosts of a run."""
    max_restarts: int = 0
    address: str | None = None
    """Of this host, for the others; by default that of its name."""
    log_dir: str = ""

    def __post_init__(self) -> None:
        least, most = self.hosts
        if self.nproc < 1 or self.max_restarts < 0:
            raise ConfigError(
                f"-n must be at least 1 and --max-restarts at least 0, got {self.nproc}, {self.max_restarts}"
            )
        if not 1 <= least <= most:
            raise ConfigError(f"--nnodes must be N or MIN:MAX with 1 <= MIN <= MAX, got {least}:{most}")
        if most > 1 and not self.meet:
            raise ConfigError("--nnodes needs --rdzv-endpoint HOST:PORT, the same on all hosts; HOST is one of them")


@dataclass(slots=True)
class Restarts:
    """How often all ranks of this host were started again, and what each time's reason was."""

    reasons: list[str] = field(default_factory=list)


def run_elastic(launch: Launch, command: Sequence[str], tell: Callable[[str], None], restarts: Restarts) -> None:
    """Runs a command as ranks until all have ended well; raises torch's ``ChildFailedError`` or ``SignalException``.

    A rank that fails is replaced: all ranks of the run start again, as many as there are hosts for. ``tell`` gets a
    line about each restart.
    """
    alone = launch.hosts == (1, 1)
    here = alone and not launch.meet
    # Hosts whose first one was lost would look for the store of their ranks on it, for ever.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0" if here else "1"
    os.environ["SHOAL_PARENT"] = str(os.getpid())  # commands of ours that are ranks end with a launcher that is killed
    config = launcher.LaunchConfig(
        min_nodes=launch.hosts[0],
        max_nodes=launch.hosts[1],
        nproc_per_node=launch.nproc,
        run_id=launch.run_id or (str(uuid.uuid4()) if alone else "shoal"),
        rdzv_backend="c10d",
        rdzv_endpoint=launch.meet,
        rdzv_configs={
            "last_call_timeout": 3,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 5,
            "store_type": "file" if here else "tcp",
        },
        local_addr=launch.address or ("127.0.0.1" if alone else None),
        max_restarts=launch.max_restarts,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=launch.log_dir, redirects=Std.ALL, tee=Std.ALL),
        log_line_prefix_template="[rank ${rank}] ",
    )

    class Agent(_Agent):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, tell=tell, restarts=restarts, alone=alone, **options)

    with ExitStack() as changed:  # torch has no hook for restarts, nor for where its store listens
        changed.enter_context(_replaced(launcher, "LocalElasticAgent", Agent))
        if here:
            _exchange_on_loopback()
            changed.enter_context(_replaced(DynamicRendezvousHandler, "_create_tcp_store_server", _store_on_loopback))
        launcher.elastic_launch(config, command[0])(*command[1:])


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _exchange_on_loopback() -> None:
    """Has the ranks of one host exchange where no other machine reaches them; torch's ports are open to every one."""
    if sys.platform == "linux":
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")


def _store_on_loopback(*_: Any) -> Any:
    return tcp_store()


class _Agent(LocalElasticAgent):
    def __init__(
        self, *args: Any, tell: Callable[[str], None], restarts: Restarts, alone: bool, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._tell, self._restarts, self._alone = tell, restarts, alone
        self._why = ""

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        failures = getattr(result, "failures", None)
        if failures:
            rank, failure = min(failures.items(), key=lambda one: one[1].timestamp)
            self._why = f"rank {rank} ended {ended(failure.exitcode)}"
            if failure.exitcode in NOT_AGAIN and self._remaining_restarts > 0:
                self._remaining_restarts = 0
                self._tell(f"{self._why}: {NOT_AGAIN[failure.exitcode]}, so it is not started again")
        elif result.state == agents.WorkerState.HEALTHY:
            self._why = ""
        return result

    def _restart_workers(self, worker_group: Any) -> None:
        done, most = worker_group.spec.max_restarts - self._remaining_restarts, worker_group.spec.max_restarts
        count = f"restart {done} of at most {most}" if self._why else "the number of hosts changes"
        why = self._why or "another host is there"
        self._restarts.reasons.append(why)
        self._tell(f"{why}; all ranks start again ({count})")
        super()._restart_workers(worker_group)

    def _rendezvous(self, worker_group: Any) -> None:
        super()._rendezvous(worker_group)
        ranks = sorted(worker.global_rank for worker in worker_group.workers)
        if not self._alone:
            self._tell(
                f"{worker_group.group_world_size} host(s), {worker_group.workers[0].world_size} ranks; here are "
                f"rank(s) {', '.join(map(str, ranks))}"
            )

    def _start_workers(self, worker_group: Any) -> Any:
        started = super()._start_workers(worker_group)
        context: Any = self._pcontext
        real = context.close

        def close(death_sig: Any = None, timeout: int = STOP_S) -> None:  # instead of torch's 30
            real(death_sig, FAILED_STOP_S if self._why else timeout)

        context.close = close
        return started


def ended(code: int) -> str:
    """``with exit code 1``, ``by SIGKILL``.

    >>> ended(1), ended(-9)
    ('with exit code 1', 'by SIGKILL')
    """
    return f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
