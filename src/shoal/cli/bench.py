"""`shoal bench NAME`: measures one part of the library on this machine."""

import sys
from importlib import import_module

# name -> (module with `main(argv) -> int`, one line of help)
BENCHES: dict[str, tuple[str, str]] = {
    "comm": ("shoal.cli.bench_comm", "send/recv, all-reduce and all-to-all over sizes, for the current launch"),
}

EXAMPLE = "example: shoal bench comm --largest 16MiB --json comm.json\n"


def usage() -> str:
    width = max(map(len, BENCHES))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in BENCHES.items()]
    return "\n".join(
        ["usage: shoal bench NAME [options]", "", *lines, "", EXAMPLE, "`shoal bench NAME --help` explains one."]
    )


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in BENCHES:
        print(f"shoal bench: there is no benchmark {argv[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    return import_module(BENCHES[argv[0]][0]).main(argv[1:])
