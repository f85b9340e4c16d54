"""Whether an export is complete: each of its sub-graphs has its own folder, and folders are renamed one by one.

Each folder's manifest names the save that it belongs to and all parts of that save. A version is complete when every
part exists and all belong to the same save, so renaming the last folder publishes all of them. Folders left by a killed
process are ignored, and the next export of that version writes them again.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

from shoal.serving.export.manifest import FILE

INT64_DIGITS = 19

SaveParts = tuple[str, tuple[str, ...]]
"""A manifest's save and the parts of that save; empty for an export that is one folder."""


def is_whole(folder: str | os.PathLike[str]) -> bool:
    """Whether a version ``<base>/<sub-graph>/<version>`` and all other parts of its save exist.

    A part whose sub-graph has no folder in ``<base>`` is served elsewhere and is not required.
    """
    folder = Path(folder)
    mine = _save_parts(folder)
    if mine is None:
        return False
    save, parts = mine
    base, version = folder.parent.parent, folder.name
    return all(
        theirs is not None and theirs[0] == save
        for theirs in (_save_parts(base / part / version) for part in parts if (base / part).is_dir())
    )


def whole_versions(folder: str | os.PathLike[str]) -> list[int]:
    """The complete versions of a sub-graph, or of a model in one folder, in ascending order."""
    path = Path(folder)
    found = path.iterdir() if path.is_dir() else ()
    named = [each for each in found if each.name.isdecimal() and len(each.name) <= INT64_DIGITS]
    return sorted(int(each.name) for each in named if int(each.name) < 2**63 and is_whole(each))


def _save_parts(folder: Path) -> SaveParts | None:
    """The manifest's save and parts; None if there is no manifest."""
    file = folder / FILE
    try:
        found = file.stat()
    except OSError:
        return None
    return _read(str(file), found.st_ino, found.st_mtime_ns)


@functools.lru_cache(1024)
def _read(file: str, inode: int, changed_ns: int) -> SaveParts:
    try:
        content = json.loads(Path(file).read_bytes())
        return str(content.get("save", "")), tuple(map(str, content.get("parts", ())))
    except (OSError, ValueError, AttributeError, TypeError):
        return "", ()  # loading the broken manifest reports the error
