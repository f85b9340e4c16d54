"""The folder of `shoal up` and its ports: one supervisor at a time, whoever else looks."""

import fcntl
import os
import socket
import threading

import pytest

from shoal.errors import ConfigError
from shoal.up.files import LOCK, holder, only_one
from shoal.up.local import hold_ports


def test_a_folder_has_one_supervisor_and_commands_that_look_at_it_are_none(tmp_path):
    folder = str(tmp_path)
    assert holder(folder) is None
    with only_one(folder):
        assert holder(folder) == os.getpid()
        with pytest.raises(ConfigError, match=f"already running in .* as process {os.getpid()}"), only_one(folder):
            pass
    assert holder(folder) is None
    looks = os.open(tmp_path / LOCK, os.O_RDONLY)
    fcntl.flock(looks, fcntl.LOCK_SH)  # as `holder` does for a moment
    threading.Timer(0.2, os.close, (looks,)).start()
    with only_one(folder):
        assert holder(folder) == os.getpid()


def test_ports_are_kept_for_the_servers_that_will_use_them():
    held = hold_ports(3)
    try:
        for port in [one.getsockname()[1] for one in held]:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            for _ in range(2):  # a server that is started again
                with socket.create_server(("127.0.0.1", port)) as server:
                    socket.create_connection(server.getsockname()).close()
    finally:
        for one in held:
            one.close()
