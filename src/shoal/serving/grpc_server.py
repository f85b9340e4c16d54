"""Parts that all gRPC servers share: handlers, health, reflection."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from shoal.errors import missing_extra
from shoal.proto.serving.pool import POOL

try:
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection
except ImportError:
    raise missing_extra("grpcio-health-checking or grpcio-reflection", "server") from None

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def unary(handler: Callable, request: Any = None, response: Any = None) -> Any:
    """A unary handler; message classes None mean raw bytes."""
    return grpc.unary_unary_rpc_method_handler(
        handler,
        request_deserializer=request.FromString if request is not None else None,
        response_serializer=response.SerializeToString if response is not None else None,
    )


class _BothPools:
    """Looks descriptors up in our private pool, then in protobuf's default pool."""

    def __getattr__(self, name: str) -> Callable:
        from google.protobuf import descriptor_pool

        def find(*args: Any) -> Any:
            try:
                return getattr(POOL, name)(*args)
            except KeyError:
                return getattr(descriptor_pool.Default(), name)(*args)

        return find


def add_health_and_reflection(server: Any, services: Sequence[str]) -> Any:
    """Add the health and reflection services, report ``services`` as serving, and return the health servicer."""
    servicer = health.HealthServicer()
    _add(server, services, servicer)
    for name in ("", *services):
        servicer.set(name, SERVING)
    return servicer


async def add_async_health_and_reflection(server: Any, services: Sequence[str]) -> Any:
    """:func:`add_health_and_reflection` for a ``grpc.aio`` server."""
    servicer = health.aio.HealthServicer()  # pyrefly: ignore
    _add(server, services, servicer)
    for name in ("", *services):
        await servicer.set(name, SERVING)
    return servicer


def _add(server: Any, services: Sequence[str], servicer: Any) -> None:
    import shoal.proto.serving.agent_service_pb2
    import shoal.proto.serving.tf_serving_pb2  # noqa: F401  (the descriptors that reflection shows)

    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server, pool=_BothPools())  # pyrefly: ignore
