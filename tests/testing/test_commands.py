"""`Command`: a `shoal` command as a separate process."""

import os
import signal
import subprocess

import pytest

import shoal
from shoal.testing.commands import Command


def test_a_command_writes_ends_and_is_killed_as_any_process(tmp_path):
    with Command("--version", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        out, err = command.communicate(120)
    assert (command.returncode, err) == (0, "")
    assert shoal.__version__ in out
    with Command("serve", "nothing", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=tmp_path) as command:
        assert "nothing" in command.communicate(120)[1]
    assert command.poll() == 2
    with Command("-n", 1, "-r", 1, "2 + 3", module="timeit", stdout=subprocess.PIPE) as command:
        assert "1 loop" in command.communicate(120)[0]
    sees = Command("ps", "--json", "--threads", 1, stdout=subprocess.PIPE)
    with sees:
        assert '"address"' in sees.stdout.readline()
        assert sees.pid != os.getpid()
        with pytest.raises(subprocess.TimeoutExpired):
            sees.wait(0.01)
        sees.send_signal(signal.SIGKILL)
    assert sees.returncode == -signal.SIGKILL
    sees.send_signal(signal.SIGTERM)  # the process has already ended
