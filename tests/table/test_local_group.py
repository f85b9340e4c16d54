"""`LocalGroup`: CPU tables that are read in one call. The suite of groups, then what is special about these."""

from __future__ import annotations

import pytest

import shoal
from tests.table.group_conformance import CASES, DIM, Kind


def make(count: int, **options: object) -> list[shoal.HashTable]:
    return [shoal.HashTable(DIM, **options) for _ in range(count)]  # type: ignore[arg-type]


LOCAL = Kind(make)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(case):
    case(LOCAL)
