"""One rank's fetch of its share: head, stream, validate, retry until the round's deadline."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.gather.errors import ObjectChanged, PayloadRejected, StoreError
from shoal.gather.payload.container import SUFFIXES, load_payload, save_payload
from shoal.gather.payload.payload_ref import PayloadRef
from shoal.gather.payload.spec import GradientSpec
from shoal.gather.payload.validate import PayloadInfo, checked_state, validate_payload
from shoal.gather.protocol.plan import GatherConfig, GatherPlan
from shoal.gather.protocol.spill import Landing, Spill
from shoal.gather.stores.base import ObjectInfo, PayloadStore

log = logging.getLogger("shoal.gather")


@dataclass(frozen=True)
class Accepted:
    uid: int
    mtime_us: int
    info: PayloadInfo
    ref: PayloadRef


@dataclass(frozen=True)
class Skipped:
    uid: int
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class _Again:
    """An inconclusive try: ``absent``, ``failed``, ``cut`` (by the deadline) or ``changed``."""

    state: str
    detail: str = ""


_LEAST_TRY_S = 1.0
_AT_DEADLINE = {"absent": "not_found", "failed": "store_error", "cut": "timeout", "changed": "timeout"}


class _ByteGate:
    """Admits downloads while their announced bytes fit the limit; a larger one runs alone."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._free = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        async with self._free:
            await self._free.wait_for(lambda: self._used == 0 or self._used + size <= self._limit)
            self._used += size
        try:
            yield
        finally:
            async with self._free:
                self._used -= size
                self._free.notify_all()


class Fetcher:
    """One rank's downloads in one gather. ``attempted`` refuses a second download of a (window, UID)."""

    def __init__(
        self,
        plan: GatherPlan,
        spec: GradientSpec,
        store: PayloadStore,
        config: GatherConfig,
        *,
        patience_s: float = math.inf,
    ) -> None:
        self.plan, self.spec, self.store, self.config = plan, spec, store, config
        self._patience_s = patience_s  # seconds of a round after which other ranks give up on this one
        self.attempted: set[tuple[int, int]] = set()
        self.retries = self.refused = 0
        self.validate_s = 0.0
        self.spill = Spill(plan, spec, config)
        self._limit = config.payload_limit(spec)
        self._pool = ThreadPoolExecutor(config.validate_workers, thread_name_prefix="shoal-validate")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def round(self, uids: Sequence[int]) -> list[Accepted | Skipped]:
        """Fetch UIDs concurrently. An exception other than the store's marks the unsettled ones ``local_error``."""
        fresh = [uid for uid in uids if (self.plan.window, uid) not in self.attempted]
        self.refused += len(uids) - len(fresh)
        self.attempted |= {(self.plan.window, uid) for uid in fresh}
        if not fresh:
            return []
        self._free_fetches = asyncio.Semaphore(self.config.max_concurrent_fetches)
        self._gate = _ByteGate(self.config.max_inflight_bytes)
        self._deadline = time.monotonic() + self.plan.timeout_s
        self._downloaded: set[int] = set()
        self._broken = False
        tasks = {asyncio.create_task(self._guarded(uid)): uid for uid in fresh}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task, uid in tasks.items():
                if uid not in self._downloaded:  # a downloaded object is settled by its validation
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        settled: list[Accepted | Skipped] = []
        for task, uid in tasks.items():
            error = None if task.cancelled() else task.exception()
            if task.cancelled() or error is not None:
                if error is not None:
                    log.error("window %d: fetching peer %d failed on this rank", self.plan.window, uid, exc_info=error)
                settled.append(Skipped(uid, "local_error", "the fetch loop of this rank failed"))
            else:
                settled.append(task.result())
        for outcome in settled:
            if isinstance(outcome, Skipped):
                log.warning(
                    "window %d: peer %d skipped: %s (%s)", self.plan.window, outcome.uid, outcome.reason, outcome.detail
                )
        return settled

    def _no_upload_can_follow(self) -> bool:
        limit = self.plan.time_max_us
        return limit is not None and time.time() * 1e6 > limit + self.config.late_grace_s * 1e6

    def _first_try_s(self, now: float) -> float:
        """Seconds for a first try: the full time, even if it waited in the queue past the deadline, but limited so that
        many stalled objects in a row do not make the other ranks give up on this one."""
        left = self._deadline - self.plan.timeout_s + 0.9 * self._patience_s - now
        return min(self.plan.timeout_s, max(left, _LEAST_TRY_S))

    async def _guarded(self, uid: int) -> Accepted | Skipped:
        try:
            return await self._fetch(uid)
        except Exception:
            self._broken = True
            raise

    async def _fetch(self, uid: int) -> Accepted | Skipped:
        tries = absences = changes = 0
        again = _Again("absent")
        while True:
            async with self._free_fetches:
                if self._broken:
                    raise asyncio.CancelledError
                now = time.monotonic()
                if tries and now >= self._deadline:
                    return Skipped(uid, _AT_DEADLINE[again.state], again.detail)
                last_chance = absences > 0 and self._no_upload_can_follow()
                outcome = await self._try(uid, self._deadline - now if tries else self._first_try_s(now))
            tries += 1
            if not isinstance(outcome, _Again):
                return await self._settle(uid, outcome)
            again = outcome
            self.retries += 1
            absences = absences + 1 if again.state == "absent" else 0
            if again.state == "changed":
                changes += 1
                if changes > 1:
                    return Skipped(uid, "changed_during_read", again.detail)
                continue
            limit = self.config.not_found_limit
            if again.state == "absent" and (last_chance or (limit is not None and absences >= limit)):
                return Skipped(uid, "not_found", f"absent in {absences} tries")
            pause = self.config.retry_interval_s
            if again.state == "cut" or time.monotonic() + pause >= self._deadline:
                return Skipped(uid, _AT_DEADLINE[again.state], again.detail or f"{tries} tries")
            await asyncio.sleep(pause)

    async def _try(
        self, uid: int, seconds: float
    ) -> "Skipped | _Again | tuple[ObjectInfo, Landing | tuple[Path, str]]":
        names = {"version": self.plan.version, "key": self.plan.key}
        clock = asyncio.timeout(seconds)
        try:
            async with clock:
                info = await self.store.head(self.plan.window, uid, **names)
                if info is None:
                    return _Again("absent")
                if (refusal := self._refuse(uid, info)) is not None:
                    return refusal
                if (known := self.spill.recall(uid, info)) is not None:
                    return info, known
                async with self._gate.hold(info.size):
                    return await self._stream(uid, info, names)
        except TimeoutError as error:
            if not clock.expired():
                raise
            return _Again("cut", f"cut off after {seconds:.1f} s: {error}")
        except ObjectChanged as error:
            return _Again("changed", str(error))
        except StoreError as error:
            if error.permanent:
                return Skipped(uid, "store_error", str(error))
            return _Again("failed", str(error))
        except PayloadRejected as error:
            return Skipped(uid, error.reason, error.detail)

    def _refuse(self, uid: int, info: ObjectInfo) -> Skipped | None:
        plan = self.plan
        if plan.time_min_us is not None and info.mtime_us < plan.time_min_us:
            return Skipped(uid, "too_early", f"written {plan.time_min_us - info.mtime_us} us before the window")
        if plan.time_max_us is not None and info.mtime_us > plan.time_max_us:
            return Skipped(uid, "too_late", f"written {info.mtime_us - plan.time_max_us} us after the window")
        if info.size > self._limit:
            return Skipped(uid, "oversize", f"{info.size} bytes, at most {self._limit} are allowed")
        return None

    async def _stream(self, uid: int, info: ObjectInfo, names: dict[str, str]) -> "_Again | tuple[ObjectInfo, Landing]":
        landing = self.spill.land(uid, info.size)
        complete = False
        blocks = self.store.stream(self.plan.window, uid, info, 0, **names)
        try:
            async for block in blocks:
                landing.write(block)
            if landing.size < info.size:
                return _Again("failed", f"received only {landing.size} of {info.size} bytes")
            landing.finish()
            complete = True
            return info, landing
        finally:
            if not complete:
                self.spill.release(landing, info.size)
            if (close := getattr(blocks, "aclose", None)) is not None:
                await close()

    async def _settle(self, uid: int, outcome: Any) -> Accepted | Skipped:
        if isinstance(outcome, Skipped):
            return outcome
        self._downloaded.add(uid)
        info, landed = outcome
        run = asyncio.get_running_loop().run_in_executor
        if isinstance(landed, Landing):
            return await run(self._pool, self._validate, uid, info, landed)
        path, digest = landed
        accepted = await run(self._pool, self._validate_file, uid, info, path)
        if isinstance(accepted, Accepted) and accepted.info.digest == digest:
            return accepted
        self.spill.forget(path)  # not the validated file: ignore it
        self._downloaded.discard(uid)
        return await self._fetch(uid)

    def _validate(self, uid: int, info: ObjectInfo, landing: Landing) -> Accepted | Skipped:
        if landing.path is not None:
            return self._validate_file(uid, info, landing.path)
        outcome = self._check(uid, info, landing.data, None)
        if isinstance(outcome, Skipped):
            self.spill.release(landing, info.size)
        return outcome

    def _validate_file(self, uid: int, info: ObjectInfo, path: Path) -> Accepted | Skipped:
        outcome = self._check(uid, info, path, path)
        if isinstance(outcome, Skipped):
            self.spill.forget(path)
        else:
            self.spill.remember(path, info, outcome.info.digest)
        return outcome

    def _check(self, uid: int, info: ObjectInfo, source: Any, path: Path | None) -> Accepted | Skipped:
        begin = time.perf_counter()
        try:
            payload = load_payload(source, self.spec, max_bytes=self._limit)
            found = validate_payload(
                payload, self.spec, window=self.plan.window, max_abs_value=self.config.max_abs_value
            )
            if path is not None and not _contiguous(payload, self.spec):
                # Slices must be contiguous in the file: write it again, with the same digest.
                state = checked_state(payload["state_dict"], self.spec)
                save_payload({"state_dict": state, "global_step": found.global_step}, path)
                payload = load_payload(path, self.spec)
            ref = PayloadRef.from_payload(payload, self.spec, digest=found.digest, path=path, keep=self.spill.keep)
            return Accepted(uid, info.mtime_us, found, ref)
        except PayloadRejected as error:
            return Skipped(uid, error.reason, error.detail)
        finally:
            self.validate_s += time.perf_counter() - begin


def _contiguous(payload: dict[str, Any], spec: GradientSpec) -> bool:
    state = payload["state_dict"]
    return all(state[param.name + suffix].is_contiguous() for param in spec.params for suffix in SUFFIXES[:2])
