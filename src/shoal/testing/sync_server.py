"""A server that records pushes, for tests of trainers."""

import logging
import threading
from concurrent import futures
from typing import Any

import grpc

from shoal.errors import ConfigError
from shoal.proto.serving.tf_serving_pb2 import PredictRequest, PredictResponse
from shoal.serving.grpc_server import add_health_and_reflection, unary

log = logging.getLogger(__name__)

_MULTI = ("id", "id_split", "flat_value")


class DummySyncServer:
    """A real gRPC server with ``PredictionService``, health and reflection.

    Args:
        address: ``host:port``; port 0 picks a free one.

    Attributes:
        requests: every accepted ``PredictRequest`` in order of arrival.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.requests: list[PredictRequest] = []
        self._lock = threading.Lock()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(8, "shoal-dummy-sync"),
            options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)],
        )
        handler = unary(self._predict, PredictRequest, PredictResponse)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("tensorflow.serving.PredictionService", {"Predict": handler}),)
        )
        self._health = add_health_and_reflection(self._server, ("tensorflow.serving.PredictionService",))
        try:
            self._port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"DummySyncServer cannot listen on {address}: {error}") from None
        if not self._port:
            raise ConfigError(f"DummySyncServer cannot listen on {address}")
        self._server.start()

    @property
    def handle(self) -> "DummySyncServer":
        return self

    def as_op(self) -> "DummySyncServer":
        return self

    def get_port(self) -> list[int]:
        """Return the bound port, as a sequence of one int."""
        import numpy as np

        return np.array([self._port], np.int32)  # pyrefly: ignore

    def shutdown(self) -> list[int]:
        """Stop the server; return a sequence of the one number 100."""
        import numpy as np

        self._server.stop(None).wait(10)
        return np.array([100], np.int64)  # pyrefly: ignore

    def _predict(self, request: PredictRequest, context: Any) -> PredictResponse:
        for name, tensor in request.inputs.items():
            if not name.endswith(("_id", "_value")) and name not in _MULTI:
                context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"input {name!r} must end in _id or _value, or be id, id_split or flat_value",
                )
            log.info("push to %s: %s %s", request.model_spec.name, name, [dim.size for dim in tensor.tensor_shape.dim])
        with self._lock:
            self.requests.append(request)
        response = PredictResponse()
        response.model_spec.CopyFrom(request.model_spec)
        return response


def create_dummy_sync_server(address: str) -> DummySyncServer:
    return DummySyncServer(address)
