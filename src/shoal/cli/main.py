"""The `shoal` command: finds the subcommand, runs it, turns our errors into one line and an exit code."""

import sys
from importlib import import_module

from shoal.errors import ShoalError

# name -> (module with `main(argv) -> int`, one line of help). Modules are imported only when they are called.
COMMANDS: dict[str, tuple[str, str]] = {
    "bench": ("shoal.cli.bench", "measure one part of the library on this machine"),
    "serve": ("shoal.cli.serve", "serve exported models over gRPC and REST, taking pushed rows"),
    "sync": ("shoal.cli.sync", "push what a trainer touched to every serving replica"),
    "agent": ("shoal.cli.agent", "run one process of a serving cluster, or operate its registry"),
    "gather": ("shoal.cli.gather", "gather, inspect, replay or simulate a window of peers' updates"),
    "train": ("shoal.cli.train", "train a click model on your files; checkpoints, resume, ranks, parameter servers"),
    "demo": ("shoal.cli.demo", "train a click model on a drifting stream and draw what collisions cost"),
    "launch": ("shoal.cli.launch", "start N local ranks of a script, with a console that shows who says what"),
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
            "`shoal COMMAND --help` explains one; `shoal --version` prints the version.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        from shoal import __version__

        print(f"shoal {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        print(f"shoal: there is no command {argv[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return import_module(COMMANDS[argv[0]][0]).main(argv[1:])
    except ShoalError as error:
        print(f"shoal {argv[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"shoal {argv[0]}: interrupted", file=sys.stderr)
        return 130
