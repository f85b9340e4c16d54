"""The index and the rows of GPU tables: the locations of ids, the growth of memory, and the order of calls."""

from shoal.table.cuda.storage.index import EMPTY, most_slots, stash_cells
from shoal.table.cuda.storage.storage import FRESH, ROW, Storage

__all__ = ["EMPTY", "FRESH", "ROW", "Storage", "most_slots", "stash_cells"]
