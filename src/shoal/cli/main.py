"""The `shoal` command: finds the subcommand, runs it, turns our errors into one line and an exit code."""

import os
import sys
from importlib import import_module

from shoal.cli.shared.usage import usage_text
from shoal.errors import ConfigError, ShoalError, as_missing_extra, did_you_mean

# name -> (module with `main(argv) -> int`, one line of help). Modules are imported only when they are called.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("shoal.cli.demo", "train a click model on a drifting stream and plot the cost of hash collisions"),
    "train": (
        "shoal.cli.train",
        "train a click model on your files or streams, on one process, many ranks or parameter servers",
    ),
    "launch": ("shoal.cli.launch", "start N local ranks of a script, with every output line labelled by rank"),
    "plan": ("shoal.cli.plan", "estimate memory, network, step time and bottleneck on 1 to 1,000 hosts"),
    "export": ("shoal.cli.export", "turn a `shoal train` checkpoint into a version for `shoal serve`"),
    "serve": ("shoal.cli.serve", "serve exported models over gRPC and REST, taking pushed rows"),
    "predict": ("shoal.cli.predict", "query a served model: JSON rows in, JSON predictions out"),
    "sync": ("shoal.cli.sync", "push freshly trained rows to every serving replica"),
    "up": ("shoal.cli.online.up", "run a complete online system from one file: servers, trainer, replicas"),
    "top": ("shoal.cli.top", "watch running trainers, servers and replicas: rows, rates, lag, errors"),
    "monitor": ("shoal.cli.online.monitor", "write a Prometheus configuration, alert rules and a Grafana dashboard"),
    "rollback": ("shoal.cli.online.rollback", "roll a run, its servers and its replicas back to a checkpoint"),
    "join": (
        "shoal.cli.online.join",
        "join impressions with later actions from two live streams into training samples",
    ),
    "table": ("shoal.cli.table", "inspect, compare, verify, convert and reshard checkpoints of tables"),
    "ps": ("shoal.cli.servers.ps", "run a parameter server for one shard, and manage its keys and checkpoints"),
    "agent": ("shoal.cli.agent", "run one process of a serving cluster, or manage its registry"),
    "gather": ("shoal.cli.gather", "gather, inspect, replay or simulate a window of peers' updates"),
    "bench": ("shoal.cli.bench", "measure one part of the library on this machine"),
}


NOTES = """\
example: shoal demo --quick

`shoal COMMAND --help` describes a command; `shoal --version` prints the version.
exit codes: 0 success, 1 failed while running (or the answer is no), 2 wrong usage or configuration
(a bad flag or setting, a missing file), 130 interrupted."""


_WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


def usage() -> str:
    return usage_text("COMMAND", {name: text for name, (_, text) in COMMANDS.items()}, NOTES)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 success, 1 failed while running (or the answer is no), 2 wrong usage or configuration, 130 interrupted. Commands
    with more exit codes list them in ``--help``. Our own errors and the system's print one line on stderr; any other
    exception is a bug and shows its traceback.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "SHOAL_PARENT" in os.environ:
        from shoal.cli.shared.parent import die_with_parent

        die_with_parent()
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        from shoal import __version__

        print(f"shoal {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        hint = did_you_mean(argv[0], COMMANDS)
        print(f"shoal: there is no command {argv[0]!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return import_module(COMMANDS[argv[0]][0]).main(argv[1:])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
    except BrokenPipeError:  # the reader of our output has exited, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 141
    except (ShoalError, OSError) as error:
        print(f"shoal {argv[0]}: {error}", file=sys.stderr)
        return exit_code_of(error)
    except ModuleNotFoundError as error:
        missing = as_missing_extra(error)
        if missing is None:
            raise
        print(f"shoal {argv[0]}: {missing}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"shoal {argv[0]}: interrupted", file=sys.stderr)
        return 130


def exit_code_of(error: Exception) -> int:
    """Return 2 if the command line or the configuration must change, 1 if the work itself failed."""
    return 2 if isinstance(error, (ConfigError, *_WRONG_PATH)) else 1
