"""Helpers for the tests of GPU tables."""

import numpy as np
import torch

import shoal
from shoal.table import (
    CombineAsSegment,
    CuckooEmbeddingHashTableConfig,
    EmbeddingHashTableConfig,
    EntryConfig,
    HashTableConfigInstance,
)
from shoal.table.cuda.bridge import copy_of

MIN = -(2**63)


def pair(dim, optimizer, **options):
    """The same table on the CPU and on the GPU."""
    return (
        shoal.HashTable(dim, optimizer=optimizer, seed=7, name="cpu", **options),
        shoal.HashTable(dim, optimizer=optimizer, seed=7, name="gpu", device="cuda", **options),
    )


def config(segments, rates, **fields):
    message = EmbeddingHashTableConfig(
        entry_config=EntryConfig(segments=[CombineAsSegment(*s) for s in segments]),
        cuckoo=CuckooEmbeddingHashTableConfig(),
        **fields,
    )
    return HashTableConfigInstance(message, rates)


def rows_of(native):
    """Ids, times and words of a native table, by id."""
    ids, times, words = copy_of(native)
    order = torch.argsort(ids)
    return ids[order], times[order], words[order]


def assert_same_times(times, others):
    """Times that were given are equal; those that were taken from the clock are of one run."""
    assert ((times - others).abs() < 900).all(), (times, others)


def assert_same_rows(cpu, gpu, tolerance=1e-6):
    """Weights, optimizer states and times of two tables are equal."""
    ids, times, words = rows_of(cpu._native)
    ids2, times2, words2 = rows_of(gpu.staged()._native)
    assert torch.equal(ids, ids2)
    assert_same_times(times, times2)
    # A word can be half of an int64, so compare bits.
    bits = words.numpy().view(np.int32) == words2.numpy().view(np.int32)
    close = np.isclose(words.numpy(), words2.numpy(), rtol=tolerance, atol=tolerance)
    assert (bits | close).all(), np.abs(words.numpy() - words2.numpy())[~(bits | close)]
