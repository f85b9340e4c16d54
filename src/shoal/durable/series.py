"""Numbered folders in one directory: find the complete ones, load the newest, remove old ones."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from shoal.durable.files import StrPath, remove_folder
from shoal.durable.folder import read_folder
from shoal.durable.manifest import Saved
from shoal.errors import DataError

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """A folder of a series: its manifest, or a description of the damage."""

    path: str
    number: int
    saved: Saved | None
    damage: str | None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


class Series:
    """The folders ``<prefix><number>`` of a directory.

    Args:
        directory: need not exist yet.
        prefix: beginning of the folders' names.
        digits: minimal number of digits of the numbers.
    """

    def __init__(self, directory: StrPath, prefix: str, digits: int) -> None:
        self.directory, self._prefix, self._digits = os.fspath(directory), prefix, digits
        self._pattern = re.compile(rf"{re.escape(prefix)}(\d{{{digits},}})")

    def path(self, number: int) -> str:
        """The path of the folder with a number, existing or not."""
        return os.path.join(self.directory, f"{self._prefix}{number:0{self._digits}d}")

    def numbers(self) -> list[int]:
        """The numbers of all folders, complete or not."""
        return sorted(self._entries())

    def _entries(self) -> dict[int, str]:
        try:
            entries = os.listdir(self.directory)
        except FileNotFoundError:
            return {}
        return {int(match[1]): entry for entry in entries if (match := self._pattern.fullmatch(entry))}

    def look(self, number: int) -> Found:
        """Check one folder's manifest and the sizes of its files, but not their bytes."""
        entry = self._entries().get(number)
        path = os.path.join(self.directory, entry) if entry else self.path(number)
        try:
            return Found(path, number, read_folder(path, unsealed=True), None)
        except FileNotFoundError:
            return Found(path, number, None, "it has no manifest")
        except (DataError, OSError) as error:
            return Found(path, number, None, str(error))

    def all(self) -> list[Found]:
        """Every folder, oldest first."""
        return [self.look(number) for number in self.numbers()]

    def whole(self) -> list[Found]:
        """The folders without visible damage, oldest first."""
        return [found for found in self.all() if found.damage is None]

    def load_newest(
        self,
        load: Callable[[Found], T],
        report: Callable[[str], None],
        verify: Callable[[Found], None] | None = None,
    ) -> T | None:
        """Load the newest complete folder and return the result; None if there are no folders.

        Args:
            load: gets a folder without visible damage. If it raises a `DataError`, it must have changed nothing, and
                the files are verified: if they are undamaged, the error has another cause (such as rows of another
                width) and is raised.
            report: is called with a message about each damaged folder that was skipped.
            verify: raises a `DataError` for a damaged folder; by default the digests of its files decide.

        Raises:
            DataError: all folders are damaged; or ``load`` raised it for an undamaged one.
        """
        damaged: list[str] = []
        for number in reversed(self.numbers()):
            found = self.look(number)
            damage = found.damage
            if damage is None:
                try:
                    result = load(found)
                except DataError as error:
                    damage = _damage(found, verify)
                    if damage is None:
                        raise error
                else:
                    for each in damaged:
                        report(f"{each}; {found.path} is used instead")
                    return result
            damaged.append(f"checkpoint {found.path} is damaged: {damage}")
        if damaged:
            raise DataError(f"no checkpoint in {self.directory} is complete: {'; '.join(damaged)}")
        return None

    def prune(self, keep: int, pinned: Collection[int] = ()) -> list[str]:
        """Remove all but the newest ``keep`` complete folders and the pinned ones; return the removed names.

        A damaged folder is removed once there are ``keep`` newer complete ones.
        """
        kept = 0
        removed = []
        for found in reversed(self.all()):
            if found.number in pinned or kept < keep:
                kept += found.damage is None and found.number not in pinned
                continue
            remove_folder(found.path)
            removed.append(found.name)
        return removed


def _damage(found: Found, verify: Callable[[Found], None] | None) -> str | None:
    """Describe the damage to the files of a folder; None if they are undamaged."""
    try:
        if verify is not None:
            verify(found)
        elif found.saved is not None:
            found.saved.verify()
        return None
    except DataError as error:
        return str(error)
