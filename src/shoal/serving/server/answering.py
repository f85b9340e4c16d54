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

import torch

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


class Traffic:
    """How many requests of each kind came lately, and how they went."""

    window = 10.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, str, float, int]] = deque(maxlen=200_000)
        self.total = 0
        self.failed = 0
        self.batch_requests, self.batch_rows = Histogram(SIZES), Histogram(SIZES)
        """Sizes of the batches that ran, a request that ran alone among them."""
        self.errors = RecentErrors()

    def add_batch(self, requests: int, rows: int) -> None:
        """Requests that ran together."""
        self.batch_requests.add(requests)
        self.batch_rows.add(rows)

    def add(self, model: str, signature: str, code: int, seconds: float, why: str = "") -> None:
        now = time.monotonic()
        if code:
            self.errors.note(why, where=f"{model} {signature}".strip() or "request", level="warning")
        with self._lock:
            self.total += 1
            self.failed += bool(code)
            self._recent.append((now, f"{model} {signature}", seconds, code))
        tags = f"model_name={model}|signature_name={signature}"
        emit_timer("shoal_serving_latency_seconds", seconds, tags)
        if code:
            emit_counter("shoal_serving_errors", 1, f"{tags}|code={int(code)}")

    def add_many(self, model: str, signature: str, seconds: Sequence[float]) -> None:
        """Requests that were answered together."""
        now, key = time.monotonic(), f"{model} {signature}"
        with self._lock:
            self.total += len(seconds)
            self._recent.extend((now, key, each, 0) for each in seconds)
        tags = f"model_name={model}|signature_name={signature}"
        for each in seconds:
            emit_timer("shoal_serving_latency_seconds", each, tags)

    def recent(self) -> dict[str, dict[str, float]]:
        """``"model signature"`` -> qps, p50_ms, p99_ms, errors over the last seconds."""
        horizon = time.monotonic() - self.window
        with self._lock:
            recent = [each for each in self._recent if each[0] >= horizon]
        groups: dict[str, list[tuple[float, int]]] = {}
        for _, key, seconds, code in recent:
            groups.setdefault(key, []).append((seconds, code))
        result = {}
        for key, each in groups.items():
            times = torch.tensor([seconds for seconds, _ in each], dtype=torch.float64, device="cpu")
            result[key] = {
                "qps": len(each) / self.window,
                "p50_ms": float(times.quantile(0.5)) * 1e3 if len(times) < 1_000_000 else 0.0,
                "p99_ms": float(times.quantile(0.99)) * 1e3 if len(times) < 1_000_000 else 0.0,
                "errors": sum(1 for _, code in each if code),
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
