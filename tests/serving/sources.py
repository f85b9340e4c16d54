"""A source of rows and weights that a test changes by hand."""

import time

import torch

from shoal.serving.sync.publication import Changes
from shoal.stamps import Stamp


class HandSource:
    """Tables of a dict each; ``learn`` and ``remove`` count as one step."""

    def __init__(self, tables, run=1000, base=None, name="trainer", owns=None):
        self.tables, self.name, self.base = dict(tables), name, base
        self.rows = {table: {} for table in tables}
        self.run, self.step = run, base.step if base is not None else 0
        self.touched = {table: set() for table in tables}
        self.since = 0.0
        self.weights = None
        self._fresh_weights = False
        self._owns = owns or (lambda ids: torch.ones(len(ids), dtype=torch.bool))
        self.scans = 0
        self.lost = False

    @property
    def stamp(self):
        return Stamp(self.run, self.step)

    def learn(self, table, ids, value):
        self.step += 1
        self.since = self.since or time.time()
        for each in ids:
            self.rows[table][each] = float(value)
            self.touched[table].add(each)

    def remove(self, table, ids):
        self.step += 1
        for each in ids:
            del self.rows[table][each]
            self.touched[table].add(each)

    def set_weights(self, weights):
        self.weights = {name: value.detach().clone() for name, value in weights.items()}
        self._fresh_weights = True

    def go_on(self, run, base=None, rows=None):
        """The same source in its next run, from a checkpoint with ``rows``."""
        other = HandSource(self.tables, run, base, self.name, self._owns)
        other.rows = {table: dict(each) for table, each in (rows or other.rows).items()}
        return other

    # --- the publisher's calls ----------------------------------------------------------------------------------------

    def take(self):
        ids = {table: torch.tensor(sorted(each), dtype=torch.int64) for table, each in self.touched.items()}
        self.touched = {table: set() for table in self.tables}
        since, self.since = self.since, 0.0
        weights = self.weights if self._fresh_weights else None
        self._fresh_weights, lost, self.lost = False, self.lost, False
        return Changes(stamp=self.stamp, ids=ids, since=since, weights=weights, lost=lost)

    def read(self, table, ids):
        rows = self.rows[table]
        values = torch.tensor([rows.get(each, 0.0) for each in ids.tolist()], dtype=torch.float32)
        present = torch.tensor([each in rows for each in ids.tolist()], dtype=torch.bool)
        return values[:, None].expand(-1, self.tables[table]).contiguous(), present

    def scan(self, table):
        self.scans += 1
        yield torch.tensor(sorted(self.rows[table]), dtype=torch.int64)

    def owns(self, table, ids):
        return self._owns(ids)
