"""`ModelServer`: TF-Serving's gRPC services and REST form over exported directories and live tables."""

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from shoal.errors import ConfigError
from shoal.observe import audit
from shoal.observe.lines import AccessLog
from shoal.proto.serving.tf_serving_pb2 import (
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    GetModelStatusRequest,
    GetModelStatusResponse,
    ModelServerConfig,
    ReloadConfigRequest,
    ReloadConfigResponse,
)
from shoal.serving.grpc_server import NOT_SERVING, SERVING, add_async_health_and_reflection, unary
from shoal.serving.loop import serving_loop
from shoal.serving.predict import PREDICT, Asked, PredictCall
from shoal.serving.security import PUSH_MESSAGE_BYTES, ServerSecurity, bind
from shoal.serving.server.admission import MAX_WAITING, Admission, Callers
from shoal.serving.server.answering import Answerer, tell_of_pushes, wants_one_version
from shoal.serving.server.front.lanes import LaneRunners
from shoal.serving.server.front.server import NativeServer, chosen_front
from shoal.serving.server.loading import LoadedModels, check_base_path
from shoal.serving.server.net.placement import Placement
from shoal.serving.server.noting import Noting
from shoal.serving.server.servable import Tensors
from shoal.serving.server.traffic import Traffic
from shoal.serving.status import Code, StatusError, abort, invalid_argument

log = logging.getLogger(__name__)

PREDICTION = "tensorflow.serving.PredictionService"
MODELS = "tensorflow.serving.ModelService"
OPEN_SECS = 30.0
READY_SECS = 0.5
GPU_BATCHES = (8, 1 << 20, 6)
"""For a GPU: requests worth a batch while another runs, bytes of a batch's requests, and concurrent batches."""
PREDICT_SECS = 30.0  # deadline of a REST request, as in TF-Serving


class ModelServer(LoadedModels):
    """Serves models over gRPC and REST.

    Args:
        address: ``host:port`` of gRPC; port 0 picks a free one.
        rest_address: ``host:port`` of REST, metrics and the status page; None disables them.
        config: the initial models.
        poll_wait_seconds: time between checks for new versions; 0 = check only once.
        security: the credentials that clients must present; required unless the address is loopback.
        model_root: base paths must be inside this folder; None = any path, except that paths received over the network
            must be where models are or were served from.
        max_message_bytes: larger requests are refused before they are read. It also limits the total size of a
            request's decoded tensors, which is checked before memory is allocated.
        max_batch_rows: maximum rows that micro-batching joins; 1 disables it, 0 = 1,024, or 8,192 on a GPU.
        workers: threads for work outside the event loop: pushes, calls to other servers, long batches.
        front: the gRPC implementation: ``native``, ``python``, or ``auto`` (native if it was built).
        max_waiting: maximum waiting requests per model; further ones are refused with RESOURCE_EXHAUSTED.
        model_limits: model -> its own ``max_waiting``.
        access_log: the log of individual requests.
        rate_limit: requests per second of each caller (a token's or certificate's name, else an IP address); further
            ones are refused with RESOURCE_EXHAUSTED. 0: no limit.
        rate_limits: caller -> its own ``rate_limit``.
        device: the device for the rows and nets of exports: ``cpu``, ``cuda`` or ``cuda:N``.
        precision: ``fp32``, or ``bf16`` for matrix products in bfloat16.
        compiled: whether to run the compiled nets of exports. They are machine code: set it only for exports that you
            trust.
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
        self.polls = poll_wait_seconds > 0
        self.security = security if security is not None else ServerSecurity()
        self.max_message_bytes = max_message_bytes
        self.started_at = time.time()
        self._rest_address = rest_address
        self._stop = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._rest: Any = None
        self.traffic = Traffic()
        self._pool = futures.ThreadPoolExecutor(workers, "shoal-work")
        self._loop = serving_loop()
        self.admission = Admission(max_waiting, model_limits)
        self.front = chosen_front(front, self.security)
        """The gRPC implementation in use: ``native`` or ``python``."""
        self._callers = Callers(self.security, rate_limit, rate_limits, counted=self.front == "native")
        self.rates = self._callers.rates
        self.noting = Noting(self.security, access_log)
        self._answerer = Answerer(
            self, self.security, self._callers, max_batch_rows, self._pool, self._loop, self.traffic, max_message_bytes,
            self.admission, self.noting, self._consider,
        )  # fmt: skip
        self._max_batch_rows = max_batch_rows
        self._lanes: LaneRunners | None = None
        self._server: Any = None
        self._health: Any = None
        self._listens = False
        self._readiness: asyncio.Task[None] | None = None
        self.rest_port: int | None = None
        self.rest_address: str | None = None
        """``host:port`` of REST; set by :meth:`start`."""
        if config is not None:
            self._configure(config)
        self.port = self._loop.call(self._open(address), OPEN_SECS)
        self.address = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{self.port}"
        """``host:port`` that it listens on, with the actual port."""

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
        """A ``grpc.aio.server``, or the native front end with the same interface."""
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
        """Load the configured models, then start to answer requests; returns itself. A second call has no effect."""
        if self.stopping:
            raise ConfigError("a server that was stopped cannot be started again; create another one")
        if self._listens:
            return self
        with self._loading:
            self._refresh(at_once=True)  # this server's own sub-graphs cannot be called before it listens
        try:
            if self._rest_address is not None:
                from shoal.serving.server.rest.http import RestServer

                self._rest = RestServer(self, self._rest_address)
                self.rest_port, self.rest_address = self._rest.port, self._rest.address
                self._rest.start()
            self._loop.call(self._listen(), OPEN_SECS)
        except BaseException:
            self.stop(0)  # leave nothing open
            raise
        if self.poll_wait_seconds > 0:
            self._thread = threading.Thread(target=self._poll, name="shoal-serve-poll", daemon=True)
            self._thread.start()
        return self

    def stop(self, grace: float | None = None) -> None:
        """Stop: report NOT_SERVING, refuse new requests, and give running ones ``grace`` seconds."""
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
        """The number of requests answered without the interpreter so far."""
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
        if not self._listens:  # stopping a server that never started does not free its port
            await self._listen()
        await self._server.stop(grace)

    def not_ready(self) -> str:
        """Why requests should go to another server for now; "" if this server is ready."""
        if self.stopping:
            return "this server is stopping"
        if self.admission.overloaded():
            return "requests are refused because too many are waiting"
        missing = [model.name for model in self.models() if model.base is not None and model.current() is None]
        return f"models {sorted(missing)} have no available version" if missing else ""

    async def _tell_readiness(self) -> None:
        """Update the prediction service's health. The server's own health only reports that it is alive."""
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
                log.exception("could not look for new versions")

    # --- Predict ----------------------------------------------------------------------------------------------------

    def predict(self, asked: Asked) -> tuple[bytes, Tensors]:
        """Answer one request: (the resolved model spec, outputs). Any thread except the loop's may call it."""
        try:
            return self._loop.call(self._answerer.answer(asked, contextvars.copy_context), PREDICT_SECS)
        except TimeoutError:
            raise StatusError(Code.DEADLINE_EXCEEDED, f"the request took more than {PREDICT_SECS:.0f} s") from None

    def _consider(self, call: PredictCall) -> None:
        """Let the native front end answer requests like this one itself, if it can."""
        if self._lanes is not None:
            self._lanes.consider(call)

    # --- the other methods ------------------------------------------------------------------------------------------

    async def _get_metadata(self, request: GetModelMetadataRequest, context: Any) -> GetModelMetadataResponse:
        try:
            self._callers.identify(context)
            unknown = [each for each in request.metadata_field if each != "signature_def"]
            if unknown or not request.metadata_field:
                raise invalid_argument(f"metadata_field must be signature_def, got {list(request.metadata_field)}")
            response = GetModelMetadataResponse()
            spec, signatures = self.metadata(request.model_spec, wants_one_version(request.model_spec, context))
            response.model_spec.CopyFrom(spec)
            response.metadata["signature_def"].Pack(signatures)
            return response
        except StatusError as error:
            tell_of_pushes(self, error, request.model_spec, context)
            return await abort(context, error)

    async def _get_status(self, request: GetModelStatusRequest, context: Any) -> GetModelStatusResponse:
        try:
            self._callers.identify(context)
            return self.status(request.model_spec)
        except StatusError as error:
            return await abort(context, error)

    async def _reload(self, request: ReloadConfigRequest, context: Any) -> ReloadConfigResponse:
        response = ReloadConfigResponse()
        response.status.error_code = 0
        identity = ""
        try:
            identity = self._callers.identify(context)
            if not self.security.may_push(identity):
                raise StatusError(Code.PERMISSION_DENIED, f"{identity!r} may not change what this server serves")
            if not request.config.HasField("model_config_list"):
                raise invalid_argument("the config must have a model_config_list, which may be empty")
            for each in request.config.model_config_list.config:
                check_base_path(each.base_path, self._roots())
            await self._loop.loop.run_in_executor(self._pool, self.reload, request.config)
            self._audit_reload(request, identity, context.peer(), "")
        except (StatusError, ConfigError) as error:
            self._audit_reload(request, identity, context.peer(), str(error))
            return await abort(context, error if isinstance(error, StatusError) else invalid_argument(str(error)))
        return response

    def _audit_reload(self, request: ReloadConfigRequest, identity: str, peer: str, error: str) -> None:
        models = {each.name: each.base_path for each in request.config.model_config_list.config}
        audit.record("reload", who=identity, peer=peer, models=models, error=error)

    def _handlers(self) -> dict[str, dict[str, Any]]:
        prediction = {
            "Predict": unary(self._answerer.predict),
            "GetModelMetadata": self._unary(self._get_metadata, GetModelMetadataRequest, GetModelMetadataResponse),
        }
        models = {
            "GetModelStatus": self._unary(self._get_status, GetModelStatusRequest, GetModelStatusResponse),
            "HandleReloadConfigRequest": self._unary(self._reload, ReloadConfigRequest, ReloadConfigResponse),
        }
        return {PREDICTION: prediction, MODELS: models}

    def _unary(self, handler: Callable, request: Any, response: Any) -> Any:
        """A handler of messages that reports malformed ones."""

        async def handle(data: bytes, context: Any) -> Any:
            try:
                message = request.FromString(data)
            except DecodeError as error:
                name = request.DESCRIPTOR.name
                return await abort(context, invalid_argument(f"the request is not a {name}: {error}"))
            return await handler(message, context)

        return unary(handle, None, response)

    def admit(self, identity: str | None, peer: str) -> None:
        """Count a caller's request; raises Overloaded if the caller is over its rate limit."""
        self._callers.admit(identity, peer)
