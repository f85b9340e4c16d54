"""`shoal monitor`: Prometheus' configuration, alert rules and a Grafana dashboard for what runs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.shared.arguments import parse
from shoal.errors import ConfigError, UsageError

DESCRIPTION = """Write what Prometheus and Grafana need to watch a system: prometheus.yml, alert rules and a dashboard.

Example, for a running `shoal up online.toml`:

  shoal monitor --up online.toml --write monitoring

  prometheus --config.file=monitoring/prometheus.yml

or for processes by the addresses of their status pages:

  shoal monitor --target 127.0.0.1:8501 127.0.0.1:9100 --write monitoring

Import shoal-dashboard.json in Grafana. docs/operations.md says for each alert what it means and what to do."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of `shoal monitor`."""

    write: Path | None = None
    """Folder for the files; those of an earlier time are replaced."""
    target: tuple[str, ...] = ()
    """host:port of the metrics of each process."""
    up: Path | None = None
    """The file of a `shoal up` that runs: its processes are found through its status page."""
    json: bool = False
    """Print what was written as one line of JSON."""


def main(argv: list[str]) -> int:
    options = parse(Options, argv, "monitor", DESCRIPTION)
    return options if isinstance(options, int) else monitor(options)


def monitor(options: Options) -> int:
    from shoal.observe.monitoring import write
    from shoal.observe.security import split_address

    if options.write is None:
        raise UsageError("where to? Give --write FOLDER; see shoal monitor --help")
    for address in options.target:
        split_address(address)
    discovered = [] if options.up is None else [f"{_page_of(options.up)}targets.json"]
    written = [str(path) for path in write(options.write, options.target, discovered)]
    if options.json:
        print(json.dumps({"written": written, "targets": list(options.target), "discovered": discovered}))
        return 0
    print("\n".join(written))
    if not options.target and not discovered:
        print("note: prometheus.yml names no process yet; give --target or --up, or add them there", file=sys.stderr)
    print(f"\nNext:\n\n  prometheus --config.file={written[0]}\n", file=sys.stderr)
    return 0


def _page_of(file: Path) -> str:
    from shoal.up.config import load_online
    from shoal.up.files import holder, read_state

    folder = load_online(file).dir
    if holder(folder) is None:
        raise ConfigError(f"--up {file}: `shoal up` does not run; start it first")
    page = read_state(folder).get("page")
    if not page:
        raise ConfigError(f'--up {file}: it has no status page, since [up] page is "off"; name processes by --target')
    return page
