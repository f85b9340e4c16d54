"""Checks of user input remain when Python runs with ``-O``, which removes ``assert`` statements."""

import subprocess
import sys

CODE = """
import os
import torch
from shoal.comm import bps_comm_benchmark, byteps_a2a_plan
from shoal.sharded import (
    DistributedMultiTypeHashTableMpi, ExportMode, PartitionedHashTable, create_native_multi_hash_table,
    enter_export_mode,
)
from shoal.train import SyncHelper
from tests.sharded.helpers import config, native
from tests.sharded.monolith.test_partitioned import settings

table = DistributedMultiTypeHashTableMpi(1, lambda rank: native(rank, {"a": config(1)}))
ids = {"a": torch.tensor([1])}
os.environ["MONOLITH_BENCHMARK_BPS"] = "nothing"


def nested():
    with enter_export_mode(ExportMode.STANDALONE), enter_export_mode(ExportMode.STANDALONE):
        pass


for call in (
    lambda: DistributedMultiTypeHashTableMpi(2, lambda rank: native(rank, {"a": config(1)})),
    lambda: table.lookup(ids, {}, None),
    lambda: table.lookup({"b": ids["a"]}, {}, table.reorder(ids)),
    lambda: PartitionedHashTable(2, native, True, parser_ctx=settings(2, True, enable_gpu_emb=True)),
    lambda: create_native_multi_hash_table(2, {"a": config(1)}, None, sync_clients=[None]),
    lambda: SyncHelper(2, False).start_worker(2),
    lambda: byteps_a2a_plan(10, 3),
    bps_comm_benchmark,
    nested,
):
    try:
        call()
    except AssertionError as error:
        print(error)
"""
EXPECTED = [
    "shard_num must be the number of ranks, 1, got 2",
    "support for reordering outside the data pipeline is dropped",
    "slot_to_id must have the slots of the tables, ['a'], got ['b']",
    "num_ps must be the number of ranks, 1, got 2",
    "sync_clients must have one sync client per server, 2, got 1",
    "worker index must be in 1..1, got 2",
    "all-to-all of 10 floats cannot be cut into 3 equal parts",
    "MONOLITH_BENCHMARK_BPS must be one of",
    "export mode must not be nested",
]


def test_wrong_arguments_raise_without_assert_statements():
    run = subprocess.run([sys.executable, "-O", "-c", CODE], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    told = run.stdout.splitlines()
    assert len(told) == len(EXPECTED), run.stdout
    for line, expected in zip(told, EXPECTED, strict=True):
        assert line.startswith(expected)
