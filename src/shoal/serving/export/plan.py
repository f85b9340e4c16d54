"""Where an export goes, and how its directories appear at once or not at all."""

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
    """sub-graph -> directory of what one process writes.

    ``rank`` given means full synchronous training, with ``num_ps`` the number of ranks: rank r writes ``ps_r``, rank 0
    also ``entry`` and ``dense_0``, and the version is the global step so that ranks agree. Otherwise the version is
    ``timestamp``, by default now; where a directory of that second exists, it waits for the next one.
    """
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
                "plan_export: global_step must be given with rank; synchronous training names versions by step"
            )
        version = int(global_step)
    elif timestamp is not None:
        version = int(timestamp)
    else:
        version = int(time.time())
        while any(os.path.exists(os.path.join(base, name, str(version))) for name in names):
            time.sleep(max(0.0, version + 1 - time.time()))
            version = int(time.time())
    return {name: os.path.join(base, name, str(version)) for name in names}


Writer = Callable[[Path], Mapping[str, Any]]
"""Fills a folder and returns the fields of its manifest."""


def write_version(final: str | os.PathLike, write: Writer) -> bool:
    """Lets ``write`` fill a folder, seals it with the manifest's fields that it returns, and names it ``final``.

    False if ``final`` exists, which is kept.
    """
    return bool(write_versions({os.fspath(final): write}))


def write_versions(writers: Mapping[str, Writer], common: Mapping[str, Any] | None = None) -> set[str]:
    """Fills and seals all folders first, then names them one after another in this order; which of them are new.

    If one cannot be written, none gets its name. Folders that exist are kept; see `Drafts`.
    """
    with Drafts(writers, common or {}) as drafts:
        drafts.write()
        return drafts.publish()


class Drafts:
    """Folders of one version that are written together. Those that exist are kept, unless a killed export left them.

    Args:
        writers: where each folder will be -> what fills it, in the order in which they get their names.
        common: fields that all manifests have.
    """

    def __init__(self, writers: Mapping[str, Writer], common: Mapping[str, Any]) -> None:
        self._writers, self._common = writers, common
        self._drafts: dict[str, Draft] = {}

    def write(self) -> None:
        """Fills and seals them under other names."""
        for final, write in self._writers.items():
            if is_whole(final):
                continue
            draft = self._drafts[final] = Draft(final).begin()
            draft.seal({**write(Path(draft.path)), **self._common})

    def publish(self, wanted: Callable[[str], bool] = lambda final: True) -> set[str]:
        """Names those that are wanted; which of them are new."""
        new = set()
        for final, draft in [each for each in self._drafts.items() if wanted(each[0])]:
            if os.path.exists(final) and not is_whole(final):  # nobody has seen it
                draft.clear_target()
            try:
                draft.publish()
                new.add(final)
            except FileExistsError:
                draft.discard()  # somebody else was quicker
            del self._drafts[final]
        return new

    def __enter__(self) -> "Drafts":
        return self

    def __exit__(self, *error: object) -> None:
        for draft in self._drafts.values():
            draft.discard()


def free_second(base: Path) -> int:
    """A version that no standalone export has; where this second has one, the next."""
    version = int(time.time())
    while (base / str(version)).exists():
        time.sleep(max(0.0, version + 1 - time.time()))
        version = int(time.time())
    return version
