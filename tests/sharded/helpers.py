"""Configurations and parts for the tests of distributed tables."""

import itertools
import re
from datetime import timedelta
from functools import partial

import pytest

import shoal.testing
from shoal.errors import DeadlineError, PeerError
from shoal.table import (
    AdagradOptimizer,
    CombineAsSegment,
    CuckooEmbeddingHashTableConfig,
    EmbeddingHashTableConfig,
    EntryConfig,
    Fp32Compressor,
    HashTable,
    HashTableConfigInstance,
    MultiHashTable,
    MultiTypeHashTable,
    SgdOptimizer,
    ZerosInitializer,
)

LONG = timedelta(minutes=5)
"""A deadline that only a hang reaches, on whatever machine."""
run_ranks = partial(shoal.testing.run_ranks, timeout_s=LONG.total_seconds())
_names = itertools.count()


def config(dim, rate=1.0, optimizer=None, initializer=None, extra=None):
    segment = CombineAsSegment(dim, initializer or ZerosInitializer(), optimizer or SgdOptimizer(), Fp32Compressor())
    message = EmbeddingHashTableConfig(
        entry_config=EntryConfig(segments=[segment]), cuckoo=CuckooEmbeddingHashTableConfig()
    )
    return HashTableConfigInstance(message, [rate], extra)


def adagrad(dim, rate=0.1):
    return config(dim, rate, AdagradOptimizer())


def local(i, config):
    return HashTable.from_config(config, name=f"part_{i}_{next(_names)}")


def multi_type(i, configs):
    return MultiTypeHashTable(configs, lambda name, c: HashTable.from_config(c, name=f"{name}_{i}_{next(_names)}"))


def native(i, configs):
    return MultiHashTable.from_configs(configs, name_suffix=f"{i}_{next(_names)}")


def told(call, match):
    """Has ``call(deadline)`` raise until the error says so: what it tells is what was heard by the deadline."""
    for seconds in (1, 5, 60):
        with pytest.raises((PeerError, DeadlineError)) as caught:
            call(timedelta(seconds=seconds))
        if re.search(match, str(caught.value)):
            return
    pytest.fail(f"{match!r} is not in {caught.value}")


def trainer(addresses, rank, workers):
    """What a worker does that Ray has placed."""
    import torch

    from shoal.sharded import PsClient, ps_table

    with PsClient(addresses) as client:
        table = ps_table(client, 2, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
        for step in range(5):
            table.lookup(torch.arange(10))
            table.apply_gradients(torch.arange(10), torch.ones(10, 2), step)
        table.as_op()
    return rank


def broken_trainer(addresses, rank, workers):
    raise RuntimeError("no such worker")
