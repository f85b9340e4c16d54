"""`ModelServer`: TF-Serving's gRPC services and REST form over exported directories and live tables."""

import contextvars
import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from shoal.errors import ConfigError, DataError, ShoalError
from shoal.proto.serving.tf_serving_pb2 import (
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    GetModelStatusRequest,
    GetModelStatusResponse,
    ModelConfig,
    ModelServerConfig,
    ModelSpec,
    ReloadConfigRequest,
    ReloadConfigResponse,
    SignatureDefMap,
)
from shoal.serving.batching import Batcher, Pace
from shoal.serving.grpc_server import add_async_health_and_reflection, unary
from shoal.serving.loop import serving_loop
from shoal.serving.predict import Asked, PredictCall, decode_request, encode_response
from shoal.serving.push import INSTANCE, TOUCHED_AT
from shoal.serving.remote import set_request_deadline
from shoal.serving.security import PUSH_MESSAGE_BYTES, ServerSecurity, bind, caller
from shoal.serving.servable import Tensors, live_servable, touched_at
from shoal.serving.status import Code, StatusError, invalid_argument, not_found
from shoal.serving.tensors import dtype_code
from shoal.serving.traffic import Traffic
from shoal.serving.versions import Model, check_base_path, find_signature

log = logging.getLogger(__name__)

PREDICTION = "tensorflow.serving.PredictionService"
MODELS = "tensorflow.serving.ModelService"
OPEN_SECS = 30.0
PREDICT_SECS = 30.0  # of a request that came over REST, as TF-Serving has it
INLINE_BYTES = 1 << 16  # a larger request is not read on the event loop


class ModelServer:
    """Serves models.

    Args:
        address: ``host:port`` of gRPC; port 0 picks a free one.
        rest_address: ``host:port`` of REST, metrics and the status page; None = none.
        config: the models at first.
        poll_wait_seconds: time between looks for new versions; 0 = look once.
        security: what clients must show; off loopback it is required.
        model_root: base paths must lie inside; None = any.
        max_message_bytes: larger requests are refused before they are read, larger tensors before they are made.
        max_batch_rows: rows that micro-batching joins at most; 1 turns it off.
        workers: threads for what does not run on the event loop: pushes, calls of other servers, long batches.
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
        max_batch_rows: int = 1024,
        workers: int = 96,
    ) -> None:
        self.address = address
        self.poll_wait_seconds = poll_wait_seconds
        self.security = security if security is not None else ServerSecurity()
        self.max_message_bytes = max_message_bytes
        self.started_at = time.time()
        self.instance = uuid.uuid4().hex
        self._rest_address = rest_address
        self._model_root = Path(model_root) if model_root is not None else None
        self._max_batch_rows = max_batch_rows
        self._models: dict[str, Model] = {}
        self._aliases: dict[str, str] = {}
        self._lock = threading.RLock()
        self._loading = threading.Lock()
        self._stop = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._rest: Any = None
        self.traffic = Traffic()
        self._pool = futures.ThreadPoolExecutor(workers, "shoal-work")
        self._loop = serving_loop()
        self._server: Any = None
        self._health: Any = None
        self.port = self._loop.call(self._open(), OPEN_SECS)
        self.rest_port: int | None = None
        if config is not None:
            self._configure(config)

    # --- life -------------------------------------------------------------------------------------------------------

    async def _open(self) -> int:
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ]
        )
        self._server.add_generic_rpc_handlers(self._handlers())
        self._health = await add_async_health_and_reflection(self._server, (PREDICTION, MODELS))
        return bind(self._server, self.address, self.security)

    def start(self) -> "ModelServer":
        """Loads the configured models, then answers; returns itself."""
        self.refresh()
        if self._rest_address is not None:
            from shoal.serving.rest import RestServer

            self._rest = RestServer(self, self._rest_address)
            self.rest_port = self._rest.port
            self._rest.start()
        self._loop.call(self._server.start(), OPEN_SECS)
        if self.poll_wait_seconds > 0:
            self._thread = threading.Thread(target=self._poll, name="shoal-serve-poll", daemon=True)
            self._thread.start()
        return self

    def stop(self, grace: float | None = None) -> None:
        """Health says NOT_SERVING, new requests are refused, running ones get ``grace`` seconds."""
        self._stop.set()
        self._loop.call(self._close(grace), (grace or 0) + 10)
        if self._rest is not None:
            self._rest.stop()
        if self._thread is not None:
            self._thread.join(timeout=10)
        self._pool.shutdown(wait=False)
        self._stopped.set()

    async def _close(self, grace: float | None) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)

    def wait_for_termination(self, timeout: float | None = None) -> None:
        self._stopped.wait(timeout)

    def _poll(self) -> None:
        while not self._stop.wait(self.poll_wait_seconds):
            try:
                self.refresh()
            except Exception:
                log.exception("looking for new versions failed")

    def refresh(self) -> None:
        """Looks for new versions now and switches to them."""
        with self._loading:
            for model in self.models():
                model.refresh()

    # --- models -----------------------------------------------------------------------------------------------------

    def models(self) -> list[Model]:
        with self._lock:
            return list(self._models.values())

    def alias(self, name: str, model_name: str) -> None:
        """Requests for ``name`` are answered by ``model_name``."""
        with self._lock:
            self._aliases[name] = model_name

    def model(self, name: str) -> Model:
        with self._lock:
            name = self._aliases.get(name, name)
            if name not in self._models:
                raise not_found(f"there is no model {name!r}; this server has {sorted(self._models) or 'none'}")
            return self._models[name]

    def reload(self, config: ModelServerConfig) -> None:
        """Serves exactly the models of ``config`` (and live tables); versions that stay are not loaded again."""
        self._configure(config)
        self.refresh()

    def _configure(self, config: ModelServerConfig) -> None:
        given = list(config.model_config_list.config)
        names = [each.name for each in given]
        if len(set(names)) != len(names) or not all(names):
            raise ConfigError(f"model names must be distinct and not empty, got {names}")
        for each in given:
            check_base_path(each.base_path, self._model_root)
        gone = []
        with self._lock:
            for name in [name for name, model in self._models.items() if model.base is not None and name not in names]:
                gone.append(self._models.pop(name))
            for each in given:
                known = self._models.get(each.name)
                if known is not None and known.config.base_path == each.base_path:
                    known.config = each
                else:
                    self._models[each.name] = Model(each, self._model_root)
                    if known is not None:
                        gone.append(known)
        for model in gone:
            model.unload_all()

    def serve_tables(self, model_name: str, tables: Any, version: int = 1) -> None:
        """Publishes live tables of this process under the signatures of an embedding shard.

        ``tables``: a ``HashTable`` or ``MultiHashTable``, several of them, or ``{alias: table}``.
        """
        with self._lock:
            model = self._models.setdefault(model_name, Model(ModelConfig(name=model_name)))
        model.publish(live_servable(tables), version)

    # --- Predict ----------------------------------------------------------------------------------------------------

    def predict(self, asked: Asked) -> tuple[bytes, Tensors]:
        """Answers one request from any thread but the loop's: (the model spec as it was resolved, outputs)."""
        try:
            return self._loop.call(self._answer(asked, _no_context), PREDICT_SECS)
        except TimeoutError:
            raise StatusError(Code.DEADLINE_EXCEEDED, f"the request took more than {PREDICT_SECS:.0f} s") from None

    async def _answer(self, asked: Asked, enter: Callable[[], contextvars.Context]) -> Any:
        """``asked.finish(the model spec as it was resolved, serialised; outputs)``; ``enter`` gives the context of
        what runs on a thread of the pool."""
        spec = asked.spec
        name = spec.signature_name or "serving_default"
        begin = time.perf_counter()
        code, label = 0, ("", "")  # names that do not exist are not kept: callers could make any number of them
        try:
            with self.model(spec.name).use(spec) as version:
                where = f"model {spec.name!r} version {version.number}"
                signature = find_signature(version, name, where)
                label = (spec.name, name)
                if signature.push and not self.security.may_push(asked.identity):
                    raise StatusError(
                        Code.PERMISSION_DENIED, f"{asked.identity or 'this caller'!r} may not push to {where}"
                    )
                outputs = signature.spec.outputs
                wanted = asked.output_filter
                if unknown := [alias for alias in wanted if alias not in outputs]:
                    raise invalid_argument(f"{where}, {name!r} has no output {unknown}; it has {sorted(outputs)}")
                resolved = version.resolved(spec.name, name)

                def prepare() -> Tensors:
                    inputs = asked.read()
                    signature.check(f"{where}, signature {name!r}", inputs)
                    return inputs

                def complete(results: Tensors) -> Any:
                    return asked.finish(resolved, {alias: results[alias] for alias in wanted} if wanted else results)

                if signature.batch and self._max_batch_rows > 1:
                    batcher = version.batchers.get(name)
                    if batcher is None:
                        check = partial(signature.check, f"{where}, signature {name!r}")
                        batcher = Batcher(signature.run, check, self._max_batch_rows, self._pool)
                        version.batchers[name] = batcher
                    return await batcher.submit(prepare, complete, asked.call, resolved)
                pace = version.paces.get(name)
                if pace is None:
                    pace = version.paces[name] = Pace(not signature.push and not signature.waits)
                work = partial(pace.timed, lambda: complete(signature.run(prepare())))
                if pace.short and (asked.call is None or len(asked.call.data) < INLINE_BYTES):
                    return work()
                return await self._loop.loop.run_in_executor(self._pool, enter().run, work)
        except StatusError as error:
            code = error.code
            raise
        except DataError as error:
            code = Code.INVALID_ARGUMENT
            raise invalid_argument(str(error)) from None
        except (ShoalError, ValueError) as error:
            code = Code.INVALID_ARGUMENT
            raise invalid_argument(f"model {spec.name!r}, signature {name!r}: {error}") from error
        except Exception as error:
            code = Code.INTERNAL
            log.exception("model %s, signature %s failed", spec.name, name)
            raise StatusError(Code.INTERNAL, f"model {spec.name!r}, signature {name!r}: {error}") from error
        finally:
            self.traffic.add(*label, code, time.perf_counter() - begin)

    async def _predict(self, data: bytes, context: Any) -> bytes:
        try:
            identity = self._identify(context)
            call: PredictCall = decode_request(data)
            pushing = call.spec.signature_name.endswith("assign")
            if pushing:
                context.set_trailing_metadata(((INSTANCE, self.instance),))

            def enter() -> contextvars.Context:
                left = context.time_remaining()
                inside = contextvars.copy_context()
                inside.run(set_request_deadline, left if left is not None and left < 1e6 else None)
                inside.run(touched_at.set, _touched_at(context) if pushing else 0.0)
                return inside

            read = lambda: self._tensors(call)  # noqa: E731
            asked = Asked(call.spec, read, call.output_filter, identity, encode_response, call)
            return await self._answer(asked, enter)
        except DataError as error:
            return await self._abort(context, invalid_argument(f"the request is no PredictRequest: {error}"))
        except StatusError as error:
            return await self._abort(context, error)

    def _tensors(self, call: PredictCall) -> Tensors:
        return {alias: call.tensor(alias, self.max_message_bytes) for alias in call.inputs}

    # --- the other methods ------------------------------------------------------------------------------------------

    def metadata(self, spec: ModelSpec) -> tuple[ModelSpec, SignatureDefMap]:
        """The signatures of a version."""
        with self.model(spec.name).use(spec) as version:
            assert version.servable is not None
            result = SignatureDefMap()
            for name, signature in version.servable.signatures.items():
                definition = result.signature_def[name]
                definition.method_name = "tensorflow/serving/predict"
                for into, specs in (
                    (definition.inputs, signature.spec.inputs),
                    (definition.outputs, signature.spec.outputs),
                ):
                    for alias, each in specs.items():
                        info = into[alias]
                        hint = (signature.hints or {}).get(alias)
                        info.name = f"{alias}:0|{hint}" if hint else f"{alias}:0"
                        info.dtype = dtype_code(each.dtype)  # pyrefly: ignore
                        if each.shape is None:
                            info.tensor_shape.unknown_rank = True
                        else:
                            info.tensor_shape.SetInParent()
                            for size in each.shape:
                                info.tensor_shape.dim.add(size=-1 if size is None else size)
            resolved = ModelSpec(name=spec.name)
            resolved.version.value = version.number
            return resolved, result

    async def _get_metadata(self, request: GetModelMetadataRequest, context: Any) -> GetModelMetadataResponse:
        try:
            self._identify(context)
            unknown = [each for each in request.metadata_field if each != "signature_def"]
            if unknown or not request.metadata_field:
                raise invalid_argument(f"metadata_field must be signature_def, got {list(request.metadata_field)}")
            response = GetModelMetadataResponse()
            spec, signatures = self.metadata(request.model_spec)
            response.model_spec.CopyFrom(spec)
            response.metadata["signature_def"].Pack(signatures)
            return response
        except StatusError as error:
            return await self._abort(context, error)

    async def _get_status(self, request: GetModelStatusRequest, context: Any) -> GetModelStatusResponse:
        try:
            self._identify(context)
            return self.status(request.model_spec)
        except StatusError as error:
            return await self._abort(context, error)

    def status(self, spec: ModelSpec) -> GetModelStatusResponse:
        statuses = self.model(spec.name).statuses()
        if spec.HasField("version"):
            statuses = [each for each in statuses if each.version == spec.version.value]
            if not statuses:
                raise not_found(f"model {spec.name!r} has no version {spec.version.value}")
        return GetModelStatusResponse(model_version_status=statuses)

    async def _reload(self, request: ReloadConfigRequest, context: Any) -> ReloadConfigResponse:
        response = ReloadConfigResponse()
        response.status.error_code = 0
        try:
            identity = self._identify(context)
            if not self.security.may_push(identity):
                raise StatusError(Code.PERMISSION_DENIED, f"{identity!r} may not change what this server serves")
            await self._loop.loop.run_in_executor(self._pool, self.reload, request.config)
        except (StatusError, ConfigError) as error:
            return await self._abort(context, error if isinstance(error, StatusError) else invalid_argument(str(error)))
        return response

    def _handlers(self) -> tuple[Any, ...]:
        prediction = {
            "Predict": unary(self._predict),
            "GetModelMetadata": unary(self._get_metadata, GetModelMetadataRequest, GetModelMetadataResponse),
        }
        models = {
            "GetModelStatus": unary(self._get_status, GetModelStatusRequest, GetModelStatusResponse),
            "HandleReloadConfigRequest": unary(self._reload, ReloadConfigRequest, ReloadConfigResponse),
        }
        return (
            grpc.method_handlers_generic_handler(PREDICTION, prediction),
            grpc.method_handlers_generic_handler(MODELS, models),
        )

    def _identify(self, context: Any) -> str:
        if not self.security.authenticates:
            return ""
        identity = caller(context, self.security)
        if identity is None:
            raise StatusError(Code.UNAUTHENTICATED, "no known token or certificate; send authorization: Bearer …")
        return identity

    async def _abort(self, context: Any, error: StatusError) -> Any:
        await context.abort(_CODES[error.code], error.message)


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _touched_at(context: Any) -> float:
    for key, value in context.invocation_metadata():
        if key == TOUCHED_AT and value.isdecimal():
            return int(value) / 1000
    return 0.0


def _no_context() -> contextvars.Context:
    return contextvars.copy_context()


def check_directory(path: str | Path) -> Path:
    """A model directory that a user named."""
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory; give the folder that exports were written to")
    return path
