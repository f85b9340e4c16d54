"""Hooks that make synchronous ranks dump and stop in the same step, and that log table sizes."""

import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.comm.horovod.hooks import SessionRunHook
from shoal.comm.ranks import control
from shoal.errors import ConfigError
from shoal.host import as_tensor

logger = logging.getLogger(__name__)

BROADCAST_LIMIT_S = 10.0
DUMP_HOURS = range(18, 21)  # UTC


class SyncTrainingBarrierSaverListener:
    """Broadcasts the global step from rank 0 after a checkpoint, so that no rank continues before it is written."""

    def begin(self) -> None: ...

    def before_save(self, ctx: Any, global_step: int) -> None: ...

    def after_save(self, ctx: Any, global_step: int) -> None:
        try:
            control.broadcast_ints([int(global_step)])
        except Exception as error:
            logger.error("the barrier after the checkpoint of step %s failed: %s", global_step, error)

    def end(self, ctx: Any, global_step: int) -> None: ...


class _EveryInterval(SessionRunHook):
    """Calls `act` every ``step_interval`` steps, in the same steps on all ranks."""

    def __init__(self, model_dir: str, timer: Any, step_interval: int = 100) -> None:
        if step_interval < 1:
            raise ConfigError(f"{type(self).__name__}: step_interval must be at least 1, got {step_interval}")
        self.model_dir = Path(model_dir)
        self.timer = timer
        self.step_interval = step_interval
        self._last = 0

    def after_run(self, ctx: Any, values: Any) -> None:
        step = int(ctx.global_step)
        if step // self.step_interval <= self._last // self.step_interval:
            return
        self._last = step
        self.act(ctx, values, step)

    def act(self, ctx: Any, values: Any, step: int) -> None:
        raise NotImplementedError


class SyncTrainingForceDumpHook(_EveryInterval):
    """Files ``dump_<step>`` and ``stop_<step>`` in ``model_dir`` make all ranks dump, or dump and stop.

    Rank 0 checks for files of the last ``step_interval`` steps and broadcasts the result. Otherwise the timer is
    enabled only during ``DUMP_HOURS``.
    """

    def act(self, ctx: Any, values: Any, step: int) -> None:
        bits = [0, 0, 0]
        if control.rank() == 0:
            in_hours = datetime.now(UTC).hour in DUMP_HOURS
            bits = [int(self._requested("dump", step)), int(self._requested("stop", step)), int(in_hours)]
        dump, stop, in_hours = control.broadcast_ints(bits, timeout_s=BROADCAST_LIMIT_S)
        if in_hours:
            self.timer.enable()
        else:
            self.timer.disable()
        if dump or stop:
            self.timer.enable()
            self.timer.reset()
        if stop:
            ctx.request_stop()

    def _requested(self, what: str, step: int) -> bool:
        try:
            names = os.listdir(self.model_dir)
        except OSError:
            return False
        steps = (int(m[1]) for name in names if (m := re.fullmatch(rf"{what}_(\d+)", name)))
        return any(step - self.step_interval < s <= step for s in steps)


class SyncTrainingSaverControlHook(_EveryInterval):
    """Enables the timer while ``model_dir`` contains a file ``ONLINE``; rank 0 checks and broadcasts."""

    def act(self, ctx: Any, values: Any, step: int) -> None:
        online = int(control.rank() == 0 and (self.model_dir / "ONLINE").exists())
        (online,) = control.broadcast_ints([online], timeout_s=BROADCAST_LIMIT_S)
        if online:
            self.timer.enable()
        else:
            self.timer.disable()


class SyncTrainingInfoHook(SessionRunHook):
    """Logs the sizes of ``tables`` (name to table; ``ctx.tables`` if None), at most once per ``interval_s``."""

    def __init__(self, tables: Mapping[str, Any] | None = None, interval_s: float = 600) -> None:
        self.tables = tables
        self.interval_s = interval_s
        self._last: float | None = None

    def after_run(self, ctx: Any, values: Any) -> None:
        now = time.monotonic()
        if self._last is not None and now - self._last < self.interval_s:
            return
        self._last = now
        tables = self.tables if self.tables is not None else getattr(ctx, "tables", None) or {}
        for name, table in tables.items():
            logger.info("table %s has %d rows", name, _rows(table))


def _rows(table: Any) -> int:
    size = getattr(table, "size", None)
    return int(size() if callable(size) else size if size is not None else len(table))


class ReqTimeControlDumpHook(_EveryInterval):
    """Makes all ranks dump and stop when the newest request time reaches the number in the file ``limit_req_time``.

    A rank's newest request time is the maximum of ``values["req_time"]``, or of ``ctx.req_time``: a number, a tensor or
    a list of numbers.
    """

    def __init__(self, model_dir: str, timer: Any, step_interval: int = 1000) -> None:
        super().__init__(model_dir, timer, step_interval)

    def act(self, ctx: Any, values: Any, step: int) -> None:
        pairs = control.gather_ints([self._limit(), _newest(ctx, values)])
        limit, newest = pairs[0][0], max(own for _, own in pairs)
        if 0 <= limit <= newest:
            logger.info("request time %d reached the limit %d; dumping and stopping", newest, limit)
            self.timer.enable()
            self.timer.reset()
            ctx.request_stop()

    def _limit(self) -> int:
        if control.rank() != 0:
            return -1
        try:
            return int((self.model_dir / "limit_req_time").read_text().strip())
        except FileNotFoundError:
            return -1
        except (OSError, ValueError) as error:
            logger.warning("cannot read file limit_req_time: %s", error)
            return -1


def _newest(ctx: Any, values: Any) -> int:
    newest = values.get("req_time") if isinstance(values, Mapping) else None
    newest = getattr(ctx, "req_time", None) if newest is None else newest
    if newest is None:
        return -1
    times = as_tensor(newest)
    return int(times.max()) if times.numel() else -1


def add_mpi_exception_hook() -> None:
    """Under ``mpirun``, make an uncaught exception print rank and traceback and abort the whole job."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK")
    if rank is None:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        print(f"rank {rank}: uncaught exception, aborting the job", file=sys.stderr)
        traceback.print_exception(kind, error, trace)
        sys.stderr.flush()
        sys.stdout.flush()
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(1)
        os._exit(1)

    sys.excepthook = hook
