"""The process's address table: which addresses serve each remote sub-graph."""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from shoal.errors import ConfigError
from shoal.proto.serving.agent_service_pb2 import HeartBeatRequest, HeartBeatResponse, ServerType
from shoal.serving.security import open_channel

log = logging.getLogger(__name__)

HEART_BEAT = "/monolith.serving.agent_service.AgentService/HeartBeat"
RPC_DEADLINE_SECS = 5.0

Table = dict[str, list[str]]


def api_version_of(addresses: Mapping[str, Any]) -> int:
    """1 if any key contains ``:ps`` (``movie_ctr:ps_7``), else 0 (``ps:7``)."""
    return int(any(":ps" in key for key in addresses))


class FixedTable:
    """A table that does not change."""

    def __init__(self, addresses: Mapping[str, Sequence[str]]) -> None:
        self.addresses: Table = {key: list(value) for key, value in addresses.items()}
        self.api_version = api_version_of(self.addresses)


class AgentHeartbeat:
    """The address table reported by the local agent process, refreshed in the background.

    A refresh asks for the PS replicas, then the DENSE replicas, and merges them; if both have a key, PS wins. If one
    request fails, its last answer is kept. Safe to read from any thread: a refresh replaces the table and never
    modifies it.

    Args:
        agent_address: ``host:port`` of the agent; None = ``localhost:$PORT2``.
        interval_secs: seconds between refreshes.
    """

    def __init__(self, agent_address: str | None = None, interval_secs: float = 15) -> None:
        if agent_address is None:
            port = os.environ.get("PORT2")
            if not port:
                raise ConfigError(
                    "AgentHeartbeat: PORT2, the local agent's port, is not set; set it or pass agent_address"
                )
            agent_address = f"localhost:{port}"
        self.agent_address = agent_address
        self.interval_secs = interval_secs
        self._channel = open_channel(agent_address)
        self._call = self._channel.unary_unary(
            HEART_BEAT, HeartBeatRequest.SerializeToString, HeartBeatResponse.FromString
        )
        self._halves: dict[int, Table] = {ServerType.PS: {}, ServerType.DENSE: {}}
        self._state: tuple[Table, int] = ({}, 0)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.refresh()
        self._thread = threading.Thread(target=self._loop, name="shoal-agent-heartbeat", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> Table:
        return self._state[0]

    @property
    def api_version(self) -> int:
        return self._state[1]

    def refresh(self) -> None:
        """Refresh now. A failed RPC does not raise; the last good answer to it is kept."""
        with self._lock:
            for server_type in (ServerType.PS, ServerType.DENSE):
                try:
                    answer = self._call(HeartBeatRequest(server_type=server_type), timeout=RPC_DEADLINE_SECS)
                except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed by stop()
                    log.warning(
                        "heartbeat(%s) to %s failed: %s", ServerType.Name(server_type), self.agent_address, error
                    )
                    continue
                self._halves[server_type] = {key: list(value.address) for key, value in answer.addresses.items()}
            merged = {**self._halves[ServerType.DENSE], **self._halves[ServerType.PS]}
            if merged != self._state[0]:
                self._state = (merged, api_version_of(merged))

    def stop(self) -> None:
        """Ends the background thread and closes the channel."""
        self._stopped.set()
        self._channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=RPC_DEADLINE_SECS * 2)

    def _loop(self) -> None:
        while not self._stopped.wait(self.interval_secs):
            self.refresh()


_lock = threading.Lock()
_override: FixedTable | AgentHeartbeat | None = None
_default: AgentHeartbeat | None = None


def set_address_table(table: Mapping[str, Sequence[str]] | AgentHeartbeat | FixedTable | None) -> None:
    """Replace the process's address table with ``{key: [address]}`` or an ``AgentHeartbeat``; None undoes it."""
    global _override
    _override = FixedTable(table) if isinstance(table, Mapping) else table


def address_table() -> FixedTable | AgentHeartbeat:
    """The current table; the first call creates the process's ``AgentHeartbeat``."""
    global _default
    if _override is not None:
        return _override
    with _lock:
        if _default is None:
            _default = AgentHeartbeat()
        return _default


def route(table: Any, model_name: str, task: int, old_model_name: str | None) -> tuple[str, str]:
    """(model name to send, key in the address table) for a remote call."""
    if table.api_version == 1:
        return model_name, model_name
    if old_model_name:
        return old_model_name, old_model_name.replace("_", ":", 1)
    return model_name, f"ps:{task}"
