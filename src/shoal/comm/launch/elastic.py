"""`run_elastic`: torchrun's agent, with a reason for each restart and without waiting for lost hosts."""

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
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.launcher import api as launcher

from shoal.comm.ranks.collectives import tcp_store
from shoal.errors import ConfigError

STOP_S = 5
"""Seconds for the ranks of this host to save and exit when hosts join or leave."""
FAILED_STOP_S = 1
"""The same after a rank failed: the others cannot save without it."""
NOT_AGAIN = {2: "its usage or configuration is wrong", 3: "the guard ended the run"}
"""Exit codes after which a restart cannot help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The ranks to start on this host, and the other hosts of the run."""

    nproc: int
    hosts: tuple[int, int] = (1, 1)
    """The minimum and maximum number of hosts."""
    meet: str = ""
    """``host:port`` of the rendezvous; the launcher on that host listens there."""
    run_id: str = ""
    """Must be the same on all hosts of a run."""
    max_restarts: int = 0
    address: str | None = None
    """The address at which other hosts reach this one; by default that of its host name."""
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
    """The reason for each restart of this host's ranks."""

    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Failure:
    """The first rank that failed after the last restart."""

    rank: int
    exit_code: int
    """As in `subprocess`: the negative number of the signal if one ended the rank."""
    signal: str | None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a launch ended. Both fields are None if every rank exited with 0."""

    failure: Failure | None = None
    signal: signal.Signals | None = None
    """The signal that the launcher received."""


def run_elastic(launch: Launch, command: Sequence[str], tell: Callable[[str], None], restarts: Restarts) -> Ended:
    """Run a command as ranks until all of them have exited.

    If a rank fails, all ranks of the run restart on the remaining hosts. ``tell`` gets a line about each restart.
    """
    alone = launch.hosts == (1, 1)
    here = alone and not launch.meet
    # If the first host is lost, the others would wait forever for the ranks' store on it.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0" if here else "1"
    os.environ["SHOAL_PARENT"] = str(os.getpid())  # ranks that run a shoal command exit when this launcher is killed
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

    with ExitStack() as changed:  # torch has no hook for restarts, nor for the address of its store
        changed.enter_context(_replaced(launcher, "LocalElasticAgent", Agent))
        if here:
            _exchange_on_loopback()
            changed.enter_context(_replaced(DynamicRendezvousHandler, "_create_tcp_store_server", _store_on_loopback))
        try:
            launcher.elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            name = first.signal_name() if first.exitcode < 0 else None
            return Ended(failure=Failure(rank, first.exitcode, name))
        except SignalException as stop:
            return Ended(signal=stop.sigval)
    return Ended()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _exchange_on_loopback() -> None:
    """Keep the traffic between ranks of one host on loopback; torch's ports are otherwise open to every machine."""
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
                self._tell(f"{self._why}: {NOT_AGAIN[failure.exitcode]}, so it is not restarted")
        elif result.state == agents.WorkerState.HEALTHY:
            self._why = ""
        return result

    def _restart_workers(self, worker_group: Any) -> None:
        done, most = worker_group.spec.max_restarts - self._remaining_restarts, worker_group.spec.max_restarts
        count = f"restart {done} of at most {most}" if self._why else "not counted as a restart"
        why = self._why or "another host waits to join, for the first time or after its ranks ended"
        self._restarts.reasons.append(why)
        self._tell(f"{why}; all ranks start again ({count})")
        super()._restart_workers(worker_group)

    def _rendezvous(self, worker_group: Any) -> None:
        super()._rendezvous(worker_group)
        ranks = sorted(worker.global_rank for worker in worker_group.workers)
        if not self._alone:
            self._tell(
                f"{worker_group.group_world_size} host(s), {worker_group.workers[0].world_size} ranks; rank(s) "
                f"{', '.join(map(str, ranks))} are on this host"
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
