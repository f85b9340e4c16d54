"""`shoal monitor`: a Prometheus configuration, alert rules and a Grafana dashboard for running processes."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.shared.arguments import parse
from shoal.errors import ConfigError, UsageError

DESCRIPTION = """Write the files for Prometheus and Grafana: prometheus.yml, alert rules and a dashboard.

Example, for a running `shoal up online.toml`:
  shoal monitor --up online.toml --write monitoring
  prometheus --config.file=monitoring/prometheus.yml

For processes given by the addresses of their status pages:
  shoal monitor --target 127.0.0.1:8501 127.0.0.1:9100 --write monitoring

Import shoal-dashboard.json in Grafana. docs/operations.md explains each alert and what to do about it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of `shoal monitor`."""

    write: Path | None = None
    """Folder for the files; existing ones are replaced."""
    target: tuple[str, ...] = ()
    """host:port of each process's metrics."""
    up: Path | None = None
    """The file of a running `shoal up`, whose processes are discovered through its status page."""
    json: bool = False
    """Print the written files as one line of JSON."""


def main(argv: list[str]) -> int:
    return monitor(parse(Options, argv, "monitor", DESCRIPTION))


def monitor(options: Options) -> int:
    from shoal.observe.monitoring import write
    from shoal.observe.security import split_address

    if options.write is None:
        raise UsageError("--write FOLDER must be given; see shoal monitor --help")
    if options.write.exists() and not options.write.is_dir():
        raise ConfigError(f"--write must be a folder, got the file {options.write}")
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
        raise ConfigError(f"--up {file}: `shoal up` is not running; start it first")
    page = read_state(folder).get("page")
    if not page:
        raise ConfigError(f'--up {file}: it has no status page, because [up] page is "off"; give processes by --target')
    return page
