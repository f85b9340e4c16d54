"""A TCP proxy on loopback that simulates a network partition."""

from __future__ import annotations

import select
import socket
import threading

CHUNK_BYTES = 1 << 16


class Proxy:
    """Forwards connections to ``target`` until `cut`; then stalls them silently until `heal`.

    >>> import socket
    >>> with socket.create_server(("127.0.0.1", 0)) as server, Proxy(server.getsockname()) as proxy:
    ...     with socket.create_connection(proxy.address, 5) as one:
    ...         one.sendall(b"hello")
    ...         server.accept()[0].recv(5)
    b'hello'
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._open = threading.Event()
        self._open.set()
        self._ended = threading.Event()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut(self) -> None:
        """Hold back all further bytes, in both directions; new connections hang."""
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._ended.set()
        self._open.set()
        self._listener.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass, args=(near,), name="proxy-pair", daemon=True).start()

    def _pass(self, near: socket.socket) -> None:
        with near:
            self._open.wait()
            try:
                far = socket.create_connection(self._target, 10)
            except OSError:
                return
            with far:
                to = {near: far, far: near}
                while not self._ended.is_set():
                    for ready in select.select([near, far], [], [], 0.2)[0]:
                        try:
                            data = ready.recv(CHUNK_BYTES)
                            self._open.wait()
                            if not data:
                                return
                            to[ready].sendall(data)
                        except OSError:
                            return
