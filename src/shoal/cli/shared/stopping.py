"""SIGTERM and SIGINT as an event that a command can wait for."""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def stop_event() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set until the block ends. Call it on the main thread.

    A separate thread sets the event, because Python runs handlers on the main thread. That thread does not wake from a
    wait when the kernel delivers the signal to another thread, as it can after SIGSTOP and SIGCONT, and it might hold
    the lock that setting the event needs.
    """
    stop = threading.Event()
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def listen() -> None:
        with contextlib.suppress(OSError):
            while number := receiver.recv(1):
                if number[0] in SIGNALS:
                    stop.set()

    thread = threading.Thread(target=listen, name="shoal-signals", daemon=True)
    thread.start()
    pipe = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(pipe)
        sender.close()
        thread.join(10)
        receiver.close()
