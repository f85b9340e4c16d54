"""Hooks for asynchronous workers: none trains before the chief has restored, and the chief ends last."""

import logging
import time
from typing import Any

from shoal.comm.horovod.hooks import SessionRunHook
from shoal.comm.ranks import collectives
from shoal.errors import DeadlineError

logger = logging.getLogger(__name__)

PREFIX = "monolith_sync_helper"
POLL_S = 1.0
LOG_EVERY_S = 60.0

_local_store: Any = None
_has_chief = False  # the local store already belongs to a chief


class SyncHelper:
    """Flags that the job shares: flag 0 means that the restore finished, flag i that worker i is alive.

    ``store`` is any store for torch's process groups; by default the job's rendezvous store, or without a job a store
    in this process, which is replaced when a second chief's helper is created.
    """

    def __init__(self, num_workers: int, is_chief: bool, store: Any = None) -> None:
        self.num_workers = num_workers
        self.is_chief = is_chief
        self.store = store if store is not None else self._default_store()

    def _default_store(self) -> Any:
        global _local_store, _has_chief
        if collectives.is_started():
            return collectives.store_of()
        if _local_store is None or (self.is_chief and _has_chief):
            _local_store, _has_chief = collectives.local_store(), False
        _has_chief = _has_chief or self.is_chief
        return _local_store

    def _set(self, i: int, value: bool) -> None:
        self.store.set(f"{PREFIX}/{i}", "1" if value else "0")

    def _get(self, i: int) -> bool:
        key = f"{PREFIX}/{i}"
        return bool(self.store.check([key])) and self.store.get(key) == b"1"

    def _check(self, i: int) -> None:
        if not 0 < i < self.num_workers:
            raise AssertionError(f"worker index must be in 1..{self.num_workers - 1}, got {i}")

    def mark_restore_done(self) -> None:
        self._set(0, True)

    def get_restore_status(self) -> bool:
        return self._get(0)

    def start_worker(self, i: int) -> None:
        self._check(i)
        self._set(i, True)

    def finish_worker(self, i: int) -> None:
        self._check(i)
        self._set(i, False)

    def get_alive_workers(self) -> list[int]:
        """Indices of the workers that started and have not finished."""
        return [i for i in range(1, self.num_workers) if self._get(i)]

    def get_num_alive_workers(self) -> int:
        return len(self.get_alive_workers())


class ChiefSyncHook(SessionRunHook):
    """Reports that the restore is done; at the end waits for the workers, at most ``timeout_seconds``; never raises."""

    def __init__(self, helper: SyncHelper, timeout_seconds: float = 1800) -> None:
        self.helper = helper
        self.timeout_seconds = timeout_seconds

    def after_create_session(self, ctx: Any) -> None:
        self.helper.mark_restore_done()

    def end(self, ctx: Any) -> None:
        began = logged = time.monotonic()
        try:
            while alive := self.helper.get_alive_workers():
                now = time.monotonic()
                if now - began >= self.timeout_seconds:
                    logger.warning("stopped waiting for workers %s after %g s", alive, self.timeout_seconds)
                    return
                if now - logged >= LOG_EVERY_S:
                    logged = now
                    logger.info("waiting for workers %s", alive)
                time.sleep(min(POLL_S, self.timeout_seconds))
        except Exception as error:
            logger.warning("could not wait for the workers: %s", error)


class WorkerSyncHook(SessionRunHook):
    """Marks worker ``index`` as alive from start to end, and waits for the restore; index 0 does nothing."""

    def __init__(self, index: int, helper: SyncHelper, timeout_seconds: float = 1800) -> None:
        self.index = index
        self.helper = helper
        self.timeout_seconds = timeout_seconds

    def after_create_session(self, ctx: Any) -> None:
        if self.index == 0:
            return
        self.helper.start_worker(self.index)
        end = time.monotonic() + self.timeout_seconds
        while not self.helper.get_restore_status():
            if time.monotonic() > end:
                raise DeadlineError(
                    f"worker {self.index} waited {self.timeout_seconds:g} s for the chief's restore; see its log"
                )
            time.sleep(0.1)

    def end(self, ctx: Any) -> None:
        if self.index != 0:
            self.helper.finish_worker(self.index)


class TrainingHooksHelper:
    """The hooks of one worker; both tuples are empty when ``enable_sync`` is off."""

    def __init__(
        self, enable_sync: bool, num_workers: int, worker_idx: int, chief_timeout_seconds: float = 1800
    ) -> None:
        self._chief_hooks: tuple[SessionRunHook, ...] = ()
        self._hooks: tuple[SessionRunHook, ...] = ()
        if enable_sync:
            helper = SyncHelper(num_workers, is_chief=worker_idx == 0)
            self._chief_hooks = (ChiefSyncHook(helper, chief_timeout_seconds),)
            self._hooks = (WorkerSyncHook(worker_idx, helper),)

    @property
    def training_chief_hooks(self) -> tuple[SessionRunHook, ...]:
        return self._chief_hooks

    @property
    def training_hooks(self) -> tuple[SessionRunHook, ...]:
        return self._hooks
