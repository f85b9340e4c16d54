"""The commands of "From a log file to a live model" run as they are printed, top to bottom, in one folder."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.testing.zookeeper import free_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "live.md"
DEADLINE_S = 240
PORTS = ("8501", "8500", "7100", "7101")


def blocks():
    """(language, what the block is: the name of a file, ``background`` or nothing, its text)."""
    pattern = r"^```(python|toml|sh)(?: (\S+))?\n(.*?)^```$"
    return re.findall(pattern, PAGE.read_text(), re.DOTALL | re.MULTILINE)


class Walk:
    """Follows the page in a folder, with the environment that these tests run in."""

    def __init__(self, folder):
        self.folder, self.running, self.said = folder, [], []
        self.ports = {port: str(free_port()) for port in PORTS}
        commands = folder / "bin"
        commands.mkdir()
        for name, what in {"python": "", "shoal": " -m shoal"}.items():
            (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable}{what} "$@"\n')
            (commands / name).chmod(0o755)
        path = os.pathsep.join(each for each in sys.path if each)
        self.env = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": path}

    def with_ports(self, text):
        text = text.replace("--registry dir:registry", f"--registry dir:registry --port {self.ports['8500']}")
        for port in ("8501", "7100", "7101"):
            text = text.replace(port, self.ports[port])
        return text

    def write(self, name, text):
        (self.folder / name).write_text(text)

    def run(self, text):
        done = subprocess.run(
            ["sh", "-e", "-c", self.with_ports(text)], cwd=self.folder, env=self.env, capture_output=True, text=True,
            timeout=DEADLINE_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        self.said.append((text, done.stdout))

    def start(self, text):
        log = (self.folder / f"background{len(self.running)}.log").open("w+")
        process = subprocess.Popen(
            ["sh", "-c", f"exec {self.with_ports(text)}"], cwd=self.folder, env=self.env, stdout=log, stderr=log,
        )  # fmt: skip
        self.running.append((process, log))
        port = next(self.ports[port] for port in ("8501", "7100", "7101") if port in text)
        until = time.monotonic() + DEADLINE_S
        while True:
            assert process.poll() is None, f"{text}\n{Path(log.name).read_text()[-4000:]}"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(port))) == 0:
                    return
            assert time.monotonic() < until, f"{text} does not listen:\n{Path(log.name).read_text()[-4000:]}"
            time.sleep(0.1)

    def stop(self):
        for process, _ in self.running:
            process.send_signal(signal.SIGTERM)
        for process, log in self.running:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            log.close()


@pytest.mark.timeout(800)
def test_the_page_runs_top_to_bottom(tmp_path):
    walk = Walk(tmp_path)
    try:
        for language, what, text in blocks():
            if language != "sh":
                walk.write(what, text)
            elif what == "background":
                walk.start(text)
            else:
                walk.run(text)
    finally:
        walk.stop()
    asked = [said for text, said in walk.said if "ask.py" in text]
    assert len(asked) == 3
    assert len(set(asked)) == 3, "each day of learning must move the answers"
    assert '"predictions"' in next(said for text, said in walk.said if "curl" in text)
