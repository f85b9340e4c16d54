"""Files that survive a crash, and are noticed when they do not: the one kit behind every checkpoint and export.

A save is a set of files and a JSON manifest, written last, that names each file with a digest and carries one of its
own (`manifest`). It is written in one of two ways: as a folder that appears by one rename (`folder`), or as files in a
folder that stays, such as those under a basename with the manifest next to them (`replace`, `basename`). Numbered
folders in one directory are a `series`: the newest whole one is found, and what is wrong with the others is told.
"""

from shoal.durable.basename import BasenameSave, find_saved, read_newest
from shoal.durable.files import (
    StrPath,
    file_bases,
    make_parents,
    move_folder,
    remove_folder,
    sync_folder,
    temporary_path,
    write_whole,
)
from shoal.durable.folder import Draft, new_folder, read_folder
from shoal.durable.manifest import MANIFEST, FileDigest, Saved, digest_file, read_saved, write_saved
from shoal.durable.replace import digests_below, finish_moves, replace_files
from shoal.durable.series import Found, Series

__all__ = [
    "MANIFEST",
    "BasenameSave",
    "Draft",
    "FileDigest",
    "Found",
    "Saved",
    "Series",
    "StrPath",
    "digest_file",
    "digests_below",
    "file_bases",
    "find_saved",
    "finish_moves",
    "make_parents",
    "move_folder",
    "new_folder",
    "read_folder",
    "read_newest",
    "read_saved",
    "remove_folder",
    "replace_files",
    "sync_folder",
    "temporary_path",
    "write_saved",
    "write_whole",
]
