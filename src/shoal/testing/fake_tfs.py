"""`FakeTFServing`: a model server's life cycle of versions behind real gRPC services, for tests."""

import threading
from concurrent import futures
from typing import Any

import grpc

from shoal.proto.serving.tf_serving_pb2 import (
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    GetModelStatusRequest,
    GetModelStatusResponse,
    ModelServerConfig,
    ModelVersionStatus,
    PredictRequest,
    PredictResponse,
    ReloadConfigRequest,
    ReloadConfigResponse,
)
from shoal.serving.grpc_server import unary
from shoal.serving.security import ServerSecurity, bind

State = ModelVersionStatus.State
_NEXT = {State.START: State.LOADING, State.LOADING: State.AVAILABLE, State.UNLOADING: State.END}


class FakeTFServing:
    """Versions go START → LOADING → AVAILABLE, and UNLOADING → END when their model is removed, one step per tick.

    Args:
        model_config: the initial models.
        num_versions: versions of each model, 1 … n.
        port: 0 picks a free one.
        tick_secs: time between ticks; None: only calls of `tick`.
    """

    def __init__(
        self,
        model_config: ModelServerConfig | None = None,
        num_versions: int = 1,
        port: int = 0,
        tick_secs: float | None = 0.05,
        max_workers: int = 10,
    ) -> None:
        self._lock = threading.Lock()
        self._num_versions = num_versions
        self._models: dict[str, dict[int, int]] = {}
        self.requests: list[PredictRequest] = []
        if model_config is not None:
            self._apply(model_config)
        self._stop = threading.Event()
        self._tick_secs = tick_secs
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers, "shoal-fake-tfs"),
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)],
        )
        prediction = {
            "Predict": unary(self._predict, PredictRequest, PredictResponse),
            "GetModelMetadata": unary(self._metadata, GetModelMetadataRequest, GetModelMetadataResponse),
        }
        model = {
            "GetModelStatus": unary(self._status, GetModelStatusRequest, GetModelStatusResponse),
            "HandleReloadConfigRequest": unary(self._reload, ReloadConfigRequest, ReloadConfigResponse),
        }
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler("tensorflow.serving.PredictionService", prediction),
                grpc.method_handlers_generic_handler("tensorflow.serving.ModelService", model),
            )
        )
        self.port = bind(self._server, f"127.0.0.1:{port}", ServerSecurity())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> "FakeTFServing":
        self._server.start()
        if self._tick_secs is not None:
            threading.Thread(target=self._run, name="shoal-fake-tfs-tick", daemon=True).start()
        return self

    def stop(self, grace: float | None = None) -> None:
        self._stop.set()
        self._server.stop(grace).wait(10)

    def _run(self) -> None:
        while not self._stop.wait(self._tick_secs):
            self.tick()

    def tick(self) -> None:
        """Advance every version by one step."""
        with self._lock:
            for versions in self._models.values():
                for version, state in versions.items():
                    versions[version] = _NEXT.get(state, state)  # pyrefly: ignore

    def set_state(self, model: str, version: int, state: int) -> None:
        with self._lock:
            self._models.setdefault(model, {})[version] = state

    def _apply(self, config: ModelServerConfig) -> None:
        wanted = {each.name for each in config.model_config_list.config}
        for name, versions in self._models.items():
            if name not in wanted:
                for version, state in versions.items():
                    versions[version] = State.END if state == State.END else State.UNLOADING
        gone = {State.UNLOADING, State.END}
        for name in wanted:
            if set(self._models.get(name, {}).values()) <= gone:
                self._models[name] = dict.fromkeys(range(1, self._num_versions + 1), State.START)

    def _find(self, name: str, context: Any) -> dict[int, int]:
        with self._lock:
            if name not in self._models:
                context.abort(grpc.StatusCode.NOT_FOUND, f"Could not find any versions of model {name}")
            return dict(self._models[name])

    def _status(self, request: GetModelStatusRequest, context: Any) -> GetModelStatusResponse:
        versions = self._find(request.model_spec.name, context)
        response = GetModelStatusResponse()
        for version, state in sorted(versions.items(), reverse=True):
            if not request.model_spec.HasField("version") or request.model_spec.version.value == version:
                added = response.model_version_status.add(version=version, state=state)
                added.status.error_code = 0
        return response

    def _predict(self, request: PredictRequest, context: Any) -> PredictResponse:
        versions = self._find(request.model_spec.name, context)
        if State.AVAILABLE not in versions.values():
            context.abort(grpc.StatusCode.UNAVAILABLE, f"model {request.model_spec.name} has no available version")
        self.requests.append(request)
        response = PredictResponse()
        response.model_spec.CopyFrom(request.model_spec)
        return response

    def _metadata(self, request: GetModelMetadataRequest, context: Any) -> GetModelMetadataResponse:
        self._find(request.model_spec.name, context)
        response = GetModelMetadataResponse()
        response.model_spec.CopyFrom(request.model_spec)
        return response

    def _reload(self, request: ReloadConfigRequest, context: Any) -> ReloadConfigResponse:
        with self._lock:
            self._apply(request.config)
        response = ReloadConfigResponse()
        response.status.error_code = 0
        return response
