"""What a replica lacks, from what it says about itself and what its source remembers."""

import numpy as np
import torch

from shoal.fid import distinct
from shoal.serving.sync.history import History, Ids, merge
from shoal.serving.sync.publication import Source
from shoal.serving.sync.target import Session, places_of
from shoal.stamps import Stamp

_NO_IDS = np.empty(0, np.int64)


def lacking(source: Source, history: History, run: int, session: Session, stamp: Stamp) -> tuple[Stamp, Ids] | None:
    """What the replica of ``session`` lacks at ``stamp``, in the source's run ``run``.

    Returns:
        The replica lacks the changes after this stamp, and these rows. None if unknown; it then needs `every_row`.
    """
    have, exported, base = session.complete, session.exported, source.base
    if have is not None and have.run >= run and have >= history.floor:
        return min(have, stamp), {}
    if have is None or base is None or history.floor > Stamp(run, -1):
        return None
    if base <= have and have.run < run and (exported is None or exported <= base):
        # The source resumed from a checkpoint older than the replica's rows; the replica lists those that it got since.
        return Stamp(run, -1), _owned(source, session, session.listed)
    return None


def every_row(source: Source, session: Session, listed: Ids) -> Ids:
    """All rows of the source, and those of its rows that the replica listed: the source may have removed them."""
    ids = {
        table: distinct(np.concatenate([each.numpy() for each in source.scan(table)] or [_NO_IDS]))
        for table in source.tables
    }
    return merge(ids, _owned(source, session, listed))


def unknown_tables(source: Source, session: Session) -> list[str]:
    """The source's tables that the replica does not have with these dims."""
    return sorted(source.tables.keys() - {place[0] for place in places_of(session.layouts, source.tables).values()})


def _owned(source: Source, session: Session, listed: Ids) -> Ids:
    """The ids of this source among those that a replica listed under its own tables' names."""
    parts: dict[str, list[np.ndarray]] = {}
    for name, (table, _, _) in places_of(session.layouts, source.tables).items():
        if name in listed:
            parts.setdefault(table, []).append(listed[name])
    found: Ids = {}
    for table, each in parts.items():
        ids = distinct(np.concatenate(each))
        found[table] = ids[source.owns(table, torch.from_numpy(ids)).numpy()]
    return found
