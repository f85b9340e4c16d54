"""Replicas in separate processes, killed while they get pushes and requests."""

import contextlib
import signal
import subprocess
import threading
import time

import grpc
import torch

from shoal.serving.sync.publisher import Publisher
from shoal.stamps import Stamp
from shoal.testing.commands import Command
from tests.serving.helpers import eventually, free_port
from tests.serving.sources import HandSource
from tests.serving.sync.test_publisher import LONG, export, scores

ROWS = 500


class Replica:
    """``shoal serve`` of a folder, on a port that stays the same."""

    def __init__(self, folder):
        self.folder, self.port = folder, free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self):
        command = ["serve", self.folder, "--port", self.port, "--name", "m", "--poll-seconds", 0.1, "--threads", 1]
        self.process = Command(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(LONG)


def test_killed_replicas_are_as_the_source_after_the_next_flush(tmp_path):
    """The row plus the bias is 0 in every round; what a client sees is never a mix, whatever is killed."""
    path = export(tmp_path, 1, dict.fromkeys(range(ROWS), 0.0), {"trainer": Stamp(1000, 0)})
    source = HandSource({"user": 2}, base=Stamp(999, 0))
    source.rows["user"] = dict.fromkeys(range(ROWS), 0.0)
    replicas = [Replica(path) for _ in range(2)]
    publisher = Publisher(source, [each.address for each in replicas], model="m", timeout_s=10.0)
    stop, wrong, answers = threading.Event(), [], []

    def ask(replica):
        ids = list(range(0, ROWS, 7))
        while not stop.is_set():
            with contextlib.suppress(grpc.RpcError):
                found = scores(replica, ids)
                answers.append(replica.port)
                if any(found):
                    wrong.append(sorted(set(found)))
            time.sleep(0.002)

    threads = [threading.Thread(target=ask, args=(each,)) for each in replicas]
    try:
        publisher.flush(LONG)
        for each in threads:
            each.start()
        for value in range(1, 13):
            source.learn("user", range(ROWS), float(value))
            source.set_weights({"bias": torch.tensor([-2.0 * value]), "scale": torch.ones(1)})
            if value in (4, 8):
                victim = replicas[value // 4 - 1]
                publisher.round()
                victim.kill()
                victim.start()
                eventually(lambda: not publisher._replicas[victim.address].busy)  # noqa: B023
            else:
                publisher.flush(LONG)
        source.remove("user", [1, 8])
        publisher.flush(LONG)
        stop.set()
        for replica in replicas:
            assert scores(replica, [0, 1, 7, 8]) == [0.0, -24.0, 0.0, -24.0]
        assert set(answers) == {each.port for each in replicas}
        assert wrong == []
        assert source.scans == 0  # no replica had to be sent every row
    finally:
        stop.set()
        publisher.close()
        for each in threads:
            if each.ident:
                each.join(LONG)
        for each in replicas:
            each.kill()
