"""The kernels of GPU tables, in Triton's interpreter, in a process that sets it up before the first import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "cuda"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.timeout(900)
def test_gpu_tables_in_the_interpreter(file, tmp_path):
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
        pytest.skip("the folder's tests run in this process")
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/its"]
    done = subprocess.run(
        [*command, str(FOLDER / file)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=890,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
