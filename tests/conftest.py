"""Settings that every test shares."""

import os
import shutil
import subprocess

import pytest
import torch
from hypothesis import HealthCheck, settings

from shoal.sharded.placement.local import LocalServers
from shoal.testing import ranks
from shoal.testing.commands import Command

# Tests write to memory if there is room: they save often, and on a disk each save would wait.
MEMORY, ROOM_BYTES = "/dev/shm", 6 << 30
if os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > ROOM_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

# AMX instructions do not work in every virtual machine that announces them; torch would fail there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# The same examples on every run, so that a failure belongs to the change it came with; new ones are searched for with
# HYPOTHESIS_PROFILE=thorough.
settings.register_profile(
    "shoal",
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("thorough", parent=settings.get_profile("shoal"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "shoal"))

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import make_quick

    make_quick()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") == "loadfile":
        from tests.schedule import Scheduling

        return Scheduling(config, log)
    return None


# Ranks import the module of their test, and torch's optimizers load the compiler.
ranks.PRELOADED[:0] = ["tests.warm_interpreter"]
ranks.PRELOADED += ["pytest", "hypothesis", "torch._dynamo", "shoal.train.loop.trainer", "shoal.gather.protocol.gather"]


@pytest.fixture(autouse=True)
def random_tensors_do_not_depend_on_the_tests_before():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    """torch.empty is filled with NaN (or the largest integer), so a kernel that skips an element is caught."""
    torch._C._set_deterministic_algorithms(True, warn_only=True)  # torch's own function imports the compiler
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch._C._set_deterministic_algorithms(False)


@pytest.fixture
def forked_servers(monkeypatch):
    """Parameter servers of `LocalServers` are forked from a process that has imported torch already."""

    def spawn(self, i, more):
        command = ["ps", "--shard", i, "--of", self.count, "--json", *self.options, *more]
        return Command(*command, stdout=subprocess.PIPE, env=self._env)

    monkeypatch.setattr(LocalServers, "_spawn", spawn)
