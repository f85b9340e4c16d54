"""Tests that run once more in Triton's interpreter, in a process that is forked from a warm one."""

import os
import subprocess

import pytest
import torch

from shoal.testing.commands import Command


def run_tests(tmp_path, *arguments, timeout_s=590):
    """Runs ``pytest ARGUMENTS`` in the interpreter, unless the tests run in this process anyway; what it printed."""
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
        pytest.skip("they run in this process")
    pytest.importorskip("triton")
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/its"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are already imported
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    with Command(*options, *arguments, module="pytest", env=environment, stdout=subprocess.PIPE) as command:
        try:
            out, _ = command.communicate(timeout_s)
        finally:
            command.kill()
    assert command.returncode == 0, out[-6000:]
    return out
