"""Calls of every kernel of `shoal.ops`, compiled for a GPU that is not present; run by `tests/test_gpu_compile.py`."""

import offline
import torch

from benchmarks.ops import layout_case
from shoal.ops.cuda import (
    codec,
    concat,
    dedup,
    gather,
    hashing,
    launch,
    layout,
    lookup,
    ragged,
    reduce,
    reorder,
    split,
    topk,
    unique,
)
from shoal.ops.layout.op import _arguments


def compile_only(kernel, grid, *args, warps=4, **constants):
    made = offline.compile_only(kernel.jit, [(1 << 40) + 7] * len(args), num_warps=warps, **constants)
    if constants.get("INLINE"):  # its inline assembly would be swapped twice
        assert offline.one_thread_each(made.asm["ttgir"]), constants


launch.Kernel.__call__ = compile_only
launch.Fast._launch = lambda kernel, grid, *args, **constants: offline.compile_only(kernel.jit, args, **constants)
assert not launch.INTERPRETED
torch.empty = torch.zeros  # nothing is computed, so values that are read back must be initialised

ids, splits = torch.arange(64), torch.tensor([0, 20, 64])
rows = torch.ones(64, 6)
dedup.unique_ids(ids)
reorder.reorder_by_indices(ids, ids % 4, 4)
reorder.reorder_by_indices(ids, ids % 40, 40)
reorder.fused_reorder_by_indices([ids], 8, [4], -1)
reorder.fused_reorder_by_indices([ids, ids, ids], 40, [4, 8, 4], -1)
concat.flat_concat([rows, rows.double().float()[:3]], 0.5, 16)
split.split_by_indices(ids % 4, rows, 4)
split.ragged_split_by_indices(ids % 4, ids, splits, 4)
lookup.map_id_to_embedding([ids, ids + 64], [rows, rows], ids, True)
hashing.find(ids, ids, torch.zeros(1, dtype=torch.int64))
gather.fused_gather_embeddings_by_input(rows.view(-1), [ids * 6, (ids * 6).int()], [6, 6])
gather.fused_gather_embeddings_by_input(rows.view(-1), [ids[:40], ids[:2]], [1, 90])
gather.fused_gather_embeddings_by_input_gradient(384, [rows], [ids * 6], [6], 0.5)
for how in (0, 1, 2):
    reduce.reduce_by_index(ids // 4, rows, 16, how)
    reduce.reduce_by_index_backward(torch.ones(16, 6), ids // 4, how, rows, torch.ones(16, 6))
reduce.reduce_and_split([splits, splits], [rows, rows], [2, 4, 6], [2, 1])
reduce.reduce_and_split_backward([splits], [torch.ones(2, 6)], [64], [1])
reduce.first_n(rows, splits, 3)
reduce.first_n_backward(torch.ones(2, 3, 6), splits, 64)
ragged.row_ids(splits, 64)
ragged.normalize_merged_split(torch.tensor([0, 2, 3, 0, 4]), torch.tensor([3, 2]))
unique.unique_key_with_value_and_offset(ids, splits, [2, 3], True)
places = torch.arange(64) * 2
whole = torch.arange(65)
unique.fill_with_offset_map(ids, splits, torch.ones(128), whole, places, torch.zeros(128), [2, 2])
unique.fill_with_offset_map_gradient(ids, splits, torch.ones(128), whole, places, [2, 2])
codec.unpack12(torch.zeros(96, dtype=torch.uint8), 64)
codec.dequantize(torch.zeros(64, dtype=torch.uint8), torch.ones(256), torch.float32)
for packed, table in ((True, torch.ones(256)), (False, None)):
    codec.add_peer(
        torch.zeros(4, 16), torch.zeros(4, 16, dtype=torch.int32),
        torch.zeros(16, dtype=torch.uint8 if packed else torch.int32),
        torch.zeros(16, dtype=torch.uint8) if packed else torch.zeros(16), table, torch.ones(1), 4, packed,
    )  # fmt: skip
topk.largest(torch.randn(64), 5)
config, sharded, embeddings, shards = layout_case(3, 2, True)
fids = sharded.fid_offset, sharded.feature_offset, sharded.nfl_offset
args = _arguments("compiled", embeddings, None, *fids, 256, "example_batch", config, shards, None, (None,) * 4, 3)
outputs = layout.embedding_to_layout(*args)
layout.embedding_to_layout_grad(outputs, 0.5, *args)
print(*sorted(offline.COMPILED))
