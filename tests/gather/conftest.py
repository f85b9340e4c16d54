"""Fixtures of the gather's tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gather.ranks import run_ranks as _run_ranks


@pytest.fixture
def run_ranks():
    return _run_ranks
