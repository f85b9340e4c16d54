"""SIGTERM and SIGINT as an event that a command can wait for."""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def stop_event() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, as long as the block lasts. To be entered on the main thread.

    A thread of its own sets it. Python runs handlers on the main thread, and that does not wake from a wait for a
    signal which the kernel gave to another thread, as it may after SIGSTOP and SIGCONT; it may also hold the very lock
    that setting the event needs.
    """
    stop = threading.Event()
    heard, said = socket.socketpair()
    said.setblocking(False)

    def listen() -> None:
        with contextlib.suppress(OSError):
            while number := heard.recv(1):
                if number[0] in SIGNALS:
                    stop.set()

    thread = threading.Thread(target=listen, name="shoal-signals", daemon=True)
    thread.start()
    pipe = signal.set_wakeup_fd(said.fileno(), warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(pipe)
        said.close()
        thread.join(10)
        heard.close()
