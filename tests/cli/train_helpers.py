"""Helpers for the tests of `shoal train`."""

import fcntl
import json
import signal
import subprocess
import sys
import time

from shoal import _core
from shoal.cli.main import main
from shoal.proto.embedding_hash_table_pb2 import EntryDump
from shoal.testing.commands import Command

DEADLINE_S = 300  # torch starts slowly on a busy machine
SMALL = [
    "--set", "model.hidden=[16]", "data.shuffle_rows=2048", "table.lr=0.05", "--dim", "8", "--batch-size", "256",
    "--threads", "1",
]  # fmt: skip


def run(capsys, data, *more, code=0):
    """The events of a run in this process."""
    assert main(["train", "--train", str(data / "train.tsv"), "--json", *SMALL, *map(str, more)]) == code
    return events(capsys.readouterr().out)


def events(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def of(kind, told):
    return [event for event in told if event["event"] == kind]


def command(data, *more):
    return [sys.executable, "-m", "shoal", "train", "--train", str(data / "train.tsv"), *SMALL, *map(str, more)]


def kill_after(shell, event, step, pause_s=0.0):
    """Runs a command with --json up to some event of a step or a later one, and kills it.

    The pipe is the smallest there is, so that however late we are, the run is at most a few lines ahead of us.
    """
    process = Command(*shell[3:], stdout=subprocess.PIPE)
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    with process, open(process.stdout.fileno(), "rb", buffering=0, closefd=False) as lines:
        try:
            while line := lines.readline():
                told = json.loads(line)
                if told["event"] == event and told["step"] >= step:
                    break
            time.sleep(pause_s)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL


def rows_of(checkpoint):
    """The records of all rows of all tables, in an order of their own."""
    files = sorted(checkpoint.glob("features*-of-*"))
    assert files
    return sorted(record for file in files for record in _core.read_records(str(file)))


def newest(folder):
    return sorted(path for path in folder.iterdir() if path.name.startswith("ckpt-"))[-1]


def same_checkpoint(one, other):
    assert one.name == other.name
    assert rows_of(one) == rows_of(other)
    for name in ("dense.safetensors", "rank-00000.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    ours, theirs = (json.loads((path / "manifest.json").read_text())["content"] for path in (one, other))
    assert ours["readers"] == theirs["readers"]
    assert ours["progress"]["samples"] == theirs["progress"]["samples"]


def unstamped(records):
    """Rows without the time of their last update, which is the second in which a run began."""
    dumps = [EntryDump.FromString(record) for record in records]
    for dump in dumps:
        dump.ClearField("last_update_ts_sec")
    return sorted(dump.SerializeToString(deterministic=True) for dump in dumps)
