"""Whether an export is there as a whole: its sub-graphs have folders of their own, which get their names one by one.

Each folder's manifest names the save that it is a part of, and all parts of that save. A version is there when every
part of it is, all of one save, so that the last folder to get its name brings all of them. What a process that was
killed left behind is never seen, and is written anew by the next export of that version.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

from shoal.serving.export.manifest import FILE

Said = tuple[str, tuple[str, ...]]
"""A manifest's save, and the parts of it; empty for an export that is one folder."""


def is_whole(folder: str | os.PathLike[str]) -> bool:
    """Whether a version ``<base>/<sub-graph>/<version>`` is there, and all other parts of its save with it.

    A sub-graph that has no folder next to this one at all is served elsewhere and not looked for.
    """
    folder = Path(folder)
    mine = _said(folder)
    if mine is None:
        return False
    save, parts = mine
    base, version = folder.parent.parent, folder.name
    return all(
        theirs is not None and theirs[0] == save
        for theirs in (_said(base / part / version) for part in parts if (base / part).is_dir())
    )


def whole_versions(folder: str | os.PathLike[str]) -> list[int]:
    """The versions of a sub-graph, or of a model in one folder, that are there as a whole; rising."""
    path = Path(folder)
    found = path.iterdir() if path.is_dir() else ()
    return sorted(int(each.name) for each in found if each.name.isdecimal() and is_whole(each))


def _said(folder: Path) -> Said | None:
    """What the manifest of a folder says; None where there is none."""
    file = folder / FILE
    try:
        found = file.stat()
    except OSError:
        return None
    return _read(str(file), found.st_ino, found.st_mtime_ns)


@functools.lru_cache(1024)
def _read(file: str, inode: int, changed_ns: int) -> Said:
    try:
        content = json.loads(Path(file).read_bytes())
        return str(content.get("save", "")), tuple(map(str, content.get("parts", ())))
    except (OSError, ValueError, AttributeError, TypeError):
        return "", ()  # a broken manifest is told by whoever loads it
