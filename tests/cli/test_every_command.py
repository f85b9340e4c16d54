"""Rules for every registered command: help with an example, JSON, exit codes, no traceback, colour, Ctrl-C."""

import importlib
import re
import signal
import subprocess
import sys

import pytest

from shoal.cli import main as cli
from shoal.errors import ConfigError, DataError, UsageError

COMMANDS = sorted(cli.COMMANDS)
ESCAPE = "\x1b"

# Commands with verbs, each of which has its own flags.
VERBS = {
    "bench": ["comm"],
    "gather": ["run", "inspect", "replay", "simulate"],
    "ps": ["", "keygen", "reshard", "status", "handover", "restore"],
    "up": ["", "status", "stop", "logs", "restart"],
    "table": ["stat", "ls", "get", "top", "diff", "export", "import", "reshard", "verify", "from-monolith"],
}
CALLS = [[command, verb] if verb else [command] for command in COMMANDS for verb in VERBS.get(command, [""])]


def called(call):
    return " ".join(call)


def run(capsys, *argv):
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert ESCAPE not in captured.out + captured.err, "colour without a terminal"
    return code, captured.out, captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert re.search(rf"example.*shoal(\s\w+)* {command}\b", out, re.IGNORECASE | re.DOTALL)


@pytest.mark.parametrize("call", CALLS, ids=called)
def test_every_verb_has_help_and_speaks_json(capsys, call):
    code, out, _ = run(capsys, *call, "--help")
    assert code == 0
    assert "--json" in out
    assert "\n\n\n" not in out


@pytest.mark.parametrize("call", CALLS, ids=called)
def test_wrong_flags_end_with_2_and_words_on_stderr(capsys, call):
    code, out, err = run(capsys, *call, "--no-such-flag")
    assert code == 2
    assert err
    assert not out


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (ConfigError("x must be 1, got 2"), 2, "x must be 1, got 2"),
        (UsageError("give a FILE"), 2, "give a FILE"),
        (FileNotFoundError(2, "No such file or directory", "/absent"), 2, "/absent"),
        (FileExistsError(17, "File exists", "/file"), 2, "/file"),
        (PermissionError(13, "Permission denied", "/closed"), 2, "/closed"),
        (DataError("a.csv is damaged"), 1, "a.csv is damaged"),
        (OSError(28, "No space left on device", "/full"), 1, "/full"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(2), 2, ""),
    ],
    ids=[
        "a setting",
        "wrong usage",
        "a file that is not there",
        "a file for a folder",
        "a closed folder",
        "damaged data",
        "the system's",
        "Ctrl-C",
        "exit",
    ],
)
def test_what_ends_a_command_becomes_one_line_and_a_code(capsys, monkeypatch, command, raised, code, says):
    def fail(argv):
        raise raised

    monkeypatch.setattr(importlib.import_module(cli.COMMANDS[command][0]), "main", fail)
    got, out, err = run(capsys, command)
    assert got == code
    assert says in err
    assert err.count("\n") <= 1
    assert not out


MISUSES = {
    "a file that is not there": [
        ["agent", "--config", "absent"], ["gather", "inspect", "absent"], ["gather", "replay", "absent"],
        ["gather", "run", "--window", "1", "--store", "dir:absent", "--peers", "1", "--model", "absent"],
        ["launch", "absent.py"], ["plan", "absent.toml"],
        ["ps", "reshard", "--source", "absent", "--target", "new", "--of", "3"], ["serve", "absent"],
        ["serve", "--config", "absent"], ["table", "stat", "absent"], ["top", "--discover", "absent"],
        ["train", "absent.toml"], ["train", "--train", "absent.tsv"],
        ["rollback", "absent.toml"], ["up", "absent.toml"], ["up", "status", "absent.toml"],
        ["top", "--up", "absent.toml"],
    ],
    "a value that is not allowed": [
        ["bench", "comm", "--largest", "many"], ["demo", "--seconds", "1"],
        ["gather", "run", "--window", "1", "--store", "dir:.", "--peers", "x", "--model", "absent"],
        ["launch", "-n", "0", __file__], ["predict", "nowhere", "{}", "--model", "m"],
        ["predict", "h:1", "{}", "--model", "m", "--deadline", "0"],
        ["ps", "--shard", "5", "--of", "2"], ["ps", "--port", "99999"],
        ["serve", ".", "--port", "99999"], ["table", "top", "t", "--n", "0"], ["top", "a:1", "--interval", "0"],
        ["train", "--train", __file__, "--epochs", "0"], ["train", "--train", __file__, "--set", "nothing"],
    ],
    "something that is missing": [
        ["agent"], ["bench"], ["gather"], ["gather", "run"], ["launch"], ["plan"], ["predict"], ["predict", "h:1"],
        ["ps", "status"], ["serve"],
        ["sync"], ["table"], ["table", "stat"], ["top"], ["train"], ["rollback"], ["up"],
        ["up", "stop"], ["up", "restart"],
    ],
}  # fmt: skip


@pytest.mark.parametrize("call", [call for calls in MISUSES.values() for call in calls], ids=called)
def test_the_same_misuse_has_the_same_code_everywhere(capsys, monkeypatch, tmp_path, call):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *call)
    assert (code, bool(err) or len(call) == 1) == (2, True), err
    assert not list(tmp_path.iterdir())


def test_our_own_mistakes_keep_their_traceback(monkeypatch):
    def fail(argv):
        raise AssertionError("a bug")

    monkeypatch.setattr(importlib.import_module(cli.COMMANDS["table"][0]), "main", fail)
    with pytest.raises(AssertionError):
        cli.main(["table"])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serve", "--port", "x"], "--port: must be a whole number, got 'x'"),
        (["demo", "--seconds", "x"], "--seconds: must be a number, got 'x'"),
        (["serve", ".", "--workers", "0"], "--workers must be at least 1, got 0"),
        (["serve", ".", "--poll-seconds", "-1"], "--poll-seconds must be at least 0, got -1.0"),
        (["sync", "--source", "h:1", "--model", "m", "--target", "h:2", "--interval", "0"], "--interval must be > 0"),
        (["join", "FILE", "--every", "-1"], "--every must be > 0, got -1"),
        (["up", "statsu", "online.toml"], "there is no verb 'statsu' (did you mean 'status'?)"),
        (["ps", "kegen"], "there is no verb 'kegen' (did you mean 'keygen'?)"),
        (["ps", "--shard", "5", "--of", "2"], "a shard's index must be 0..1 of 2, got 5"),
        (["up", "status.toml"], "cannot read the configuration 'status.toml'"),
        (["ps", "restore", "--archive", "dir:a", "--dir", "b"], "--archive must be s3://bucket/prefix, gs://…"),
        (["launch", "--nnodes", "x", "-m", "shoal"], "argument --nnodes: must be N or MIN:MAX, got 'x'"),
        (["monitor", "--write", "FILE"], "--write must be a folder, got the file FILE"),
        (["sync", "--source", "x", "--model", "m", "--target", "127.0.0.1:1"], "an address must be host:port"),
        (["gather", "simulate", "--peers", "0"], "must be at least 1, got 0, 1024 and 1024"),
        (["gather", "simulate", "--faults", "2"], "faults must be in 0..1, copycats and latency_s must be >= 0, got 2"),
        (
            ["gather", "run", "--store", ".", "--window", "1", "--peers", "1", "--model", "FILE"],
            "--model FILE: the text is not the JSON of a gradient spec",
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_wrong_value_is_named(capsys, tmp_path, monkeypatch, argv, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("text")
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert says in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serve", "--config", "FILE"], "FILE is not a ModelServerConfig"),
        (["ps", "--tokens", "FILE"], "the token file FILE is not UTF-8 text"),
        (["predict", "h:1", "{}", "--model", "m", "--token-file", "FILE"], "the token file FILE is not UTF-8 text"),
        (["top", "h:1", "--once", "--token-file", "FILE"], "the token file FILE is not UTF-8 text"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_file_that_is_not_text_is_named(capsys, tmp_path, monkeypatch, argv, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_bytes(b"\xff\xfe\xfd")
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert says in err


def test_sync_names_the_source_that_does_not_answer(capsys):
    from shoal.serving import ModelServer

    server = ModelServer().start()
    try:
        address = f"127.0.0.1:{server.port}"
        code, _, err = run(capsys, "sync", "--source", address, "--model", "m", "--target", "127.0.0.1:1", "--once")
    finally:
        server.stop(0)
    assert code == 1
    assert f"--source {address}: cannot follow a SyncSource there (there is no model 'trainer'" in err


def test_the_command_itself(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)
    assert run(capsys)[0] == 2
    assert run(capsys, "--version")[1].startswith("shoal ")
    code, _, err = run(capsys, "nonsense")
    assert code == 2
    assert "there is no command 'nonsense'" in err


# --- processes --------------------------------------------------------------------------------------------------------

# Each prints something once it runs.
LONG = [["ps"], ["top", "127.0.0.1:1", "--interval", "30"]]

# Background processes ignore SIGINT. A process of its own undoes that: forking this one can fail while gRPC is called.
UNIGNORED = """import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("argv", LONG, ids=called)
def test_ctrl_c_ends_a_running_command_without_a_traceback(argv):
    command = [sys.executable, "-c", UNIGNORED, "-m", "shoal", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
        process.communicate()
    assert said, (process.returncode, err)
    assert process.returncode in (0, 130), err
    assert "Traceback" not in err, err
    assert ESCAPE not in said + out


@pytest.mark.timeout(400)
def test_a_reader_that_goes_away_is_no_error(tmp_path):
    import torch

    import shoal

    shoal.HashTable(2, name="pipe").assign(torch.arange(60_000), torch.ones(60_000, 2)).save(tmp_path / "t")
    line = f"{sys.executable} -m shoal table ls {tmp_path}/t --limit 0 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300)
    assert done.returncode == 141
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
