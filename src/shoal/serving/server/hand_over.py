"""A version switch: which of the rows that were pushed to a version its successor gets.

Both have a time: that by which a pushed row had been read from the trainer, and that at which an export began to read.
A row that was pushed before is in the export, as it was then or newer, and is left alone; one that was pushed after is
copied. So a replica that switches answers like one that starts with the export and is pushed what came after.
"""

import logging

import torch

from shoal.errors import DataError
from shoal.metrics import emit_counter
from shoal.serving.server.servable import Servable, TableView

log = logging.getLogger(__name__)

CHUNK_ROWS = 65536

CARRIED = "carried"
"""Pushed after the export of the successor was begun: copied."""
SUPERSEDED = "superseded"
"""Pushed before: the export has a value that is as new or newer."""
UNDECIDED = "undecided"
"""The export does not say when it was begun: copied, as pushed rows usually are newer."""
DROPPED = "dropped"
"""Pushed after, but the successor has no such table, or one of another dim."""


def hand_over(old: Servable, new: Servable) -> None:
    """From now on ``new`` gets what is pushed to ``old``, too; rows pushed before are copied where they are newer.

    Rows are counted in ``serving_handed_over_rows`` by table and fate: carried, superseded, undecided or dropped.
    """
    with old.push_lock:
        old.successor = new
    try:
        for view in old.tables.values():
            for number, sub_table in enumerate(view.sub_tables):
                _hand_over_rows(old, new, view, number, sub_table)
        with old.push_lock:
            _hand_over_weights(old, new)
    except BaseException:
        with old.push_lock:
            old.successor = None  # it will not take over; pushes to it must not hold up those to the old one
        raise


def _hand_over_rows(old: Servable, new: Servable, view: TableView, number: int, sub_table: str) -> None:
    pushed = view.push_logs[number].pushed()
    newer = pushed.where(lambda mark: new.is_newer(mark) is not False)
    ids, superseded = torch.from_numpy(newer.ids), len(pushed.ids) - len(newer.ids)
    unknown = len(newer.where(lambda mark: new.is_newer(mark) is None).ids)
    count_rows(view.name, SUPERSEDED, superseded)
    where, into = place_of(new, view, number)
    if into is None:
        if len(ids):
            log.warning("table %s: the next version has no table %s of dim %d; %d pushed rows are dropped",
                        view.name, sub_table, view.dims[number], len(ids))  # fmt: skip
        count_rows(view.name, DROPPED, len(ids))
        return
    into.push_logs[where].extend(newer)
    for begin in range(0, len(ids), CHUNK_ROWS):
        with old.push_lock:  # a push may have changed rows since the log was read: they are copied as they are now
            into.copy_sub(where, ids[begin : begin + CHUNK_ROWS], view, number)
    if unknown:
        log.warning("table %s: the next version does not say when its rows were read, so %d pushed rows are kept "
                    "although it may have newer ones; export it again with this version of shoal",
                    sub_table, unknown)  # fmt: skip
    elif len(ids) or superseded:
        log.info("table %s: %d rows that were pushed after the export are kept, %d from before it are not",
                 sub_table, len(ids), superseded)  # fmt: skip
    count_rows(view.name, UNDECIDED, unknown)
    count_rows(view.name, CARRIED, len(ids) - unknown)
    if len(ids) and old.fresh_at is not None:
        new.refreshed(old.fresh_at)


def _hand_over_weights(old: Servable, new: Servable) -> None:
    """Weights that were pushed after the export, and up to when the successor has everything."""
    if old.weights is not None and new.weights is None and new.is_newer(old.weights):
        try:
            new.program.moments.switch(new.program.bound(old.program.moments.net.weights), {})
            new.weights = old.weights
        except (DataError, AttributeError) as error:
            log.info("the next version keeps the weights of its export: those that were pushed do not fit (%s)", error)
    for source, stamp in old.complete.items():
        if source not in new.stamps or new.stamps[source] >= old.stamps.get(source, stamp):
            new.complete[source] = max(stamp, new.complete.get(source, stamp))
        # else it is an older export: what came between the two is not here


def place_of(servable: Servable, view: TableView, number: int) -> tuple[int, TableView | None]:
    """(number, table) that rows of a sub-table go to in another servable; None where it has none that fits."""
    other = servable.tables.get(view.name)
    found = other.number_of(view.sub_tables[number], view.dims[number]) if other is not None else None
    return (0, None) if found is None else (found, other)


def count_rows(table: str, fate: str, rows: int) -> None:
    """Adds to the counter of rows that a version switch decided about."""
    if rows:
        emit_counter("serving_handed_over_rows", rows, f"table={table}|fate={fate}")
