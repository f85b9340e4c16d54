"""`shoal bench NAME`: measure one part of the library on this machine."""

import sys
from importlib import import_module

from shoal.cli.shared.usage import usage_text

# name -> (module with `main(argv) -> int`, one line of help)
BENCHES: dict[str, tuple[str, str]] = {
    "comm": ("shoal.cli.bench_comm", "latency and goodput of send/recv, all-reduce and all-to-all by message size"),
}

NOTES = """\
example: shoal bench comm --largest 16MiB --json comm.json

`shoal bench NAME --help` describes a benchmark."""


def usage() -> str:
    return usage_text("bench NAME", {name: text for name, (_, text) in BENCHES.items()}, NOTES)


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in BENCHES:
        print(f"shoal bench: there is no benchmark {argv[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    return import_module(BENCHES[argv[0]][0]).main(argv[1:])
