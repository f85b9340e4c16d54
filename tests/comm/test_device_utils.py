"""Checks of `shoal.comm.launch.device_utils` that must not depend on how Python was started."""

import subprocess
import sys

import pytest

PROGRAM = """
from shoal.comm import device_utils, distribution_utils
def refused(call):
    try:
        call()
    except AssertionError as error:
        print(isinstance(error, ValueError), error)
refused(lambda: device_utils.get_visible_gpus(1, 0))
refused(lambda: device_utils.get_visible_gpus(1, 1.5))
distribution_utils.FLAGS.enable_sync_training = True
refused(lambda: device_utils.get_device_fn())
"""


@pytest.mark.parametrize("options", [[], ["-O"]], ids=["python", "python -O"])
def test_bad_arguments_are_refused_also_without_asserts(options, monkeypatch):
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    run = subprocess.run(
        [sys.executable, *options, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.splitlines() == [
        "True processes_per_gpu must be an int of at least 1, got 0",
        "True processes_per_gpu must be an int of at least 1, got 1.5",
        "True synchronous training needs MPI mode: start the ranks with mpirun or torchrun",
    ]
