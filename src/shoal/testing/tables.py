"""Hypothesis strategies for tests of tables: optimizers, segments, tables with their references, gradients."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from shoal import table
from shoal.table import EmbeddingHashTableConfig, EntryConfig, HashTable, HashTableConfigInstance
from shoal.table.config.native import OPTIMIZERS as NATIVE
from shoal.table.reference import ReferenceTable


def number(low, high):
    """Draw a float that float32 represents exactly."""
    return st.floats(low, high, width=32).map(lambda x: float(np.float32(x)))


decay = st.sampled_from([0.0, 0.0, 0.0625, 0.5])
eps = st.sampled_from([0.0078125, 0.125])
beta = st.sampled_from([0.5, 0.875, 0.9, 0.99])
accumulator = st.sampled_from([0.125, 1.0])

_VALUES = {
    "initial_accumulator_value": accumulator,
    "weight_decay_factor": decay,
    "decouple_weight_decay": st.booleans(),
    "averaging_ratio": beta,
    "beta1": beta,
    "beta2": beta,
    "momentum": beta,
    "epsilon": eps,
    "use_nesterov": st.booleans(),
    "beta": st.sampled_from([0.5, 1.0]),
    "l1_regularization_strength": st.sampled_from([0.0, 0.25, 4.0]),
    "l2_regularization_strength": st.sampled_from([0.0, 0.5, 4.0]),
}

OPTIMIZERS = {
    kind: {name: _VALUES[name] for name in message.DESCRIPTOR.fields_by_name if name in _VALUES}
    for kind in NATIVE
    for message in [getattr(table.OptimizerConfig(), kind)]
}
"""Kind -> field of its message -> strategy."""


@st.composite
def optimizers(draw, kinds=None):
    kind = draw(st.sampled_from(kinds or sorted(OPTIMIZERS)))
    config = table.OptimizerConfig()
    message = getattr(config, kind)
    message.SetInParent()
    for name, values in OPTIMIZERS[kind].items():
        setattr(message, name, draw(values))
    return config


dims = st.integers(1, 37)
initializers = st.sampled_from(
    [
        table.ZerosInitializer(),
        table.ConstantsInitializer(0.25),
        table.InitializerConfig(ones=table.OnesInitializerConfig()),
    ]
)
compressors = st.sampled_from(
    [
        None,
        None,
        table.Fp32Compressor(),
        table.Fp16Compressor(),
        table.FixedR8Compressor(2.0),
        table.OneBitCompressor(step_size=3, amplitude=0.5),
    ]
)


@st.composite
def segments(draw, kinds=None, dims=dims, compressors=compressors):
    optimizer = draw(optimizers(kinds))
    dim = 1 if optimizer.WhichOneof("type") == "batch_softmax" else draw(dims)
    return table.CombineAsSegment(dim, draw(initializers), optimizer, draw(compressors))


@st.composite
def instances(draw, max_segments=3, **kwargs):
    """A training table's configuration with its rates."""
    drawn = draw(st.lists(segments(**kwargs), min_size=1, max_size=max_segments))
    rates = [draw(st.sampled_from([0.03125, 0.1, 0.5])) for _ in drawn]
    return instance(drawn, rates)


def instance(segments, rates, **fields):
    config = EmbeddingHashTableConfig(
        entry_config=EntryConfig(segments=segments), cuckoo=table.CuckooEmbeddingHashTableConfig(), **fields
    )
    return HashTableConfigInstance(config, rates)


@dataclass
class Pair:
    """A table and its reference."""

    ours: HashTable
    reference: ReferenceTable

    @classmethod
    def of(cls, config, hash_filter=None, reference_filter=None, name="t"):
        ours = HashTable.from_config(config, name=name, hash_filter=hash_filter)
        return cls(ours, ReferenceTable(config, reference_filter or hash_filter, name))


def rows(draw, n, dim, low=-2.0, high=2.0):
    """Float32 ``[n, dim]`` that hypothesis can shrink towards a plain seed."""
    seed = draw(st.integers(0, 1 << 16))
    drawn = np.random.default_rng(seed).uniform(low, high, (n, dim)).astype(np.float32)
    return torch.from_numpy(drawn)
