"""Where an export is written, and how its directories are published atomically."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.durable import Draft
from shoal.errors import ConfigError
from shoal.serving.export.whole import is_whole

EXPORT_DIR_BASE = "exported_models"


def plan_export(
    export_dir_base: str | os.PathLike,
    num_ps: int,
    timestamp: int | None = None,
    global_step: int | None = None,
    rank: int | None = None,
    with_remote_gpu: bool = False,
    dense_only: bool = False,
) -> dict[str, str]:
    """The directory of each sub-graph that this process writes.

    If ``rank`` is given, training is fully synchronous and ``num_ps`` is the number of ranks: rank r writes ``ps_r``,
    rank 0 also writes ``entry`` and ``dense_0``, and the version is the global step so that ranks agree. Otherwise the
    version is ``timestamp``, by default the current second; if that is taken, it waits for the next one.
    """
    if num_ps < 0:
        raise ConfigError(f"plan_export: num_ps must be >= 0, got {num_ps}")
    if rank is None:
        shards = range(num_ps)
    elif not 0 <= rank < max(1, num_ps):
        raise ConfigError(f"plan_export: rank must be 0..{max(1, num_ps) - 1}, got {rank}")
    else:
        shards = range(rank, min(rank + 1, num_ps))
    names = ["entry"] if not rank else []
    if not dense_only:
        names += [f"ps_{shard}" for shard in shards]
    if with_remote_gpu and not rank:
        names.append("dense_0")
    base = os.fspath(export_dir_base)
    if rank is not None:
        if global_step is None:
            raise ConfigError(
                "plan_export: global_step must be given with rank, because synchronous training names versions by step"
            )
        version = checked_version(global_step, "global_step")
    elif timestamp is not None:
        version = checked_version(timestamp, "timestamp")
    else:
        version = free_second(*(Path(base, name) for name in names))
    return {name: os.path.join(base, name, str(version)) for name in names}


def checked_version(number: int, name: str) -> int:
    """A version number that servers can report, an int64; raises ConfigError for any other."""
    if not 0 <= int(number) < 2**63:
        raise ConfigError(f"{name} must be from 0 to 2**63 - 1, because it becomes the version, got {number}")
    return int(number)


Writer = Callable[[Path], Mapping[str, Any]]
"""Fills a folder and returns the fields of its manifest."""


def write_version(final: str | os.PathLike, write: Writer) -> bool:
    """Let ``write`` fill a folder, write the manifest with the fields it returns, and rename the folder to ``final``.

    Returns False if ``final`` already exists; it is then kept.
    """
    return bool(write_versions({os.fspath(final): write}))


def write_versions(writers: Mapping[str, Writer], common: Mapping[str, Any] | None = None) -> set[str]:
    """Fill and seal all folders, then rename them in this order; returns the new ones.

    If one cannot be written, none is renamed. Folders that exist are kept; see `Drafts`.
    """
    with Drafts(writers, common or {}) as drafts:
        drafts.write()
        return drafts.publish()


class Drafts:
    """Folders of one version that are written together. Existing ones are kept unless a killed export left them.

    Args:
        writers: final path of each folder -> the function that fills it, in the order in which they are renamed.
        common: fields to put into all manifests.
    """

    def __init__(self, writers: Mapping[str, Writer], common: Mapping[str, Any]) -> None:
        self._writers, self._common = writers, common
        self._drafts: dict[str, Draft] = {}

    def write(self) -> None:
        """Fill and seal the folders under temporary names."""
        for final, write in self._writers.items():
            if is_whole(final):
                continue
            draft = self._drafts[final] = Draft(final).begin()
            draft.seal({**write(Path(draft.path)), **self._common})

    def publish(self, wanted: Callable[[str], bool] = lambda final: True) -> set[str]:
        """Rename the ``wanted`` folders to their final names; returns the new ones."""
        new = set()
        for final, draft in [each for each in self._drafts.items() if wanted(each[0])]:
            if os.path.exists(final) and not is_whole(final):  # left by a killed export; servers have ignored it
                draft.clear_target()
            try:
                draft.publish()
                new.add(final)
            except FileExistsError:
                draft.discard()  # another process was faster
            del self._drafts[final]
        return new

    def __enter__(self) -> "Drafts":
        return self

    def __exit__(self, *error: object) -> None:
        for draft in self._drafts.values():
            draft.discard()


def free_second(*folders: Path) -> int:
    """A version number that none of the folders has yet: the current second; waits for the next one if it is taken."""
    version = int(time.time())
    while any((folder / str(version)).exists() for folder in folders):
        time.sleep(max(0.0, version + 1 - time.time()))
        version = int(time.time())
    return version
