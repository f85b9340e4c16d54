"""The `shoal` command: finds the subcommand, runs it, turns our errors into one line and an exit code."""

import os
import sys
from importlib import import_module

from shoal.errors import ConfigError, ShoalError, did_you_mean

# name -> (module with `main(argv) -> int`, one line of help). Modules are imported only when they are called.
COMMANDS: dict[str, tuple[str, str]] = {
    "bench": ("shoal.cli.bench", "measure one part of the library on this machine"),
    "serve": ("shoal.cli.serve", "serve exported models over gRPC and REST, taking pushed rows"),
    "predict": ("shoal.cli.predict", "ask a served model: JSON rows in, JSON answers out"),
    "sync": ("shoal.cli.sync", "push what a trainer touched to every serving replica"),
    "agent": ("shoal.cli.agent", "run one process of a serving cluster, or operate its registry"),
    "gather": ("shoal.cli.gather", "gather, inspect, replay or simulate a window of peers' updates"),
    "train": ("shoal.cli.train", "train a click model on your files; checkpoints, resume, ranks, parameter servers"),
    "up": ("shoal.cli.online.up", "run a whole online system from one file: servers, trainer, replicas"),
    "rollback": ("shoal.cli.online.rollback", "bring a run, its servers and its replicas back to a checkpoint"),
    "join": (
        "shoal.cli.online.join",
        "join impressions with later actions from two live streams into training samples",
    ),
    "export": ("shoal.cli.export", "write a version for `shoal serve` from a checkpoint of `shoal train`"),
    "demo": ("shoal.cli.demo", "train a click model on a drifting stream and draw what collisions cost"),
    "launch": ("shoal.cli.launch", "start N local ranks of a script, with a console that shows who says what"),
    "table": ("shoal.cli.table", "look into checkpoints of tables, compare, check, convert and rewrite them"),
    "top": ("shoal.cli.top", "watch running trainers, servers and replicas: rows, rates, lag, errors"),
    "monitor": ("shoal.cli.online.monitor", "write Prometheus' configuration, alert rules and a Grafana dashboard"),
    "plan": ("shoal.cli.plan", "say what training needs on 1 to 1,000 hosts: memory, network, time, bottleneck"),
    "ps": ("shoal.cli.ps", "serve one shard of tables to workers: a parameter server, its keys, its checkpoints"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: shoal COMMAND [options]",
            "",
            *lines,
            "",
            "example: shoal demo --quick",
            "",
            "`shoal COMMAND --help` explains one; `shoal --version` prints the version.",
            "exit codes: 0 done, 1 failed while running (or the answer is no), 2 wrong usage or configuration",
            "(a flag, a setting, a file that is not there), 130 interrupted.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Runs one command; its exit code.

    0 done, 1 failed while running (or the answer is no), 2 wrong usage or configuration, 130 interrupted. Commands with
    further ones say so in their ``--help``. What a user can cause (our errors, the system's) is one line on stderr;
    anything else is our mistake and shows its traceback.
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
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 141
    except (ShoalError, OSError) as error:
        print(f"shoal {argv[0]}: {error}", file=sys.stderr)
        return exit_code_of(error)
    except KeyboardInterrupt:
        print(f"shoal {argv[0]}: interrupted", file=sys.stderr)
        return 130


def exit_code_of(error: Exception) -> int:
    """2 where the command line or a configuration must be changed, 1 where the work itself failed."""
    return 2 if isinstance(error, ConfigError | FileNotFoundError | NotADirectoryError | IsADirectoryError) else 1
