"""Audit lines: who changed what a server serves, and how it ended; in the log, and in a file if one is named."""

import json
import logging
import time
from pathlib import Path
from typing import Any

from shoal.observe.lines import Lines, stamp

log = logging.getLogger("shoal.audit")

_files: list[Lines] = []


def record(event: str, **fields: Any) -> None:
    """One line: what happened (``push``, ``reload``, ``load``, ``refused``, …), and what is known of it."""
    kept = {key: value for key, value in fields.items() if value not in ("", None)}
    log.info("%s %s", event, json.dumps(kept, default=str))
    line = {"time": stamp(time.time()), "event": event, **kept}
    for each in _files:
        each.write(line)


def to_file(path: str | Path) -> Lines:
    """Writes the lines of this process to a file as well, until :func:`end_file`."""
    made = Lines(path)
    _files.append(made)
    return made


def end_file(lines: Lines) -> None:
    _files.remove(lines)
    lines.close()
