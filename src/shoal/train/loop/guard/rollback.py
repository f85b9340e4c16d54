"""Rolling a run back: its later checkpoints are moved aside, and its next start resumes from an earlier one.

Rows, weights and rows on parameter servers are those of the earlier checkpoint then; replicas are sent what differs.
Reading goes on where the run was, so that the samples that did the damage are not learnt again, unless a replay is
asked for.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from shoal.durable import move_folder, sync_folder, write_whole
from shoal.errors import ConfigError, DataError
from shoal.table.checkpoint.chain import checkpoints_of
from shoal.table.checkpoint.manifest import Manifest
from shoal.train.loop.guard.guard import Trip, clear_trip, read_trip

FILE = "rollback.json"
"""In ``[out] dir`` from a roll-back until the next checkpoint: where to read on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """A checkpoint of a run."""

    step: int
    path: str
    created: str = ""
    samples: int = 0
    damage: str = ""
    """"" for a whole one."""
    tripped: bool = False
    """Whether it was written after the guard had stopped the pushes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """What a roll-back did."""

    step: int
    reason: str
    moved: list[int]
    """Steps whose checkpoints were moved aside."""
    aside: str | None
    """Where they are now."""


def saved_steps(folder: str) -> list[SavedStep]:
    """The checkpoints of a run, oldest first."""
    trip = read_trip(folder)
    found = []
    for one in checkpoints_of(folder).all():
        tripped = trip is not None and one.number not in trip.checkpoints and one.number >= trip.step
        if one.saved is None:
            found.append(SavedStep(step=one.number, path=one.path, damage=one.damage or "damaged", tripped=tripped))
            continue
        manifest = Manifest.of(one.saved)
        samples = manifest.content.get("progress", {}).get("samples", 0)
        found.append(SavedStep(
            step=one.number, path=one.path, created=manifest.created, samples=samples, tripped=tripped
        ))  # fmt: skip
    return found


def choose(saved: Sequence[SavedStep], trip: Trip | None, to: int | None) -> tuple[int, str]:
    """(the step to go back to, why that one).

    Raises:
        ConfigError: there is no such checkpoint, or none that could be chosen.
    """
    whole = [one for one in saved if not one.damage]
    steps = ", ".join(f"{one.step:,}" for one in whole) or "none"
    if to is not None:
        given = next((one for one in saved if one.step == to), None)
        if given is None:
            raise ConfigError(f"there is no checkpoint of step {to:,}; whole ones are of steps {steps}")
        if given.damage:
            raise ConfigError(f"the checkpoint of step {to:,} is damaged ({given.damage}); whole ones: {steps}")
        return to, "it was asked for"
    if trip is None:
        raise ConfigError(
            f"the guard has not stopped the pushes, so name the step to go back to: --to STEP, one of {steps}"
        )
    before = [one.step for one in whole if not one.tripped]
    if not before:
        raise ConfigError(f"no whole checkpoint is left from before step {trip.step:,}, where the guard tripped")
    return before[-1], f"it is the newest from before step {trip.step:,}, where the guard tripped"


def roll_back(folder: str, to: int | None = None, *, replay: bool = False) -> RolledBack:
    """Makes an earlier checkpoint the newest one of a run that is not running.

    Args:
        folder: ``[out] dir`` of the run.
        to: the step; by default that of the newest checkpoint from before the guard tripped.
        replay: the samples since then are read again. By default reading goes on where it was.

    Raises:
        ConfigError: a trainer runs there, or there is no such checkpoint; nothing was changed.
    """
    if not os.path.isdir(folder):
        raise ConfigError(f"{folder} must be the [out] dir of a run; there is no such folder")
    with running(folder) as alone:
        if not alone:
            raise ConfigError(f"a trainer is running in {folder}; stop it first, or use `shoal up`, which does so")
        saved, trip = saved_steps(folder), read_trip(folder)
        step, reason = choose(saved, trip, to)
        later = [one for one in saved if one.step > step]
        whole = [one for one in later if not one.damage]
        aside = _free_folder(folder) if later else None
        reads_on = os.path.join(os.path.basename(aside), os.path.basename(whole[-1].path)) if whole and aside else None
        content = {"to": step, "at": time.time(), "reader": None if replay else reads_on}
        write_whole(os.path.join(folder, FILE), json.dumps(content, indent=1))
        if aside is not None:
            os.mkdir(aside)
            for one in reversed(later):  # a run that starts in between takes up one that it had
                move_folder(one.path, os.path.join(aside, os.path.basename(one.path)))
            sync_folder(aside)
        clear_trip(folder)
        sync_folder(folder)
    return RolledBack(step=step, reason=reason, moved=[one.step for one in later], aside=aside)


def _free_folder(folder: str) -> str:
    dated = os.path.join(folder, time.strftime("before-%Y%m%d-%H%M%S"))
    path, number = dated, 1
    while os.path.exists(path):
        number += 1
        path = f"{dated}-{number}"
    return path


# --- the run's side ---------------------------------------------------------------------------------------------------


@contextmanager
def running(folder: str) -> Iterator[bool]:
    """Says that a run is in ``[out] dir``, as long as the block lasts; whether it is the only one there."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            alone = False
        except OSError:  # a file system without locks
            alone = True
        yield alone
    finally:
        os.close(fd)


def rolled_back(folder: str, step: int) -> dict[str, Any] | None:
    """What a roll-back to the step that a run resumes from asks for: ``reader``, the states to read on with or None.

    None where the run was not rolled back, or where it has a newer checkpoint since.
    """
    path = os.path.join(folder, FILE)
    try:
        with open(path) as file:
            content = json.load(file)
        if content["to"] != step:
            return None
        if content["reader"] is None:
            return {"reader": None}
        manifest = Manifest.read(os.path.join(folder, content["reader"], "manifest.json"))
        return {"reader": manifest.content}
    except FileNotFoundError as error:
        if os.path.exists(path):
            raise DataError(
                f"{path}: {error.filename} is gone; remove {path} to read again from step {step:,}"
            ) from None
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove it to read again from step {step:,}") from None


def forget_rollback(folder: str) -> None:
    """After a checkpoint that has the new position."""
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, FILE))
