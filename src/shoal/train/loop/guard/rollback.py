"""Roll a run back: move its later checkpoints aside, so that its next start resumes from an earlier one.

Weights and rows, also those on parameter servers, are then those of the earlier checkpoint; replicas are sent the
differences. Reading continues where the run was, so that it does not train on the bad samples again, unless a replay
is requested.
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
"""The file in ``[out] dir`` that says where to continue reading, from a roll-back until the next checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """A checkpoint of a run."""

    step: int
    path: str
    created: str = ""
    samples: int = 0
    damage: str = ""
    """The damage; "" for a complete checkpoint."""
    tripped: bool = False
    """Whether it was written after the guard had stopped the pushes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """The result of a roll-back."""

    step: int
    reason: str
    moved: list[int]
    """Steps whose checkpoints were moved aside."""
    aside: str | None
    """The folder that they were moved to."""


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
    """The step to go back to, and the reason for it.

    Raises:
        ConfigError: there is no such checkpoint, or no suitable one.
    """
    complete = [one for one in saved if not one.damage]
    steps = ", ".join(f"{one.step:,}" for one in complete) or "none"
    if to is not None:
        given = next((one for one in saved if one.step == to), None)
        if given is None:
            raise ConfigError(f"there is no checkpoint of step {to:,}; steps with complete checkpoints: {steps}")
        if given.damage:
            raise ConfigError(
                f"the checkpoint of step {to:,} is damaged ({given.damage}); steps with complete checkpoints: {steps}"
            )
        return to, "it was requested"
    if trip is None:
        raise ConfigError(f"the guard has not tripped; pass the step to go back to: --to STEP, one of {steps}")
    before = [one.step for one in complete if not one.tripped]
    if not before:
        raise ConfigError(f"there is no complete checkpoint from before step {trip.step:,}, where the guard tripped")
    return before[-1], f"it is the newest from before step {trip.step:,}, where the guard tripped"


def roll_back(folder: str, to: int | None = None, *, replay: bool = False) -> RolledBack:
    """Make an earlier checkpoint the newest one of a run that is not running.

    Args:
        folder: ``[out] dir`` of the run.
        to: the step of that checkpoint; by default the newest one from before the guard tripped.
        replay: read the samples since then again. By default reading continues where it was.

    Raises:
        ConfigError: a trainer is running there, or there is no such checkpoint; nothing was changed.
    """
    if not os.path.isdir(folder):
        raise ConfigError(f"{folder} must be the [out] dir of a run, but there is no such folder")
    with running(folder) as alone:
        if not alone:
            raise ConfigError(f"a trainer is running in {folder}; stop it first, or use `shoal up`, which stops it")
        saved, trip = saved_steps(folder), read_trip(folder)
        step, reason = choose(saved, trip, to)
        later = [one for one in saved if one.step > step]
        complete = [one for one in later if not one.damage]
        aside = folder_aside(folder) if later else None
        position = None  # the checkpoint, relative to ``folder``, whose reader states to continue with
        if complete and aside and not replay:
            position = os.path.join(os.path.basename(aside), os.path.basename(complete[-1].path))
        content = {"to": step, "at": time.time(), "reader": position}
        write_whole(os.path.join(folder, FILE), json.dumps(content, indent=1))
        if aside is not None:
            os.mkdir(aside)
            for one in reversed(later):  # newest first, so that a run that starts meanwhile can resume
                move_folder(one.path, os.path.join(aside, os.path.basename(one.path)))
            sync_folder(aside)
        clear_trip(folder)
        sync_folder(folder)
    return RolledBack(step=step, reason=reason, moved=[one.step for one in later], aside=aside)


def folder_aside(folder: str) -> str:
    """The path of a new folder ``before-DATE`` in ``folder``, for checkpoints that are moved aside."""
    dated = os.path.join(folder, time.strftime("before-%Y%m%d-%H%M%S"))
    path, number = dated, 1
    while os.path.exists(path):
        number += 1
        path = f"{dated}-{number}"
    return path


# --- the run's side ---------------------------------------------------------------------------------------------------


@contextmanager
def running(folder: str, *, wait_s: float = 0.0) -> Iterator[bool]:
    """Mark ``[out] dir`` as in use inside the block; yields whether no other run uses it, for ``wait_s`` or longer."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + wait_s
    try:
        while not (alone := _locked(fd)) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield alone
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def rolled_back(folder: str, step: int) -> dict[str, Any] | None:
    """The request of a roll-back to ``step``, from which a run resumes; None if the run was not rolled back to it.

    Its ``reader`` is the manifest's content with the reader states to continue with, or None to read samples again.
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
                f"{path} names {error.filename}, which does not exist; remove {path} to read again from step {step:,}"
            ) from None
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove it to read again from step {step:,}") from None


def forget_rollback(folder: str) -> None:
    """Remove the request of a roll-back, once a newer checkpoint has the position."""
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, FILE))
