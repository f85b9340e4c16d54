"""`ModelServer`: TF-Serving's gRPC services and REST form over exported directories and live tables."""

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from shoal import _core
from shoal.errors import ConfigError, DataError
from shoal.metrics import emit_counter
from shoal.observe import audit
from shoal.observe.lines import AccessLog
from shoal.proto.serving.tf_serving_pb2 import (
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    GetModelStatusRequest,
    GetModelStatusResponse,
    ModelServerConfig,
    ModelSpec,
    ReloadConfigRequest,
    ReloadConfigResponse,
)
from shoal.serving.client.remote import ONE_VERSION, ROWS_PUSHED, set_request_deadline
from shoal.serving.grpc_server import NOT_SERVING, SERVING, add_async_health_and_reflection, unary
from shoal.serving.loop import serving_loop
from shoal.serving.predict import PREDICT, Asked, PredictCall, decode_request, encode_response
from shoal.serving.security import PUSH_MESSAGE_BYTES, ServerSecurity, bind, caller
from shoal.serving.server.admission import MAX_WAITING, Admission, Overloaded
from shoal.serving.server.answering import Answerer, Traffic
from shoal.serving.server.front.lanes import LaneRunners
from shoal.serving.server.front.server import NativeServer, chosen_front
from shoal.serving.server.loading import LoadedModels, check_base_path
from shoal.serving.server.net.placement import Placement
from shoal.serving.server.noting import Noting, Request
from shoal.serving.server.servable import Tensors
from shoal.serving.status import Code, StatusError, invalid_argument
from shoal.serving.sync.push import COMMIT, HELLO, INSTANCE, WEIGHTS, PushInfo, push_info

log = logging.getLogger(__name__)

PREDICTION = "tensorflow.serving.PredictionService"
MODELS = "tensorflow.serving.ModelService"
OPEN_SECS = 30.0
READY_SECS = 0.5
GPU_BATCHES = (8, 1 << 20, 6)
"""For a GPU: requests that are worth a batch while another one runs, bytes of a batch's requests, batches at a time.
While one is on the card, others are read and answered."""
PREDICT_SECS = 30.0  # of a request that came over REST, as TF-Serving has it
PUBLISHING = frozenset((HELLO, WEIGHTS, COMMIT))
MAX_DETAILS = 2000  # characters of an error; gRPC sends them as a header, which is bounded


class ModelServer(LoadedModels):
    """Serves models.

    Args:
        address: ``host:port`` of gRPC; port 0 picks a free one.
        rest_address: ``host:port`` of REST, metrics and the status page; None = none.
        config: the models at first.
        poll_wait_seconds: time between looks for new versions; 0 = look once.
        security: what clients must show; off loopback it is required.
        model_root: base paths must be inside; None = any, but those that come over the network must be where models are
            served from already.
        max_message_bytes: larger requests are refused before they are read; the tensors of a request may take as many
            bytes when they are decoded, all together, or it is refused before memory is taken for them.
        max_batch_rows: rows that micro-batching joins at most; 1 turns it off, 0 = 1,024, on a GPU 8,192.
        workers: threads for what does not run on the event loop: pushes, calls of other servers, long batches.
        front: what speaks gRPC: ``native``, ``python``, or ``auto``, which is native where that was built.
        max_waiting: requests of one model that may wait; further ones are refused with RESOURCE_EXHAUSTED.
        model_limits: model -> the same for that model.
        access_log: where single requests are logged.
        rate_limit: requests per second of each caller (a token's or certificate's name, else an IP address); further
            ones are refused with RESOURCE_EXHAUSTED. 0: as many as they like.
        rate_limits: caller -> the same for that caller.
        device: where rows and nets of exports are: ``cpu``, ``cuda`` or ``cuda:N``.
        precision: ``fp32``, or ``bf16`` for products of matrices in bfloat16.
        compiled: whether nets that were compiled at export are run as such: machine code that comes with the export.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        rest_address: str | None = None,
        config: ModelServerConfig | None = None,
        poll_wait_seconds: float = 1,
        *,
        security: ServerSecurity | None = None,
        model_root: str | Path | None = None,
        max_message_bytes: int = PUSH_MESSAGE_BYTES,
        max_batch_rows: int = 0,
        workers: int = 96,
        front: str = "auto",
        max_waiting: int = MAX_WAITING,
        model_limits: Mapping[str, int] | None = None,
        access_log: AccessLog | None = None,
        rate_limit: float = 0.0,
        rate_limits: Mapping[str, float] | None = None,
        device: str = "cpu",
        precision: str = "fp32",
        compiled: bool = False,
    ) -> None:
        super().__init__(
            model_root, Placement(device=device, precision=precision, max_batch_rows=max_batch_rows, compiled=compiled)
        )
        max_batch_rows = self.placement.batch_rows
        self.poll_wait_seconds = poll_wait_seconds
        self.security = security if security is not None else ServerSecurity()
        self._authenticates = self.security.authenticates
        self.max_message_bytes = max_message_bytes
        self.started_at = time.time()
        self.instance = uuid.uuid4().hex
        self._rest_address = rest_address
        self._stop = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._rest: Any = None
        self.traffic = Traffic()
        self._pool = futures.ThreadPoolExecutor(workers, "shoal-work")
        self._loop = serving_loop()
        self.admission = Admission(max_waiting, model_limits)
        self.rates = make_rates(rate_limit, rate_limits)
        self.noting = Noting(self.security, access_log)
        self._answerer = Answerer(
            self, self.security, max_batch_rows, self._pool, self._loop, self.traffic, max_message_bytes, self.admission
        )
        self.front = chosen_front(front, self.security)
        """What speaks gRPC: ``native`` or ``python``."""
        self._max_batch_rows = max_batch_rows
        self._lanes: LaneRunners | None = None
        self._server: Any = None
        self._health: Any = None
        self._listens = False
        self._readiness: asyncio.Task[None] | None = None
        self.rest_port: int | None = None
        self.rest_address: str | None = None
        """``host:port`` of REST, from :meth:`start` on."""
        if config is not None:
            self._configure(config)
        self.port = self._loop.call(self._open(address), OPEN_SECS)
        self.address = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{self.port}"
        """``host:port`` that it listens on, with the port that was picked."""

    # --- life -------------------------------------------------------------------------------------------------------

    async def _open(self, address: str) -> int:
        server = self._make_server()
        for service, handlers in self._handlers().items():
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
            server.add_registered_method_handlers(service, handlers)
        self._server = server
        self._health = await add_async_health_and_reflection(server, (PREDICTION, MODELS))
        return bind(server, address, self.security)

    def _make_server(self) -> Any:
        """What ``grpc.aio.server`` makes, or the same by the native front end."""
        if self.front == "native":
            server = NativeServer(
                self.security, self.max_message_bytes, batches=[PREDICT], max_waiting=self.admission.max_waiting,
                rates=self.rates,
            )  # fmt: skip
            self.admission.watch(server.front)
            if self.placement.on_gpu:
                server.front.set_python(*GPU_BATCHES)
            if self._max_batch_rows > 1:
                self._lanes = LaneRunners(server.front, self, self.traffic, self._max_batch_rows)
            return server
        return grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ]
        )

    def start(self) -> "ModelServer":
        """Loads the configured models, then answers; returns itself."""
        with self._loading:
            self._refresh(at_once=True)  # sub-graphs of this server cannot be asked before it listens
        try:
            if self._rest_address is not None:
                from shoal.serving.server.rest.http import RestServer

                self._rest = RestServer(self, self._rest_address)
                self.rest_port, self.rest_address = self._rest.port, self._rest.address
                self._rest.start()
            self._loop.call(self._listen(), OPEN_SECS)
        except BaseException:
            self.stop(0)  # no half of it stays open
            raise
        if self.poll_wait_seconds > 0:
            self._thread = threading.Thread(target=self._poll, name="shoal-serve-poll", daemon=True)
            self._thread.start()
        return self

    def stop(self, grace: float | None = None) -> None:
        """Health says NOT_SERVING, new requests are refused, running ones get ``grace`` seconds."""
        self._stop.set()
        try:
            self._loop.call(self._close(grace), (grace or 0) + OPEN_SECS)
        finally:
            if self._lanes is not None:
                self._lanes.stop()
                self.noting.collect()
            if self._rest is not None:
                self._rest.stop()
            if self._thread is not None:
                self._thread.join(timeout=10)
            self._pool.shutdown(wait=False)
            self._stopped.set()

    @property
    def native_requests(self) -> int:
        """Requests that were answered without the interpreter, of all so far."""
        if self._lanes is None:
            return 0
        self._lanes.collect()
        return self._lanes.native_requests

    @property
    def stopping(self) -> bool:
        """Whether :meth:`stop` has been called."""
        return self._stop.is_set()

    async def _listen(self) -> None:
        await self._server.start()
        if self._lanes is not None:
            self._lanes.start()
            self.noting.watch(self._server.front, self._lanes)
        self._listens = True
        self._readiness = asyncio.get_running_loop().create_task(self._tell_readiness())

    async def _close(self, grace: float | None) -> None:
        await self._health.enter_graceful_shutdown()
        if self._readiness is not None:
            self._readiness.cancel()
        if not self._listens:  # a server that never started keeps its port when it is stopped
            await self._listen()
        await self._server.stop(grace)

    def not_ready(self) -> str:
        """Why requests should go elsewhere for now, "" when they may come."""
        if self.stopping:
            return "this server is stopping"
        if self.admission.overloaded():
            return "requests are refused since too many are waiting"
        missing = [model.name for model in self.models() if model.base is not None and model.current() is None]
        return f"models {sorted(missing)} have no available version" if missing else ""

    async def _tell_readiness(self) -> None:
        """Health of the prediction service follows; that of the server as a whole says that it is alive."""
        before = SERVING
        while True:
            await asyncio.sleep(READY_SECS)
            self.traffic.collect()
            self.noting.collect()
            now = NOT_SERVING if self.admission.overloaded() else SERVING
            if now != before:
                log.warning("requests are refused: overloaded" if now == NOT_SERVING else "requests are taken again")
                await self._health.set(PREDICTION, now)
                before = now

    def wait_for_termination(self, timeout: float | None = None) -> None:
        self._stopped.wait(timeout)

    def _poll(self) -> None:
        while not self._stop.wait(self.poll_wait_seconds):
            try:
                self.refresh()
            except Exception:
                log.exception("looking for new versions failed")

    # --- Predict ----------------------------------------------------------------------------------------------------

    def predict(self, asked: Asked) -> tuple[bytes, Tensors]:
        """Answers one request from any thread but the loop's: (the model spec as it was resolved, outputs)."""
        try:
            return self._loop.call(self._answerer.answer(asked, contextvars.copy_context), PREDICT_SECS)
        except TimeoutError:
            raise StatusError(Code.DEADLINE_EXCEEDED, f"the request took more than {PREDICT_SECS:.0f} s") from None

    async def _predict(self, data: bytes, context: Any) -> bytes:
        metadata = context.invocation_metadata() or ()
        with self.noting.request("Predict", metadata, context.peer(), getattr(context, "sampled", None)) as seen:
            seen.bytes = len(data)
            return await self._predict_one(data, context, seen)

    async def _predict_one(self, data: bytes, context: Any, seen: Request) -> bytes:
        spec = ModelSpec()
        try:
            identity = seen.identity = self._identify(context)
            call: PredictCall = decode_request(data)
            spec = call.spec
            seen.model, seen.signature = spec.name, spec.signature_name or "serving_default"
            pushing = call.spec.signature_name.endswith("assign") or call.spec.signature_name in PUBLISHING
            if pushing:
                context.set_trailing_metadata(((INSTANCE, self.instance),))

            def enter() -> contextvars.Context:
                left = context.time_remaining()
                inside = contextvars.copy_context()
                inside.run(set_request_deadline, left if left is not None and left < 1e6 else None)
                if pushing:
                    info = PushInfo.of(context.invocation_metadata() or ())
                    inside.run(push_info.set, replace(info, model=spec.name, identity=identity, peer=context.peer()))
                return inside

            read = partial(call.tensors, max_bytes=self.max_message_bytes)
            asked = Asked(call.spec, read, call.output_filter, identity, encode_response, call)
            asked.one_version = _one_version(spec, context)
            answer = await self._answerer.answer(asked, enter)
            if self._lanes is not None and not pushing:
                self._lanes.consider(call)
            return answer
        except DataError as error:
            wrong = invalid_argument(f"the request is not a PredictRequest: {error}")
            seen.failed(wrong.code, wrong.message)
            return await self._abort(context, wrong)
        except StatusError as error:
            seen.failed(error.code, error.message)
            if error.code == Code.NOT_FOUND:
                self._tell_of_pushes(spec, context)
            return await self._abort(context, error)

    # --- the other methods ------------------------------------------------------------------------------------------

    async def _get_metadata(self, request: GetModelMetadataRequest, context: Any) -> GetModelMetadataResponse:
        try:
            self._identify(context)
            unknown = [each for each in request.metadata_field if each != "signature_def"]
            if unknown or not request.metadata_field:
                raise invalid_argument(f"metadata_field must be signature_def, got {list(request.metadata_field)}")
            response = GetModelMetadataResponse()
            spec, signatures = self.metadata(request.model_spec, _one_version(request.model_spec, context))
            response.model_spec.CopyFrom(spec)
            response.metadata["signature_def"].Pack(signatures)
            return response
        except StatusError as error:
            if error.code == Code.NOT_FOUND:
                self._tell_of_pushes(request.model_spec, context)
            return await self._abort(context, error)

    async def _get_status(self, request: GetModelStatusRequest, context: Any) -> GetModelStatusResponse:
        try:
            self._identify(context)
            return self.status(request.model_spec)
        except StatusError as error:
            return await self._abort(context, error)

    async def _reload(self, request: ReloadConfigRequest, context: Any) -> ReloadConfigResponse:
        response = ReloadConfigResponse()
        response.status.error_code = 0
        identity = ""
        try:
            identity = self._identify(context)
            if not self.security.may_push(identity):
                raise StatusError(Code.PERMISSION_DENIED, f"{identity!r} may not change what this server serves")
            for each in request.config.model_config_list.config:
                check_base_path(each.base_path, self._roots())
            await self._loop.loop.run_in_executor(self._pool, self.reload, request.config)
            self._audit_reload(request, identity, context.peer(), "")
        except (StatusError, ConfigError) as error:
            self._audit_reload(request, identity, context.peer(), str(error))
            return await self._abort(context, error if isinstance(error, StatusError) else invalid_argument(str(error)))
        return response

    def _audit_reload(self, request: ReloadConfigRequest, identity: str, peer: str, error: str) -> None:
        models = {each.name: each.base_path for each in request.config.model_config_list.config}
        audit.record("reload", who=identity, peer=peer, models=models, error=error)

    def _tell_of_pushes(self, spec: ModelSpec, context: Any) -> None:
        """An entry that asks for a version which is not here may learn that it need not be."""
        if _one_version(spec, context):
            with contextlib.suppress(StatusError):
                if self.model(spec.name).rows_are_pushed(self.poll_wait_seconds > 0):
                    context.set_trailing_metadata(((ROWS_PUSHED, "1"),))

    def _handlers(self) -> dict[str, dict[str, Any]]:
        prediction = {
            "Predict": unary(self._predict),
            "GetModelMetadata": self._unary(self._get_metadata, GetModelMetadataRequest, GetModelMetadataResponse),
        }
        models = {
            "GetModelStatus": self._unary(self._get_status, GetModelStatusRequest, GetModelStatusResponse),
            "HandleReloadConfigRequest": self._unary(self._reload, ReloadConfigRequest, ReloadConfigResponse),
        }
        return {PREDICTION: prediction, MODELS: models}

    def _unary(self, handler: Callable, request: Any, response: Any) -> Any:
        """A handler of messages that says so where it gets other bytes."""

        async def handle(data: bytes, context: Any) -> Any:
            try:
                message = request.FromString(data)
            except DecodeError as error:
                name = request.DESCRIPTOR.name
                return await self._abort(context, invalid_argument(f"the request is not a {name}: {error}"))
            return await handler(message, context)

        return unary(handle, None, response)

    def _identify(self, context: Any) -> str:
        identity = caller(context, self.security) if self._authenticates else ""
        if self.front != "native":  # which has counted it already
            self.admit(identity, context.peer())
        if identity is None:
            emit_counter("shoal_serving_unauthenticated", 1)
            raise StatusError(Code.UNAUTHENTICATED, "no known token or certificate; send authorization: Bearer …")
        return identity

    def admit(self, identity: str | None, peer: str) -> None:
        """Counts a request of a caller; raises Overloaded where it has asked too often."""
        if self.rates is not None and not self.rates.admit(identity or peer.rpartition(":")[0]):
            raise Overloaded(
                Code.RESOURCE_EXHAUSTED,
                f"{identity or 'this caller'} makes more requests per second than it may; try again later",
            )

    async def _abort(self, context: Any, error: StatusError) -> Any:
        text = error.message
        if len(text) > MAX_DETAILS:
            text = f"{text[:MAX_DETAILS]} … ({len(text)} characters)"
        if error.metadata:
            context.set_trailing_metadata(error.metadata)
        await context.abort(_CODES[error.code], text)


def make_rates(limit: float, limits: Mapping[str, float] | None) -> Any:
    """What counts the requests of callers, None without limits."""
    for name, each in {"rate_limit": limit, **(limits or {})}.items():
        if each < 0:
            raise ConfigError(f"the limit of requests per second, {name}, must be at least 0, got {each:g}")
    if not limit and not limits:
        return None
    rates = _core.Rates(limit)
    for name, each in (limits or {}).items():
        rates.set(name, each)
    return rates


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _one_version(spec: ModelSpec, context: Any) -> bool:
    return spec.HasField("version") and any(key == ONE_VERSION for key, _ in context.invocation_metadata())
