"""Helpers for the tests of readers."""

from contextlib import closing


def read_all(form, path, rows=7):
    """All samples of a file, unit by unit, and the bad rows."""
    bad, parts = [], []
    for unit in form.units(str(path)):
        with closing(form.open(unit, None, bad.append)) as cursor:
            while (part := cursor.read(rows)) is not None:
                parts.append(part)
    return parts, bad


def labels(parts):
    return [value for part in parts for value in part.label.tolist()]
