"""Version switches: decides which rows pushed to a version its successor gets.

The decision compares two times: when a pushed row was read from the trainer, and when the export began to read. A row
read before that is in the export with the same or a newer value and is not copied; a row read later is copied. So a
replica that switches gives the same answers as one that starts from the export and receives the later pushes.
"""

import logging

import torch

from shoal.errors import DataError
from shoal.metrics import emit_counter
from shoal.serving.server.servable import Servable, TableView

log = logging.getLogger(__name__)

CHUNK_ROWS = 65536

CARRIED = "carried"
"""Pushed after the successor's export began: copied."""
SUPERSEDED = "superseded"
"""Pushed before: the export has the same or a newer value."""
UNDECIDED = "undecided"
"""The export does not record when it began: copied, because pushed rows are usually newer."""
DROPPED = "dropped"
"""Pushed after, but the successor has no such table, or one of another dim."""


def hand_over(old: Servable, new: Servable) -> None:
    """Forward pushes for ``old`` to ``new`` from now on, and copy earlier pushed rows if they are newer.

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
            old.successor = None  # it will not take over; pushes to it must not delay those to the old one
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
        with old.push_lock:  # a push may have changed rows since the log was read: copy their current values
            into.copy_sub(where, ids[begin : begin + CHUNK_ROWS], view, number)
    if unknown:
        log.warning("table %s: the next version does not say when its rows were read, so %d pushed rows are kept "
                    "although it may have newer ones; export it again with this version of shoal",
                    sub_table, unknown)  # fmt: skip
    elif len(ids) or superseded:
        log.info("table %s: %d rows pushed after the export are kept, %d pushed before it are not",
                 sub_table, len(ids), superseded)  # fmt: skip
    count_rows(view.name, UNDECIDED, unknown)
    count_rows(view.name, CARRIED, len(ids) - unknown)
    if len(ids) and old.fresh_at is not None:
        new.refreshed(old.fresh_at)


def _hand_over_weights(old: Servable, new: Servable) -> None:
    """Hand over weights pushed after the export, and the stamps up to which the successor is complete."""
    if old.weights is not None and new.weights is None and new.is_newer(old.weights):
        try:
            new.program.moments.switch(new.program.bound(old.program.moments.net.weights), {})
            new.weights = old.weights
        except (DataError, AttributeError) as error:
            log.info("the next version keeps its export's weights, because the pushed weights do not fit (%s)", error)
    for source, stamp in old.complete.items():
        if source not in new.stamps or new.stamps[source] >= old.stamps.get(source, stamp):
            new.complete[source] = max(stamp, new.complete.get(source, stamp))
        # otherwise it is an older export: changes between the two are missing here


def place_of(servable: Servable, view: TableView, number: int) -> tuple[int, TableView | None]:
    """(number, table) that receives a sub-table's rows in another servable; None if it has no matching one."""
    other = servable.tables.get(view.name)
    found = other.number_of(view.sub_tables[number], view.dims[number]) if other is not None else None
    return (0, None) if found is None else (found, other)


def count_rows(table: str, fate: str, rows: int) -> None:
    """Add to the counter of rows handled by version switches."""
    if rows:
        emit_counter("serving_handed_over_rows", rows, f"table={table}|fate={fate}")
