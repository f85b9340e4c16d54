"""Two machines in one: network namespaces connected by a virtual cable, made and removed by the test."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

HOME, STRANGER = "10.213.7.1", "10.213.7.2"
HOME6 = "fd21:37::1"

RUN = """
import json, subprocess, sys, threading
from shoal.testing.commands import Command

def source():
    "Where a trainer offers its rows to `shoal sync`."
    from shoal.serving import ModelServer, SyncSource, parameter_sync_client_from_config
    from shoal.table import test_hash_table
    handle, server = parameter_sync_client_from_config(), ModelServer("127.0.0.1:0").start()
    kept.append((SyncSource(server, handle), test_hash_table(1, name_suffix="t", sync_client=handle), server))
    return server.address

kept, started = [], []
for name, wanted, arguments in json.loads(sys.stdin.readline()):
    arguments = [source() if each == "SOURCE" else each for each in arguments]
    started.append((name, wanted, Command(*arguments, stdout=subprocess.PIPE)))
for name, wanted, command in started:
    for line in command.stdout:
        if wanted in line:
            break
    else:
        sys.exit(f"{name} ended with {command.wait()}")
    print(json.dumps([name, line[line.index("{"):]]), flush=True)
    threading.Thread(target=command.stdout.read, daemon=True).start()  # it must not wait for a reader
sys.stdin.read()
"""

SCAN = """
import json, socket, sys

def is_open(address, port):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(20)
        return probe.connect_ex((address, port)) == 0

addresses, ports = json.loads(sys.argv[1]), json.loads(sys.argv[2])
print(json.dumps([port for port in ports if any(is_open(each, port) for each in addresses)]))
"""


def cannot_be_made():
    """Why there cannot be such machines here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` of the package iproute2"
    name = f"shoal-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=60).returncode:
        return "network namespaces are not allowed here"
    subprocess.run(["ip", "netns", "del", name], check=True, timeout=60)
    return ""


class Machines:
    """A machine on which commands run, and another one from which a stranger looks at it."""

    def __init__(self, folder):
        if why := cannot_be_made():
            pytest.skip(why)
        self._folder, self._running = folder, []
        self._home, self._stranger = (f"shoal-{name}-{os.getpid()}" for name in ("home", "stranger"))
        try:
            for name in (self._home, self._stranger):
                self._ip("netns", "add", name)
            self._ip(
                "link", "add", "cable", "netns", self._home, "type", "veth", "peer", "cable", "netns", self._stranger
            )
            for name, address, address6 in (
                (self._home, HOME, HOME6), (self._stranger, STRANGER, "fd21:37::2"),
            ):  # fmt: skip
                self._ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
                self._ip("-n", name, "address", "add", f"{address6}/64", "dev", "cable", "nodad")
                for link in ("lo", "cable"):
                    self._ip("-n", name, "link", "set", link, "up")
        except BaseException:
            self.close()
            raise

    def _ip(self, *arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=60)

    def start(self, commands, seconds=300):
        """Runs `shoal` commands at home: (name, what the line says by which it is ready, arguments); those lines."""
        self._log = self._folder / f"log-{len(self._running)}.txt"
        with self._log.open("w") as log:
            running = subprocess.Popen(
                ["timeout", "-s", "KILL", str(seconds), "ip", "netns", "exec", self._home, sys.executable, "-c", RUN],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=self._folder,
                start_new_session=True,
            )  # fmt: skip
        self._running.append(running)
        asked = [(name, wanted, [str(each) for each in arguments]) for name, wanted, arguments in commands]
        running.stdin.write(json.dumps(asked) + "\n")
        running.stdin.flush()
        ready = {}
        for _ in asked:
            line = running.stdout.readline()
            assert line, f"after {list(ready)}: {self._log.read_text()[-3000:]}"
            name, said = json.loads(line)
            ready[name] = json.loads(said)
        return ready

    def at_home(self, *command):
        return self._run(self._home, *command)

    def by_stranger(self, *command):
        return self._run(self._stranger, *command)

    def _run(self, where, *command):
        return subprocess.run(
            ["ip", "netns", "exec", where, *map(str, command)], capture_output=True, text=True, timeout=300,
            cwd=self._folder,
        )  # fmt: skip

    def python(self, code, *arguments):
        """What a stranger's program prints, as JSON."""
        done = self.by_stranger(sys.executable, "-c", textwrap.dedent(code), *arguments)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    def open_ports(self):
        """TCP ports of home that a stranger can connect to, of all that anything listens on."""
        return set(self.python(SCAN, json.dumps([HOME, HOME6]), sorted(self.listening())))

    def listening(self):
        """TCP ports at home that something listens on."""
        found = self.at_home("cat", "/proc/net/tcp", "/proc/net/tcp6").stdout.splitlines()
        rows = [line.split() for line in found if ":" in line]
        return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}

    def stop(self):
        """Ends the commands that run at home."""
        for running in self._running:
            found = subprocess.run(
                ["ip", "netns", "pids", self._home], capture_output=True, text=True, timeout=60
            ).stdout.split()
            for pid in map(int, found):
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            running.wait(60)
            running.stdin.close()
            running.stdout.close()
        self._running.clear()

    def close(self):
        self.stop()
        for name in (self._home, self._stranger):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=60)
