"""A machine whose clock is stepped and whose disk is slow, as a command sees it (processes)."""

import errno
import os
import subprocess
import sys

import pytest

from shoal.errors import ConfigError
from shoal.testing.machine import Machine, machine_unavailable

pytestmark = pytest.mark.skipif(machine_unavailable() is not None, reason=str(machine_unavailable()))

COMMAND = """
import os, sys, time
file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
for line in sys.stdin:
    begin = time.monotonic()
    try:
        os.pwritev(file, [b"12"], 0)
        os.fdatasync(file)
        failed = 0
    except OSError as error:
        failed = error.errno
    print(time.time(), time.monotonic() - begin, failed, flush=True)
"""


def test_clock_and_disk_change_while_a_command_runs(tmp_path):
    with Machine() as machine:
        command = subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(tmp_path / "file")], env=os.environ | machine.environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

        def look():
            command.stdin.write("\n")
            command.stdin.flush()
            at, took, failed = command.stdout.readline().split()
            return float(at), float(took), int(failed)

        try:
            right, _, _ = look()
            machine.set(clock_s=-3600, sync_s=0.3, write_s=0.1)
            behind, slow, failed = look()
            assert right - 3600 <= behind < right - 3000
            assert slow >= 0.4
            assert failed == 0
            machine.heal()
            machine.set(sync_errno=errno.EIO)
            assert look()[2] == errno.EIO
            machine.set(sync_errno=0, write_errno=errno.ENOSPC)
            assert look()[2] == errno.ENOSPC
            machine.heal()
            assert look()[0] >= right
            assert machine.syncs >= 4
        finally:
            command.kill()
            command.communicate(timeout=30)
        with pytest.raises(ConfigError, match="takes only clock_s"):
            machine.set(clock=1)
