"""The environment variables of synchronous training: how and when their text is read."""

import os
import subprocess
import sys

import pytest
import torch

from shoal.comm import env_int
from shoal.ops.reorder.op import empty_shards
from shoal.sharded import SyncEnvironment


def test_environment_is_read_strictly():
    assert SyncEnvironment.read({}).backward_dtype == torch.float32
    assert SyncEnvironment.read({"MONOLITH_WITH_OPTIMIZED_HOROVOD": "0"}).backward_dtype == torch.float16
    assert SyncEnvironment.read({"MONOLITH_WITH_OPTIMIZED_HOROVOD": ""}).backward_dtype == torch.float32
    assert SyncEnvironment.read({"MONOLITH_WITH_BYTEPS_BWD_CAST": "16"}).backward_dtype == torch.float16
    for name in ("MONOLITH_WITH_BYTEPS_BWD_CAST", "MONOLITH_WITH_BYTEPS", "MONOLITH_SKIP_ALLREDUCE"):
        with pytest.raises(ValueError, match=f"{name} must be an integer, true/yes/on or false/no/off, got 'half'"):
            SyncEnvironment.read({name: "half"})


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("true", 1), ("ON", 1), ("yes", 1), ("0", 0), ("False", 0), ("off", 0), ("", 0)]
)
def test_switches_have_one_reading(text, value, monkeypatch):
    assert SyncEnvironment.read({"MONOLITH_SKIP_ALLREDUCE": text}).skip_allreduce == bool(value)
    cast = {"MONOLITH_WITH_BYTEPS_BWD_CAST": "16", "MONOLITH_WITH_BYTEPS_BWD_FAKE_CAST": text}
    assert SyncEnvironment.read(cast).fake_cast == bool(value)
    monkeypatch.setenv("MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD", text)
    assert empty_shards(5) == value
    monkeypatch.setenv("BYTEPS_TELEMETRY_ON", text)
    assert env_int("BYTEPS_TELEMETRY_ON", 0) == value


def test_a_switch_that_cannot_be_read_is_told_at_its_first_use_and_not_by_an_import():
    code = """if True:
        import os, torch, shoal.sharded.monolith.distributed_ps_sync, shoal.sharded.monolith.feature_utils
        from shoal.sharded import AllToAllHashTable
        try:
            AllToAllHashTable(2)
        except ValueError as error:
            print(error)
        os.environ["MONOLITH_WITH_BYTEPS"] = "on"
        print(AllToAllHashTable(2).size())
    """
    env = {**os.environ, "MONOLITH_WITH_BYTEPS": "maybe"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert "MONOLITH_WITH_BYTEPS must be an integer" in first
    assert second == "0"
