"""Numbered folders in one directory: which are whole, which is the newest that can be loaded, which can go."""

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
    """A folder of a series: its manifest, or what is wrong with it."""

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
        directory: it need not be there yet.
        prefix: of the folders' names.
        digits: numbers have at least as many.
    """

    def __init__(self, directory: StrPath, prefix: str, digits: int) -> None:
        self.directory, self._prefix, self._digits = os.fspath(directory), prefix, digits
        self._pattern = re.compile(rf"{re.escape(prefix)}(\d{{{digits},}})")

    def path(self, number: int) -> str:
        """Where the folder of a number is or will be."""
        return os.path.join(self.directory, f"{self._prefix}{number:0{self._digits}d}")

    def numbers(self) -> list[int]:
        """Of all folders, whole or not."""
        return sorted(self._entries())

    def _entries(self) -> dict[int, str]:
        try:
            entries = os.listdir(self.directory)
        except FileNotFoundError:
            return {}
        return {int(match[1]): entry for entry in entries if (match := self._pattern.fullmatch(entry))}

    def look(self, number: int) -> Found:
        """One folder; its manifest and the sizes of its files are checked, their bytes are not."""
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
        """What ``load`` makes of the newest whole folder; None when there are no folders.

        Args:
            load: gets a folder without visible damage. When it raises a `DataError`, and must have changed nothing
                then, the files are verified: where they are as they were written, the error is not about damage (such
                as rows of another width) and is raised.
            report: is told of every damaged folder that was passed over.
            verify: raises a `DataError` for a damaged folder; by default the digests of its files decide.

        Raises:
            DataError: there are folders, and none is whole; or what ``load`` raised for a whole one.
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
            raise DataError(f"no checkpoint in {self.directory} is whole: {'; '.join(damaged)}")
        return None

    def prune(self, keep: int, pinned: Collection[int] = ()) -> list[str]:
        """Removes all but the newest ``keep`` whole folders and the pinned ones; the names of the removed.

        A damaged folder is removed once ``keep`` newer ones are whole.
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
    """What is wrong with the files of a folder, None when they are as they were written."""
    try:
        if verify is not None:
            verify(found)
        elif found.saved is not None:
            found.saved.verify()
        return None
    except DataError as error:
        return str(error)
