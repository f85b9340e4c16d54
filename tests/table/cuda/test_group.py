"""GPU tables with equal rows form a group that follows the rules of every group."""

import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from group_batches import ROUNDS

import shoal
from shoal.table.cuda.groups.fused import FusedGroup
from shoal.table.protocol import Features, Part, Step, groups_of

sys.path.insert(0, str(Path(__file__).parents[1]))  # to import group_conformance
from group_conformance import CASES, Kind


def _gpu(count, **options):
    return [shoal.HashTable(4, device="cuda", **options) for _ in range(count)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_group_of_gpu_tables(case, device):
    case(Kind(make=_gpu, exact=False, device=str(device), rounds=ROUNDS))


def test_tables_made_one_by_one_are_one_group():
    tables = _gpu(3)
    ((group, places),) = groups_of(tables)
    assert isinstance(group, FusedGroup)
    assert places == [0, 1, 2]


def test_different_rows_are_different_groups():
    tables = [shoal.HashTable(dim, optimizer=optimizer, device="cuda")
              for dim, optimizer in ((4, "sgd"), (4, "adagrad"), (8, "sgd"), (4, "sgd"))]  # fmt: skip
    assert [places for _, places in groups_of(tables)] == [[0, 3], [1], [2]]


def test_the_memory_of_tables_goes_with_their_last_user(device):
    gc.collect()
    gc.disable()
    try:
        table = shoal.HashTable(4, device="cuda")
        ((group, _),) = groups_of([table])
        found = group.find(torch.arange(3, device=device), torch.tensor([3]), Features(), missing="initial")
        group.update([Part(found, Features(), torch.ones(3, 4, device=device))], step=Step())
        storage = weakref.ref(table._storage)
        del table, group
        assert storage() is None
    finally:
        gc.enable()
