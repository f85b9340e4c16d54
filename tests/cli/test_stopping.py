"""Commands that are stopped by SIGTERM or SIGINT, whichever thread gets the signal."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from shoal.cli.shared.stopping import SIGNALS, stop_event

PROGRAM = """
import select, threading
from shoal.cli.shared.stopping import stop_event

def turn():
    while True:
        select.select([], [], [], 0.001)

for _ in range(4):
    threading.Thread(target=turn, daemon=True).start()
with stop_event() as stop:
    print("ready", flush=True)
    stop.wait()
"""


@pytest.fixture
def program():
    path = os.pathsep.join(each for each in sys.path if each)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", SIGNALS)
def test_a_program_that_was_stopped_when_it_was_asked_to_end_ends(program, number):
    program.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, program.pid, os.WSTOPPED)
    program.send_signal(number)
    program.send_signal(signal.SIGCONT)
    assert program.wait(120) == 0


def test_the_event_is_set_once_a_signal_comes_and_what_was_there_before_returns():
    before = [signal.getsignal(number) for number in SIGNALS]
    told = threading.Event()
    former = signal.signal(signal.SIGUSR1, lambda *_: told.set())
    try:
        with stop_event() as stop:
            signal.raise_signal(signal.SIGUSR1)
            assert told.wait(60)
            assert not stop.wait(0.05)  # no other signal stops it
            signal.raise_signal(signal.SIGINT)
            assert stop.wait(60)
            signal.raise_signal(signal.SIGTERM)  # a second signal changes nothing
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "shoal-signals"]


def test_the_event_may_be_waited_for_again_and_again():
    for _ in range(3):
        with stop_event() as stop:
            assert not stop.is_set()
            signal.raise_signal(signal.SIGTERM)
            assert stop.wait(60)
