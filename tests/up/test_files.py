"""The folder of `shoal up`: one supervisor at a time, whoever else looks."""

import fcntl
import os
import threading

import pytest

from shoal.errors import ConfigError
from shoal.up.files import LOCK, holder, only_one


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
