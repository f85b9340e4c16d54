"""Tracking of the ids of a table that changed since the last query, for copies of the table elsewhere."""

from shoal.table.tracking.tracker import Changed, TableTracker

__all__ = ["Changed", "TableTracker"]
