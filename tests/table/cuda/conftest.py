"""GPU tables run here on a CUDA device, or on the CPU when Triton's interpreter is on (TRITON_INTERPRET=1).

With neither, `test_interpreted` in the parent folder runs these tests in a separate process.
"""

import os
import sys

import pytest
import torch

from shoal.table import reset_registry

sys.path.insert(0, os.path.dirname(__file__))  # to import gpu_tables

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NO_DEVICE = "needs a CUDA device, or TRITON_INTERPRET=1 as test_interpreted sets it"


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/table/cuda" not in str(item.path).replace(os.sep, "/"):
            continue
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif not INTERPRETED and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=NO_DEVICE))


@pytest.fixture(autouse=True)
def names_of_tables_are_free():
    reset_registry()


@pytest.fixture
def device():
    """Where the tensors of a table with device="cuda" live."""
    return torch.device("cpu") if INTERPRETED else torch.device("cuda", torch.cuda.current_device())
