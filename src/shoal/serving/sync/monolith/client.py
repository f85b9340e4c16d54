"""The sync clients of a process, by name, and the operations on them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from shoal.errors import ConfigError
from shoal.proto.serving.parameter_sync_pb2 import ClientConfig
from shoal.serving.status import invalid_argument
from shoal.serving.sync.monolith.handle import DummySyncHandle, SyncClientHandle
from shoal.serving.sync.monolith.push_client import result_json
from shoal.table.export_mode import is_exporting_standalone


@dataclass(slots=True)
class _Registry:
    handles: dict[str, SyncClientHandle] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, name: str, make: Callable[[], SyncClientHandle]) -> SyncClientHandle:
        with self.lock:
            if name not in self.handles:
                self.handles[name] = make()
            return self.handles[name]


_registry = _Registry()


def reset_sync_clients() -> None:
    """Close and forget every sync client of the process."""
    with _registry.lock:
        handles = list(_registry.handles.values())
        _registry.handles.clear()
    for handle in handles:
        handle.close()


def parameter_sync_client_from_config(
    config: ClientConfig | bytes | None = None, name_suffix: str = ""
) -> SyncClientHandle:
    """The client ``MonolithSyncClient_<suffix>``; calls with the same suffix return the same object.

    ``config`` has the first targets; it is used only on creation.
    """
    name = f"MonolithSyncClient_{name_suffix}"
    if config is not None and not isinstance(config, ClientConfig):
        config = _parse(config)
    return _registry.get(name, lambda: SyncClientHandle(name, config=config))


def create_parameter_sync_clients(ps_num: int) -> list[SyncClientHandle]:
    """One client per parameter server; if ``ps_num`` is 0, the client with the empty suffix."""
    if ps_num < 0:
        raise ConfigError(f"create_parameter_sync_clients: ps_num must be >= 0, got {ps_num}")
    if ps_num == 0:
        return [parameter_sync_client_from_config()]
    handles = []
    for index in range(ps_num):
        handle = parameter_sync_client_from_config(name_suffix=str(index))
        handle.device = "" if is_exporting_standalone() else f"/job:ps/task:{index}/device:CPU:0"
        handles.append(handle)
    return handles


def create_dummy_sync_client() -> SyncClientHandle:
    """The shared client that pushes nothing."""
    return _registry.get("MonolithDummySyncClient", lambda: DummySyncHandle("MonolithDummySyncClient"))


def _parse(config_bytes: bytes | None) -> ClientConfig:
    if not isinstance(config_bytes, bytes | bytearray | memoryview):
        raise invalid_argument(f"expected a serialised ClientConfig, got {type(config_bytes).__name__}")
    try:
        return ClientConfig.FromString(bytes(config_bytes))
    except DecodeError as error:
        raise invalid_argument(f"expected a serialised ClientConfig, got {len(config_bytes)} bytes: {error}") from None


class ParameterSyncClient:
    """A handle's operations.

    Args:
        client: a handle, as `parameter_sync_client_from_config` returns it, or another ``ParameterSyncClient``.
        handle: another name for ``client``.
    """

    def __init__(
        self,
        client: "SyncClientHandle | ParameterSyncClient | None" = None,
        *,
        handle: "SyncClientHandle | ParameterSyncClient | None" = None,
    ) -> None:
        given = handle if client is None else client
        if given is None:
            raise ConfigError("ParameterSyncClient: client must be a sync client's handle, got None")
        self._handle = given.handle if isinstance(given, ParameterSyncClient) else given

    @property
    def handle(self) -> SyncClientHandle:
        return self._handle

    def as_op(self) -> SyncClientHandle:
        """Does nothing: the client already exists."""
        return self._handle

    def create_sync_op(
        self, config_str: bytes | ClientConfig | None = None, *, config_bytes: bytes | ClientConfig | None = None
    ) -> list[str]:
        """Run one sync round; the only element is the result as JSON. ``config_bytes`` is ``config_str``.

        Raises:
            StatusError: invalid argument when ``config_str`` is not a serialised ``ClientConfig``. The empty byte
                string is a valid one, without targets.
        """
        given = config_bytes if config_str is None else config_str
        config = given if isinstance(given, ClientConfig) else _parse(given)
        return [result_json(self._handle.sync(config))]
