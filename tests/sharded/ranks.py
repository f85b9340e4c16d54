"""Ranks as threads, and tables over two ranks that one thread uses like local ones."""

import threading

import torch

import shoal
from shoal.comm import InProcessRanks
from shoal.sharded import AllToAllHashTable
from shoal.table.protocol import Part, groups_of

LIMIT_S = 60.0


def together(calls, limit_s=LIMIT_S):
    """Makes the calls at once, each in a thread of its own; their results, or what they raised."""
    results = [None] * len(calls)

    def work(number):
        try:
            results[number] = calls[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=[number], daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def in_ranks(world, fn, *args, timeout_s=LIMIT_S):
    """``fn(ranks, *args)`` on every rank; results, or what they raised, by rank."""
    group = InProcessRanks.create_group(world, timeout_s=timeout_s)
    return together([lambda ranks=ranks: fn(ranks, *args) for ranks in group])


def raised(results):
    """The results, unless one of them is an error."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Followed:
    """A table over two ranks, of which rank 1 makes every call that rank 0 makes, without ids."""

    def __init__(self, tables):
        self.ranks = tables
        self.dim_size, self.name = tables[0].dim_size, tables[0].name

    def group_key(self):
        return "followed", self.ranks[0].group_key()

    @staticmethod
    def make_group(tables):
        return FollowedGroup(tables)

    def _both(self, call):
        return raised(together([lambda t=t, ids=slice(None) if r == 0 else slice(0, 0): call(t, ids)
                                for r, t in enumerate(self.ranks)]))[0]  # fmt: skip

    def assign(self, ids, values):
        self._both(lambda table, some: table.assign(ids[some], values[some]))

    def lookup(self, ids):
        return self._both(lambda table, some: table.lookup(ids[some]))

    def erase(self, ids):
        for table in self.ranks:
            table.table.erase(ids)

    def clear(self):
        for table in self.ranks:
            table.table.clear()

    def size(self):
        return self._both(lambda table, some: table.size())

    def as_op(self):
        return self


class FollowedGroup:
    """Rank 0's group; rank 1's group gets the same calls without ids. What rank 0 raised comes first."""

    def __init__(self, tables):
        self.tables = tables
        groups = [groups_of([table.ranks[rank] for table in tables]) for rank in range(2)]
        assert [len(found) for found in groups] == [1, 1], "one group per rank"
        self.groups = [found[0][0] for found in groups]
        self.dim, self.traits = self.groups[0].dim, self.groups[0].traits
        self.turn = threading.Lock()
        self.followers = {}

    def _both(self, first, second):
        with self.turn:
            results = together([first, second])
        return raised(results)

    def find(self, ids, counts, features, *, missing):
        none, nobody = ids[:0], torch.zeros_like(counts)
        found, follower = self._both(
            lambda: self.groups[0].find(ids, counts, features, missing=missing),
            lambda: self.groups[1].find(none, nobody, features, missing=missing),
        )
        self.followers[int(found.came[1])] = follower
        return found

    def _follower(self, found):
        return self.followers[int(found.came[1])]

    def rows(self, found, features, *, missing):
        follower = self._follower(found)
        return self._both(
            lambda: self.groups[0].rows(found, features, missing=missing),
            lambda: self.groups[1].rows(follower, features, missing=missing),
        )[0]

    def pooled(self, found, features, offsets, weights, out, *, missing, marks=None):
        follower, none = self._follower(found), torch.zeros_like(offsets)
        other = torch.zeros_like(out)
        self._both(
            lambda: self.groups[0].pooled(found, features, offsets, weights, out, missing=missing, marks=marks),
            lambda: self.groups[1].pooled(
                follower, features, none, None if weights is None else weights[:0], other, missing=missing
            ),
        )
        assert not other.any()

    def update(self, parts, *, step, each="sum"):
        followers = [
            Part(self._follower(part.found), part.features, torch.zeros_like(part.grad), torch.zeros_like(part.offsets),
                 None if part.weights is None else part.weights[:0])
            if part.offsets is not None
            else Part(self._follower(part.found), part.features, part.grad[:0])
            for part in parts
        ]  # fmt: skip
        self._both(
            lambda: self.groups[0].update(parts, step=step, each=each),
            lambda: self.groups[1].update(list(reversed(followers)), step=step, each=each),
        )


def two_ranks(count, *, ways=("row",), **options):
    """Tables of `tests.table.group_conformance.DIM` over two ranks, spread in turn as ``ways`` say."""
    from tests.table.group_conformance import DIM

    ranks = InProcessRanks.create_group(2, timeout_s=LIMIT_S)
    return [
        Followed(
            [
                AllToAllHashTable(
                    backend=each,
                    way=ways[k % len(ways)],
                    factory=lambda rank, k=k: shoal.HashTable(DIM, name=f"t{k}", **options),
                )
                for each in ranks
            ]
        )
        for k in range(count)
    ]
