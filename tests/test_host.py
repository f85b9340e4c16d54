"""A CPU that cannot multiply bfloat16 matrices gets an error that says what to do."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from shoal.errors import UnsupportedError
from shoal.serving.server.net.placement import Placement
try:
    Placement(precision="bf16")
except UnsupportedError as error:
    print("refused:", error)
else:
    a = torch.ones(256, 64, dtype=torch.bfloat16)
    print("works:", float((a @ a.t()).sum()))
"""


@pytest.mark.parametrize("limit", ["", "AVX512_CORE_FP16"], ids=["all instructions", "without AMX"])
def test_products_in_bfloat16_work_or_the_error_says_what_to_set(limit):
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    if limit:
        environment["ONEDNN_MAX_CPU_ISA"] = limit
    command = [sys.executable, "-c", PROGRAM]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout
    if limit or out.startswith("works"):
        assert out == f"works: {256 * 256 * 64.0}\n"
    else:
        assert "set the environment variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in out
