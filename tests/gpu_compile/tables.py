"""Calls of every kernel of GPU tables, compiled for a GPU that is not present; run by `tests/test_gpu_compile.py`."""

import re

import offline
import torch

import shoal
from shoal.table import (
    CombineAsSegment,
    CuckooEmbeddingHashTableConfig,
    EmbeddingHashTableConfig,
    EntryConfig,
    FixedR8Compressor,
    Fp16Compressor,
    Fp32Compressor,
    HashTable,
    HashTableConfigInstance,
    MultiHashTable,
    OneBitCompressor,
    RandomUniformInitializer,
    SgdOptimizer,
    StochasticRoundingFloat16OptimizerWrapper,
)
from shoal.table.config.native import OPTIMIZERS
from shoal.table.cuda import backend, launch, stored
from shoal.table.cuda.kernels import changed as changed_kernels
from shoal.table.cuda.kernels import index as index_kernels
from shoal.table.protocol import FIRSTN, MAX, MEAN, SUM, Features, Part, Step, groups_of


def compile_only(bound, programs, *arguments):
    made = offline.compile_only(bound._fn, arguments, **bound._constants, **bound._options)
    if bound._fn is index_kernels.insert and not bound._constants["MULTI"] and not bound._constants["GIVEN"]:
        # A row number that others may be writing must be read once: a second read could differ from the first.
        # The reads are: the first bucket, the second, a free row and, with LATER, a row's time.
        reads = 3 + bool(bound._constants["LATER"] and bound._constants["STAMP"])
        assert len(re.findall(r"tt\.load .*tensor<128x!tt\.ptr<i32>", made.asm["ttgir"])) == reads
    if bound._fn is changed_kernels.claim and bound._constants["SINGLE"] and bound._constants["ROWS_"]:
        reads = 4 + bound._constants["STAMP"]  # the same three, the place where the id was found, and a row's time
        assert len(re.findall(r"tt\.load .*tensor<128x!tt\.ptr<i32>", made.asm["ttgir"])) == reads


launch.Bound.__call__ = compile_only
torch._C._cuda_getDevice = lambda: 0
stored.as_device = lambda device, name: torch.device("cpu")
assert not backend.interpreted()


def of_segments(segments, entry_type=EntryConfig.TRAINING):
    message = EmbeddingHashTableConfig(
        entry_config=EntryConfig(segments=[CombineAsSegment(*s) for s in segments], entry_type=entry_type),
        cuckoo=CuckooEmbeddingHashTableConfig(),
    )
    return HashTableConfigInstance(message, [0.1] * len(segments))


ids = torch.arange(64)
for optimizer in OPTIMIZERS:
    if optimizer in ("batch_softmax", "dynamic_wd_adagrad"):  # needs a row of one weight; has no short name
        continue
    made = shoal.HashTable(6, optimizer=optimizer, device="cuda", on_bad_gradient="skip")
    made.apply_gradients(ids, torch.ones(64, 6), enable_dedup=True, req_time=5)
    if optimizer in ("sgd", "adam", "lamb"):
        made.apply_gradients(ids, torch.ones(64, 6))
        made.apply_gradients(ids, torch.ones(64, 6), distinct=True)

uniform = RandomUniformInitializer()
rounded = StochasticRoundingFloat16OptimizerWrapper(SgdOptimizer())
made = HashTable.from_config(of_segments([(3, uniform, rounded, OneBitCompressor())]), name="rounded", device="cuda")
made.apply_gradients(ids, torch.ones(64, 3), enable_dedup=True)
made = HashTable.from_config(of_segments([(128, uniform, SgdOptimizer())]), name="wide", device="cuda")
made.changes.begin_epoch()
made.lookup(ids, insert_missing=True, req_time=7)
made.lookup(ids)
made.assign(ids, torch.ones(64, 128))
made.assign_add(ids, torch.ones(64, 128))
made._storage.erase_slots(torch.tensor([8, 9]), 0)
made.reserve(100_000)  # grows by splitting buckets
made._storage.arena.scatter(ids.int(), torch.ones(64, 128))
many = MultiHashTable.from_configs({name: of_segments([(6, uniform, SgdOptimizer())]) for name in "ab"}, device="cuda")
many.lookup(dict.fromkeys("ab", ids))
many.apply_gradients(dict.fromkeys("ab", (ids, torch.ones(64, 6))))
for codec in (Fp32Compressor(), Fp16Compressor(), FixedR8Compressor(), OneBitCompressor()):
    config = of_segments([(6, uniform, SgdOptimizer(), codec)], EntryConfig.SERVING)
    made = HashTable.from_config(config, name="served", device="cuda")
    made.assign(ids, torch.ones(64, 6))
    made.assign_add(ids, torch.ones(64, 6))
    made.lookup(ids)
for optimizer in ("sgd", "adagrad", "adam"):
    for tables in (1, 2):
        kind = {"optimizer": optimizer, "device": "cuda", "on_bad_gradient": "raise" if tables == 1 else "skip"}
        ((group, _),) = groups_of([shoal.HashTable(6, seed=number, **kind) for number in range(tables)])
        features = Features((0, tables - 1), (SUM, MEAN) if tables == 2 else (SUM, SUM), (0, 6), 12, padding=3)
        found = group.find(ids, torch.tensor([32, 32]), features, missing="initial")
        group.rows(found, features, missing="initial")
        offsets, out = torch.arange(0, 65, 8), torch.zeros(4, 12)
        for weights in (None, torch.ones(64)):
            group.pooled(found, features, offsets, weights, out, missing="initial")
            group.update([Part(found, features, out, offsets, weights)], step=Step())
        group.described.wide = True
        group.update([Part(found, features, torch.zeros(64, 6))], step=Step())
        if (optimizer, tables) not in (("sgd", 1), ("adagrad", 2)):
            continue
        every = Features((0, tables - 1, 0), (MAX, FIRSTN, MEAN), (0, 6, 18), 24, 3 if tables == 2 else None, (1, 2, 1))
        found = group.find(ids, torch.tensor([16, 16, 32]), every, missing="initial")
        marks, out = torch.zeros(64, 1, dtype=torch.uint8), torch.zeros(2, 24)
        for weights in (None, torch.ones(64)):
            group.pooled(found, every, torch.arange(0, 65, 8)[:7], weights, out, missing="initial", marks=marks)
            group.update([Part(found, every, out, torch.arange(0, 65, 8)[:7], weights, marks)], step=Step())
for policy, limit in (
    ("lru", 1000),
    ("lru", 60_000),
    ("lfu", 60_000),
    ("epoch_lru", 1000),
    ("epoch_lfu", 1000),
    ("score", 1000),
):
    made = shoal.HashTable(6, optimizer="adagrad", device="cuda", max_rows=limit, evict=policy).reserve(limit)
    made.assign(ids, torch.ones(64, 6))
    made.apply_gradients(ids, torch.ones(64, 6), enable_dedup=True)
    made.lookup(ids, insert_missing=True)
rounded = HashTable.from_config(of_segments([(3, uniform, rounded)]), name="first", device="cuda")
rounded.read(ids, initial=True)
print(*sorted(offline.COMPILED))
