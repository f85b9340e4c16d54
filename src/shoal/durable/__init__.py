"""Files that survive a crash, or whose damage is detected; used for every checkpoint and export.

A save is a set of files and a JSON manifest, written last, that has a digest of each file and one of itself
(`manifest`). It is written in one of two ways: as a folder that appears by one rename (`folder`), or as files in an
existing folder, such as those under a basename with the manifest next to them (`replace`, `basename`). Numbered folders
in one directory are a `series`: the newest complete one is found, and damage to the others is reported.
"""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(__name__)
