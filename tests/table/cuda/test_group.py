"""GPU tables as groups: what every group promises, and what only fused ones do."""

import sys
from pathlib import Path

import pytest
import torch

import shoal
from shoal.table.cuda.groups.fused import FusedGroup
from shoal.table.protocol import groups_of

sys.path.insert(0, str(Path(__file__).parents[1]))  # for group_conformance
from group_conformance import CASES, Kind


def _gpu(count, **options):
    return [shoal.HashTable(4, device="cuda", **options) for _ in range(count)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_group_of_gpu_tables(case, device):
    case(Kind(make=_gpu, exact=False, device=str(device)))


def test_tables_made_one_by_one_are_one_group():
    tables = _gpu(3)
    ((group, places),) = groups_of(tables)
    assert isinstance(group, FusedGroup)
    assert places == [0, 1, 2]
