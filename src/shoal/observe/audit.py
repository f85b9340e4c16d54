"""The audit log: who changed what a server serves, and the outcome; also written to a file if one is set."""

import json
import logging
import time
from pathlib import Path
from typing import Any

from shoal.observe.lines import Lines, stamp

log = logging.getLogger("shoal.audit")

_files: list[Lines] = []


def record(event: str, **fields: Any) -> None:
    """Write one line: the event (``push``, ``reload``, ``load``, ``refused``, …) and its details."""
    kept = {key: value for key, value in fields.items() if value not in ("", None)}
    log.info("%s %s", event, json.dumps(kept, default=str))
    line = {"time": stamp(time.time()), "event": event, **kept}
    for each in _files:
        each.write(line)


def to_file(path: str | Path) -> Lines:
    """Also write this process's audit lines to a file, until :func:`end_file`."""
    made = Lines(path)
    _files.append(made)
    return made


def end_file(lines: Lines) -> None:
    _files.remove(lines)
    lines.close()
