"""`ModelServer`: TF-Serving's gRPC services and REST form over exported directories and live tables."""

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import torch

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
from shoal.serving.grpc_server import add_health_and_reflection, set_not_serving, unary
from shoal.serving.metrics import emit_counter, emit_timer
from shoal.serving.predict import PredictCall, decode_request, encode_response
from shoal.serving.push import INSTANCE, TOUCHED_AT
from shoal.serving.remote import request_deadline
from shoal.serving.security import PUSH_MESSAGE_BYTES, ServerSecurity, bind, caller
from shoal.serving.servable import Tensors, live_servable, touched_at
from shoal.serving.status import Code, StatusError, invalid_argument, not_found
from shoal.serving.tensors import dtype_code
from shoal.serving.versions import Model, check_base_path, run_signature

log = logging.getLogger(__name__)

PREDICTION = "tensorflow.serving.PredictionService"
MODELS = "tensorflow.serving.ModelService"


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
        workers: requests that are handled at once.
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
        self._thread: threading.Thread | None = None
        self._rest: Any = None
        self.traffic = Traffic()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(workers, "shoal-serve"),
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ],
        )
        self._server.add_generic_rpc_handlers(self._handlers())
        self._health = add_health_and_reflection(self._server, (PREDICTION, MODELS))
        self.port = bind(self._server, address, self.security)
        self.rest_port: int | None = None
        if config is not None:
            self._configure(config)

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> "ModelServer":
        """Loads the configured models, then answers; returns itself."""
        self.refresh()
        if self._rest_address is not None:
            from shoal.serving.rest import RestServer

            self._rest = RestServer(self, self._rest_address)
            self.rest_port = self._rest.port
            self._rest.start()
        self._server.start()
        if self.poll_wait_seconds > 0:
            self._thread = threading.Thread(target=self._poll, name="shoal-serve-poll", daemon=True)
            self._thread.start()
        return self

    def stop(self, grace: float | None = None) -> None:
        """Health says NOT_SERVING, new requests are refused, running ones get ``grace`` seconds."""
        self._stop.set()
        set_not_serving(self._health)
        self._server.stop(grace).wait((grace or 0) + 10)
        if self._rest is not None:
            self._rest.stop()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def wait_for_termination(self, timeout: float | None = None) -> None:
        self._server.wait_for_termination(timeout)

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

    def predict(
        self, spec: ModelSpec, read_inputs: Callable[[], Tensors], output_filter: list[str], identity: str = ""
    ) -> tuple[bytes, Tensors]:
        """Answers one request: (the model spec as it was resolved, serialised; outputs)."""
        name = spec.signature_name or "serving_default"
        begin = time.perf_counter()
        code, label = 0, ("", "")  # names that do not exist are not kept: callers could make any number of them
        try:
            with self.model(spec.name).use(spec) as version:
                where = f"model {spec.name!r} version {version.number}"
                signature, call = run_signature(version, name, where, self._max_batch_rows)
                label = (spec.name, name)
                if signature.push and not self.security.may_push(identity):
                    raise StatusError(Code.PERMISSION_DENIED, f"{identity or 'this caller'!r} may not push to {where}")
                outputs = signature.spec.outputs
                if unknown := [alias for alias in output_filter if alias not in outputs]:
                    raise invalid_argument(f"{where}, {name!r} has no output {unknown}; it has {sorted(outputs)}")
                inputs = read_inputs()
                signature.check(f"{where}, signature {name!r}", inputs)
                results = call(inputs)
                if output_filter:
                    results = {alias: results[alias] for alias in output_filter}
                return version.resolved(spec.name, name), results
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

    def _predict(self, data: bytes, context: Any) -> bytes:
        identity = self._identify(context)
        left = context.time_remaining()
        try:
            call: PredictCall = decode_request(data)
            pushing = call.spec.signature_name.endswith("assign")
            if pushing:
                context.set_trailing_metadata(((INSTANCE, self.instance),))
            token = touched_at.set(_touched_at(context) if pushing else 0.0)
            try:
                with request_deadline(left if left is not None and left < 1e6 else None):
                    spec, outputs = self.predict(call.spec, lambda: self._tensors(call), call.output_filter, identity)
            finally:
                touched_at.reset(token)
            return encode_response(spec, outputs)
        except DataError as error:
            return self._abort(context, invalid_argument(f"the request is no PredictRequest: {error}"))
        except StatusError as error:
            return self._abort(context, error)

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

    def _get_metadata(self, request: GetModelMetadataRequest, context: Any) -> GetModelMetadataResponse:
        self._identify(context)
        try:
            unknown = [each for each in request.metadata_field if each != "signature_def"]
            if unknown or not request.metadata_field:
                raise invalid_argument(f"metadata_field must be signature_def, got {list(request.metadata_field)}")
            response = GetModelMetadataResponse()
            spec, signatures = self.metadata(request.model_spec)
            response.model_spec.CopyFrom(spec)
            response.metadata["signature_def"].Pack(signatures)
            return response
        except StatusError as error:
            return self._abort(context, error)

    def _get_status(self, request: GetModelStatusRequest, context: Any) -> GetModelStatusResponse:
        self._identify(context)
        try:
            return self.status(request.model_spec)
        except StatusError as error:
            return self._abort(context, error)

    def status(self, spec: ModelSpec) -> GetModelStatusResponse:
        statuses = self.model(spec.name).statuses()
        if spec.HasField("version"):
            statuses = [each for each in statuses if each.version == spec.version.value]
            if not statuses:
                raise not_found(f"model {spec.name!r} has no version {spec.version.value}")
        return GetModelStatusResponse(model_version_status=statuses)

    def _reload(self, request: ReloadConfigRequest, context: Any) -> ReloadConfigResponse:
        identity = self._identify(context)
        response = ReloadConfigResponse()
        response.status.error_code = 0
        try:
            if not self.security.may_push(identity):
                raise StatusError(Code.PERMISSION_DENIED, f"{identity!r} may not change what this server serves")
            self.reload(request.config)
        except (StatusError, ConfigError) as error:
            return self._abort(context, error if isinstance(error, StatusError) else invalid_argument(str(error)))
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
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "no known token or certificate; send authorization: Bearer …"
            )
        assert identity is not None
        return identity

    def _abort(self, context: Any, error: StatusError) -> Any:
        context.abort(_CODES[error.code], error.message)


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _touched_at(context: Any) -> float:
    for key, value in context.invocation_metadata():
        if key == TOUCHED_AT and value.isdecimal():
            return int(value) / 1000
    return 0.0


class Traffic:
    """How many requests of each kind came lately, and how they went."""

    window = 10.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, str, float, int]] = deque(maxlen=200_000)
        self.total = 0
        self.failed = 0

    def add(self, model: str, signature: str, code: int, seconds: float) -> None:
        now = time.monotonic()
        with self._lock:
            self.total += 1
            self.failed += bool(code)
            self._recent.append((now, f"{model} {signature}", seconds, code))
        tags = f"model_name={model}|signature_name={signature}"
        emit_timer("shoal_serving_latency_seconds", seconds, tags)
        if code:
            emit_counter("shoal_serving_errors", 1, f"{tags}|code={int(code)}")

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
            times = torch.tensor([seconds for seconds, _ in each], dtype=torch.float64)
            result[key] = {
                "qps": len(each) / self.window,
                "p50_ms": float(times.quantile(0.5)) * 1e3 if len(times) < 1_000_000 else 0.0,
                "p99_ms": float(times.quantile(0.99)) * 1e3 if len(times) < 1_000_000 else 0.0,
                "errors": sum(1 for _, code in each if code),
            }
        return result


def check_directory(path: str | Path) -> Path:
    """A model directory that a user named."""
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory; give the folder that exports were written to")
    return path
