"""`shoal train` with parameter servers: they hold the rows, and restore them with the trainer's checkpoint."""

import signal
import subprocess

import pytest

from shoal.cli.main import main
from shoal.data import CRITEO, Stream, make_format
from shoal.testing.commands import Command
from tests.cli.train_helpers import DEADLINE_S, SMALL, command, kill_after, newest, of, run, unstamped

pytest.importorskip("zmq")

from shoal.sharded import PsClient
from shoal.sharded.placement.local import LocalServers
from shoal.sharded.ps import Engine, ParameterServer, Shard
from shoal.sharded.ps.protocol import Op, Request


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.timeout(600)
def test_parameter_servers_hold_the_rows(capsys, data, tmp_path):
    with LocalServers(2, ["--threads", "1"], env={"OMP_NUM_THREADS": "1"}) as servers:
        told = run(
            capsys, data, "--ps", *servers.addresses, "--out", tmp_path, "--max-steps", 20, "--eval", data / "eval.tsv"
        )
        assert told[-1]["rows"] > 1000
        again = run(capsys, data, "--ps", *servers.addresses, "--out", tmp_path)
        assert of("start", again)[0]["step"] == 20
        assert again[-1]["samples"] == 12_000
        assert again[-1]["auc"] > 0.6


def ps_rows(addresses, ids):
    """The records of ids on each server."""
    with PsClient(addresses) as client:
        reply = client.read(
            {
                shard: Request(Op.ENTRIES, counts=[len(ids)], names=("features",), ids=ids)
                for shard in range(len(addresses))
            }
        )
        return [unstamped(bytes(entry) for entry in reply[shard].payload) for shard in sorted(reply)]


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [(), ("table.admit_after=2",)], ids=["every id", "admission"])
def test_rows_on_servers_come_back_with_the_checkpoint_of_a_killed_trainer(capsys, data, tmp_path, more):
    ids = some_ids(data)
    ended = []
    for name in ("whole", "killed"):
        flags = ["--durability", "log", "--dir", str(tmp_path / name / "ps"), "--threads", "1"]
        with LocalServers(2, flags, env={"OMP_NUM_THREADS": "1"}) as servers:
            given = ["--ps", *servers.addresses, "--out", tmp_path / name / "run", "--set", "model.dropout=0.1", *more]
            if name == "killed":
                shell = command(data, *given, "--json", "--log-steps", 1)
                kill_after([*shell, "--checkpoint-steps", "1000"], "progress", 3)  # before the first checkpoint
                assert newest(tmp_path / name / "run").name == "ckpt-00000000"
                shell += ["--checkpoint-steps", "8"]
                kill_after(shell, "progress", 21)  # between two checkpoints, so that the servers are ahead
            told = run(capsys, data, *given, "--checkpoint-steps", 8)
            if name == "killed":
                assert of("start", told)[0]["step"] in (16, 24, 32)
            ended.append((told[-1]["rows"], told[-1]["logloss"], ps_rows(servers.addresses, ids)))
    assert ended[0] == ended[1]
    one, other = (newest(tmp_path / name / "run") for name in ("whole", "killed"))
    assert (one / "dense.safetensors").read_bytes() == (other / "dense.safetensors").read_bytes()
    kept = sorted(path.name for path in (tmp_path / "killed" / "ps" / "shard-00000").glob("kept-*"))
    assert len(kept) <= 3  # those of the remaining checkpoints


def some_ids(data):
    stream = Stream([str(data / "train.tsv")], make_format("criteo", CRITEO), CRITEO, batch_size=500)
    return next(iter(stream)).samples.ids.view(-1).unique()


def test_servers_without_the_rows_of_a_checkpoint_are_refused_unless_asked(capsys, data, tmp_path):
    def server(folder):
        return ParameterServer(Engine(Shard(0, 1), "checkpoint", tmp_path / folder))

    given = ["--out", tmp_path / "run", "--max-steps", 3]
    with server("a") as one:
        run(capsys, data, *given, "--ps", one.address)
    with server("b") as other:
        argv = ["train", "--train", str(data / "train.tsv"), *SMALL, *map(str, given[:2]), "--ps", other.address]
        assert main([*argv, "--max-steps", "4"]) == 2
        assert "keeps no checkpoint" in (said := capsys.readouterr().err)
        assert "--dir that they had" in said
        assert main([*argv, "--max-steps", "4", "--set", "train.ps_restore=false"]) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
def test_a_run_that_waits_for_its_servers_ends_at_once_when_stopped(data, number, code):
    shell = command(data, "--ps", "127.0.0.1:1", "--metrics", "off", "--set", "train.ps_deadline_s=600")
    with Command(*shell[3:], stderr=subprocess.PIPE) as process:
        assert "waiting up to" in process.stderr.readline()
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == code
