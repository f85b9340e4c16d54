"""The kernels of GPU tables, in Triton's interpreter."""

from pathlib import Path

import pytest

from tests.interpreted import run_tests

FOLDER = Path(__file__).parent / "cuda"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.timeout(600)
def test_gpu_tables_in_the_interpreter(file, tmp_path):
    run_tests(tmp_path, FOLDER / file)
