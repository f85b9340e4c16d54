"""One Predict request from its model spec to its answer: found, checked, batched or run, timed."""

import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np

from shoal.errors import DataError, ShoalError
from shoal.metrics import SIZES, Histogram, emit_counter, emit_timer
from shoal.observe import audit
from shoal.observe.recent import RecentErrors
from shoal.serving.loop import ServingLoop
from shoal.serving.predict import Asked
from shoal.serving.security import ServerSecurity
from shoal.serving.server.admission import Admission
from shoal.serving.server.batching import Batcher, Pace
from shoal.serving.server.models import ServedModels, find_signature
from shoal.serving.server.servable import Tensors
from shoal.serving.status import Code, StatusError, invalid_argument
from shoal.serving.tensors import MAX_TENSOR_BYTES

Counted = Sequence[tuple[float, int]]
"""Values, and how many times each."""


class Traffic:
    """How many requests of each kind came lately, and how they went."""

    window = 10.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, str, float, int, int]] = deque(maxlen=200_000)
        self._total = 0
        self.failed = 0
        self.batch_requests, self.batch_rows = Histogram(SIZES), Histogram(SIZES)
        """Sizes of the batches that ran, a request that ran alone among them."""
        self.errors = RecentErrors()
        self._watched: list[Callable[[], None]] = []

    def watch(self, collect: Callable[[], None]) -> None:
        """Has somebody who counts by itself add its counts when they are needed, by calling `collect`."""
        self._watched.append(collect)

    def collect(self) -> None:
        """Adds what others have counted."""
        for each in self._watched:
            each()

    @property
    def total(self) -> int:
        """Requests so far."""
        self.collect()
        return self._total

    def add_batch(self, requests: int, rows: int) -> None:
        """Requests that ran together."""
        self.batch_requests.add(requests)
        self.batch_rows.add(rows)

    def add_batches(self, requests: Counted, rows: Counted) -> None:
        """Batches by their number of requests, and by their number of rows."""
        for histogram, sizes in ((self.batch_requests, requests), (self.batch_rows, rows)):
            for size, times in sizes:
                histogram.add(size, times)

    def add(self, model: str, signature: str, code: int, seconds: float, why: str = "") -> None:
        now = time.monotonic()
        if code:
            self.errors.note(why, where=f"{model} {signature}".strip() or "request", level="warning")
        with self._lock:
            self._total += 1
            self.failed += bool(code)
            self._recent.append((now, f"{model} {signature}", seconds, code, 1))
        tags = f"model_name={model}|signature_name={signature}"
        emit_timer("shoal_serving_latency_seconds", seconds, tags)
        if code:
            emit_counter("shoal_serving_errors", 1, f"{tags}|code={int(code)}")

    def add_many(self, model: str, signature: str, seconds: Sequence[float]) -> None:
        """Requests that were answered together."""
        now, key = time.monotonic(), f"{model} {signature}"
        with self._lock:
            self._total += len(seconds)
            self._recent.extend((now, key, each, 0, 1) for each in seconds)
        tags = f"model_name={model}|signature_name={signature}"
        for each in seconds:
            emit_timer("shoal_serving_latency_seconds", each, tags)

    def add_counted(self, model: str, signature: str, times: Counted) -> None:
        """Requests that were answered, by (seconds, how many)."""
        now, key = time.monotonic(), f"{model} {signature}"
        with self._lock:
            self._total += sum(count for _, count in times)
            self._recent.extend((now, key, seconds, 0, count) for seconds, count in times)
        for seconds, count in times:
            emit_timer(
                "shoal_serving_latency_seconds", seconds, f"model_name={model}|signature_name={signature}", count
            )

    def recent(self) -> dict[str, dict[str, float]]:
        """``"model signature"`` -> qps, p50_ms, p99_ms, errors over the last seconds."""
        self.collect()
        horizon = time.monotonic() - self.window
        with self._lock:
            recent = [each for each in self._recent if each[0] >= horizon]
        groups: dict[str, list[tuple[float, int, int]]] = {}
        for _, key, seconds, code, count in recent:
            groups.setdefault(key, []).append((seconds, code, count))
        result = {}
        for key, each in groups.items():
            times, codes, counts = (np.array(column) for column in zip(*sorted(each), strict=True))
            before = counts.cumsum()
            median, slow = (times[np.searchsorted(before, share * before[-1])] for share in (0.5, 0.99))
            result[key] = {
                "qps": float(before[-1]) / self.window,
                "p50_ms": float(median) * 1e3,
                "p99_ms": float(slow) * 1e3,
                "errors": int(counts[codes != 0].sum()),
            }
        return result


log = logging.getLogger(__name__)

PUSHES = ("assign", "shoal/commit")
"""How the signatures that change rows end."""
INLINE_BYTES = 1 << 16  # a larger request is not read on the event loop


class Answerer:
    """Answers requests on the event loop's thread; what takes long runs on the pool.

    Args:
        models: what there is.
        security: who may push.
        max_batch_rows: rows that micro-batching joins at most; 1 turns it off.
        max_request_bytes: what the tensors of one request may take.
        admission: how many requests of a model may be here.
    """

    def __init__(
        self,
        models: ServedModels,
        security: ServerSecurity,
        max_batch_rows: int,
        pool: Executor,
        loop: ServingLoop,
        traffic: Traffic,
        max_request_bytes: int = MAX_TENSOR_BYTES,
        admission: Admission | None = None,
    ) -> None:
        self._models, self._security, self._max_batch_rows = models, security, max_batch_rows
        self._pool, self._loop, self._traffic = pool, loop, traffic
        self._max_request_bytes = max_request_bytes
        self._admission = admission or Admission()

    async def answer(self, asked: Asked, enter: Callable[[], contextvars.Context]) -> Any:
        """``asked.finish(the model spec as it was resolved, serialised; outputs)``; ``enter`` gives the context of
        what runs on a thread of the pool."""
        spec = asked.spec
        name = spec.signature_name or "serving_default"
        begin = time.perf_counter()
        admitted = ""
        code, why, label = (
            0,
            "",
            ("", ""),
        )  # names that do not exist are not kept: callers could make any number of them
        try:
            with self._models.use(spec, asked.one_version) as version:
                where = f"model {spec.name!r} version {version.number}"
                signature = find_signature(version, name, where)
                label = (spec.name, name)
                if signature.push and not self._security.may_push(asked.identity):
                    raise StatusError(
                        Code.PERMISSION_DENIED, f"{asked.identity or 'this caller'!r} may not push to {where}"
                    )
                if not signature.push:
                    self._admission.enter(spec.name)
                    admitted = spec.name
                outputs = signature.spec.outputs
                wanted = asked.output_filter
                if unknown := [alias for alias in wanted if alias not in outputs]:
                    raise invalid_argument(f"{where}, {name!r} has no output {unknown}; it has {sorted(outputs)}")
                resolved = version.resolved(spec.name, name)
                place = f"{where}, signature {name!r}"
                check = partial(signature.check, place)

                def prepare() -> Tensors:
                    return signature.convert(asked.read(check))

                def complete(results: Tensors) -> Any:
                    return asked.finish(resolved, {alias: results[alias] for alias in wanted} if wanted else results)

                if signature.batch and self._max_batch_rows > 1:
                    batcher = version.batchers.get(name)
                    if batcher is None:
                        batcher = Batcher(
                            signature.run, partial(signature.join, place), self._max_batch_rows, self._pool, outputs,
                            self._traffic.add_batch,
                        )  # fmt: skip
                        version.batchers[name] = batcher
                    call = asked.call  # joined natively, its tensors take at most eight times its bytes
                    if call is not None and 8 * len(call.data) > self._max_request_bytes:
                        call = None
                    return await batcher.submit(prepare, complete, call, resolved)
                pace = version.paces.get(name)
                if pace is None:
                    pace = version.paces[name] = Pace(not signature.push and not signature.waits)
                work = partial(pace.timed, lambda: complete(signature.run(prepare())))
                if pace.short and (asked.call is None or len(asked.call.data) < INLINE_BYTES):
                    return work()
                return await self._loop.loop.run_in_executor(self._pool, enter().run, work)
        except StatusError as error:
            code, why = error.code, error.message
            raise
        except DataError as error:
            code, why = Code.INVALID_ARGUMENT, str(error)
            raise invalid_argument(str(error)) from None
        except (ShoalError, ValueError) as error:
            code, why = Code.INVALID_ARGUMENT, str(error)
            raise invalid_argument(f"model {spec.name!r}, signature {name!r}: {error}") from error
        except Exception as error:
            code, why = Code.INTERNAL, str(error)
            log.exception("model %s, signature %s failed", spec.name, name)
            raise StatusError(Code.INTERNAL, f"model {spec.name!r}, signature {name!r}: {error}") from error
        finally:
            if code and asked.spec.signature_name.endswith(PUSHES):
                audit.record("push refused", who=asked.identity, model=spec.name, signature=name, error=why)
            if admitted:
                self._admission.leave(admitted)
            self._traffic.add(*label, code, time.perf_counter() - begin, why)
