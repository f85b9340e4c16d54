"""Which ids of a table changed since somebody last asked, for copies of the table elsewhere."""

from shoal.table.tracking.tracker import Changed, TableTracker

__all__ = ["Changed", "TableTracker"]
