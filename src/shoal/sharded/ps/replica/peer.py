"""A connection from one server to another of the same shard: one request at a time, each with a deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from shoal.errors import DeadlineError, PeerError
from shoal.sharded.ps.protocol import Op, Reply, Request, Status, parse_reply
from shoal.sharded.ps.security import ClientKeys, load_keys, zmq_module

LOOK_MS = 20  # between checks whether to keep waiting


class Peer:
    """A client of the server at ``address``, for one thread. It reconnects after an error."""

    def __init__(self, context: Any, address: str, keys: ClientKeys | None = None) -> None:
        self._zmq = zmq_module()
        self._context, self._keys = context, keys
        self.address = address if "://" in address else f"tcp://{address}"
        self._socket: Any = None
        self._number = 0

    def _connect(self) -> Any:
        zmq = self._zmq
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 500)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2000)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if "[" in self.address:
            socket.setsockopt(zmq.IPV6, 1)
        if self._keys is not None:
            socket.curve_publickey, socket.curve_secretkey = load_keys(self._keys.secret, secret=True)
            socket.curve_serverkey = load_keys(self._keys.server, secret=False)[0]
        socket.connect(self.address)
        return socket

    def ask(
        self, op: Op, wish: Mapping[str, Any], seconds: float, keep_waiting: Callable[[], bool] = lambda: True
    ) -> Reply:
        """Send a request and return its reply. ``keep_waiting``, called every 20 ms, returns whether to keep waiting.

        Raises:
            DeadlineError: there was no reply in time, or ``keep_waiting`` returned False.
            PeerError: the server refused.
        """
        if self._socket is None:
            self._socket = self._connect()
        self._number += 1
        request = Request(op, self._number, values=json.dumps(dict(wish)).encode())
        until = time.monotonic() + seconds
        try:
            self._socket.send_multipart(request.frames(), self._zmq.NOBLOCK)
            while True:
                while not self._socket.poll(LOOK_MS) and keep_waiting() and time.monotonic() < until:
                    pass
                if not self._socket.poll(0):
                    raise DeadlineError(f"{self.address} did not answer {op.name.lower()} within {seconds:g} s")
                reply = parse_reply([frame.buffer for frame in self._socket.recv_multipart(copy=False)])
                if reply.request == self._number:
                    break
        except BaseException as error:
            self.close()
            if isinstance(error, self._zmq.ZMQError) and not isinstance(error, self._zmq.ContextTerminated):
                raise PeerError(f"{self.address}: cannot send a request: {error}") from None
            raise
        if reply.status != Status.OK:
            raise PeerError(f"{self.address} refused {op.name.lower()}: {reply.text()}")
        return reply

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None
