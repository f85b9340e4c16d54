"""Files that survive a crash, and are noticed when they do not: the one kit behind every checkpoint and export.

A save is a set of files and a JSON manifest, written last, that names each file with a digest and carries one of its
own (`manifest`). It is written in one of two ways: as a folder that appears by one rename (`folder`), or as files in a
folder that stays, such as those under a basename with the manifest next to them (`replace`, `basename`). Numbered
folders in one directory are a `series`: the newest whole one is found, and what is wrong with the others is told.
"""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(__name__)
