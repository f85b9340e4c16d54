"""Handles a Predict request: reads it, finds its model, checks it, batches or runs it, and times it."""

import contextlib
import contextvars
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

from shoal.errors import DataError, ShoalError
from shoal.observe import audit
from shoal.proto.serving.tf_serving_pb2 import ModelSpec
from shoal.serving.client.remote import ONE_VERSION, ROWS_PUSHED, set_request_deadline
from shoal.serving.loop import ServingLoop
from shoal.serving.predict import Asked, PredictCall, decode_request, encode_response
from shoal.serving.security import ServerSecurity
from shoal.serving.server.admission import Admission, Callers
from shoal.serving.server.batching import Batcher, Pace
from shoal.serving.server.models import ServedModels, find_signature
from shoal.serving.server.noting import Noting, Request
from shoal.serving.server.servable import Tensors
from shoal.serving.server.traffic import Traffic
from shoal.serving.status import Code, StatusError, abort, invalid_argument
from shoal.serving.sync.push import COMMIT, HELLO, INSTANCE, WEIGHTS, PushInfo, push_info

log = logging.getLogger(__name__)

PUSHES = ("assign", "shoal/commit")
"""Suffixes of the signatures that change rows."""
PUBLISHING = frozenset((HELLO, WEIGHTS, COMMIT))
INLINE_BYTES = 1 << 16  # a larger request is not read on the event loop


class Answerer:
    """Answers requests on the event loop's thread; slow work runs on the pool.

    Args:
        models: the models to answer from.
        security: who may push.
        callers: who may call, and how often.
        max_batch_rows: maximum rows that micro-batching joins; 1 disables it.
        max_request_bytes: maximum size of one request's decoded tensors.
        admission: limits the requests per model.
        noting: records individual requests.
        answered: called with each request that was answered and is not a push.
    """

    def __init__(
        self,
        models: ServedModels,
        security: ServerSecurity,
        callers: Callers,
        max_batch_rows: int,
        pool: Executor,
        loop: ServingLoop,
        traffic: Traffic,
        max_request_bytes: int,
        admission: Admission,
        noting: Noting,
        answered: Callable[[PredictCall], None],
    ) -> None:
        self._models, self._security, self._callers = models, security, callers
        self._max_batch_rows, self._max_request_bytes = max_batch_rows, max_request_bytes
        self._pool, self._loop, self._traffic = pool, loop, traffic
        self._admission, self._noting, self._answered = admission, noting, answered
        self._instance = uuid.uuid4().hex

    async def predict(self, data: bytes, context: Any) -> bytes:
        """The gRPC method: a serialised PredictRequest in, a PredictResponse out."""
        metadata = context.invocation_metadata() or ()
        with self._noting.request("Predict", metadata, context.peer(), getattr(context, "sampled", None)) as seen:
            seen.bytes = len(data)
            return await self._predict(data, context, seen)

    async def _predict(self, data: bytes, context: Any, seen: Request) -> bytes:
        spec = ModelSpec()
        try:
            identity = seen.identity = self._callers.identify(context)
            call = decode_request(data)
            spec = call.spec
            seen.model, seen.signature = spec.name, spec.signature_name or "serving_default"
            pushing = spec.signature_name.endswith("assign") or spec.signature_name in PUBLISHING
            if pushing:
                context.set_trailing_metadata(((INSTANCE, self._instance),))

            def enter() -> contextvars.Context:
                left = context.time_remaining()
                inside = contextvars.copy_context()
                inside.run(set_request_deadline, left if left is not None and left < 1e6 else None)
                if pushing:
                    info = PushInfo.of(context.invocation_metadata() or ())
                    inside.run(push_info.set, replace(info, model=spec.name, identity=identity, peer=context.peer()))
                return inside

            read = partial(call.tensors, max_bytes=self._max_request_bytes)
            asked = Asked(spec, read, call.output_filter, identity, encode_response, call)
            asked.one_version = wants_one_version(spec, context)
            answer = await self.answer(asked, enter)
            if not pushing:
                self._answered(call)
            return answer
        except DataError as error:
            wrong = invalid_argument(f"the request is malformed: {error}")
            seen.failed(wrong.code, wrong.message)
            return await abort(context, wrong)
        except StatusError as error:
            seen.failed(error.code, error.message)
            tell_of_pushes(self._models, error, spec, context)
            return await abort(context, error)

    async def answer(self, asked: Asked, enter: Callable[[], contextvars.Context]) -> Any:
        """``asked.finish(the model spec as it was resolved, serialised; outputs)``; ``enter`` gives the context of
        what runs on a thread of the pool."""
        spec = asked.spec
        name = spec.signature_name or "serving_default"
        begin = time.perf_counter()
        admitted = ""
        code, why, label = 0, "", ("", "")  # unknown names are not kept: callers could send any number of them
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
                    call = asked.call  # when joined natively, its tensors take at most eight times its bytes
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


def wants_one_version(spec: ModelSpec, context: Any) -> bool:
    """Whether a call is part of a prediction whose parts must all come from the version that it names."""
    return spec.HasField("version") and any(key == ONE_VERSION for key, _ in context.invocation_metadata())


def tell_of_pushes(models: ServedModels, error: StatusError, spec: ModelSpec, context: Any) -> None:
    """Tell an entry that asked for a missing version if it can do without that version because rows are pushed."""
    if error.code == Code.NOT_FOUND and wants_one_version(spec, context):
        with contextlib.suppress(StatusError):
            if models.model(spec.name).rows_are_pushed(models.polls):
                context.set_trailing_metadata(((ROWS_PUSHED, "1"),))
