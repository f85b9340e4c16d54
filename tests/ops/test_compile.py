"""`torch.compile(fullgraph=True)`, `torch.export` and `torch.library.opcheck` for every op."""

import sys

import pytest
import torch
from torch.fx.experimental import _config as symbols
from torch.utils import _pytree as pytree

from shoal import Ragged, ops
from shoal.nn import FirstN, ReduceMean, ReduceSum
from shoal.ops import FeatureConfig, FeatureConfigs, OutConfig, OutType, SliceConfig, _op

CONFIG = FeatureConfigs(
    {"a": FeatureConfig("t", 0, [1, 2]), "b": FeatureConfig("t", 1, [3]), "c": FeatureConfig("u", 3, [2], 2)},
    {
        "x": OutConfig([SliceConfig("a", 1, 3), SliceConfig("b", 0, 2)], OutType.STACK, [[-1, 2, 2]]),
        "y": OutConfig([SliceConfig("c", 0, 2)], OutType.NONE, [[-1, 2, 2]]),
        "z": OutConfig([SliceConfig("a", 0, 1), SliceConfig("b", 0, 1)], OutType.ADDN, [[-1, 1]]),
    },
)
SHARDED = ops.sharding_sparse_fids(
    {"a": [[4, 7], [4]], "b": torch.tensor([9, 6]), "c": [[11], [12, 13, 15]]}, 2, CONFIG, True, "example_batch"
)


def f32(*shape):
    return torch.randn(*shape, requires_grad=True)


def ids(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def chain(key, first, second):
    unique, offset, buffer = ops.unique_key_with_value_and_offset(key, [1, 2])
    _, pos = ops.ragged_split_by_indices(unique.values.remainder(2), unique, 2)
    handles = [
        ops.fill_with_offset_map(p, v, offset, buffer, [1, 2]) for p, v in zip(pos, (first, second), strict=True)
    ]
    return ops.finalize_shared_tensor(handles, torch.float32, [None])


def layout(embeddings, *rest):
    return ops.fused_embedding_to_layout(embeddings, None, *rest, "example_batch", CONFIG, 2)


def layout_v5(embeddings, *rest):
    return ops.fused_embedding_to_layout(
        embeddings, None, *rest[:4], "example_batch", CONFIG, 2, None, *rest[4:], version=5
    )


def layout_grad(grads, embeddings, offsets, scale):
    fid_offset, feature_offset, nfl_offset, batch_size = offsets
    return ops.fused_embedding_to_layout_grad(
        nfl_offset, feature_offset, fid_offset, batch_size, embeddings, None, grads, "example_batch", CONFIG, 2,
        layout_tensors_grad_scale=scale,
    )  # fmt: skip


RAGGED = Ragged.from_lists([[8, 5, 8], [5, 5]])
OFFSETS = [ids(5, 0, 5, dtype=torch.int32), ids(2, 9, dtype=torch.int32)]
EMBEDDINGS = [f32(int(n)) for n in SHARDED.emb_size]
CASES = {
    "split_by_indices": (lambda i, t: ops.split_by_indices(i, t, 3), ids(2, 0, 2, 0), f32(4, 2)),
    "ragged_split_by_indices": (lambda i, r: ops.ragged_split_by_indices(i, r, 3), ids(2, 0, 2, 0, 1), RAGGED),
    "reorder_by_indices": (lambda x, s: ops.reorder_by_indices(x, s, 2), ids(9, 8, 9, 7), ids(0, 1, 0, 1)),
    "reorder_by_indices-rows": (lambda x, s: ops.reorder_by_indices(x, s, 2), torch.ones(3, 2), ids(0, 1, 0)),
    "fused_reorder_by_indices": (lambda x: ops.fused_reorder_by_indices(x, 5, [2, 1]), [ids(9, 8, 9), ids(1, 2)]),
    "unique-fill-finalize": (chain, RAGGED, f32(1), f32(3)),
    "unique_key": (lambda k: ops.unique_key_with_value_and_offset(k, [1, 2], False)[:2], RAGGED),
    "map_id_to_embedding": (
        lambda i, e, x: ops.map_id_to_embedding(i, e, x),
        [ids(5, 9), ids(4)],
        [f32(2, 2), f32(1, 2)],
        ids(9, 4, 9, 5).view(2, 2),
    ),
    "map_id_gradient": (
        lambda i, x, g: ops.map_id_to_embedding_gradient_back_prop(i, x, g),
        [ids(5, 9), ids(4)],
        ids(9, 4),
        torch.ones(2, 3),
    ),
    "gather_embeddings_by_input": (ops.gather_embeddings_by_input, ids(5, 9), f32(2, 3), ids(9, 9, 5)),
    "gather_gradient": (ops.gather_embeddings_by_ids_gradient_back_prop, ids(5, 9), torch.ones(3, 2), ids(1, 1, 0)),
    "fused_gather": (lambda b, o: ops.fused_gather_embeddings_by_input(b, o, [2, 3]), f32(12), OFFSETS),
    "fused_gather_gradient": (
        lambda g, o: ops.fused_gather_embeddings_by_input_gradient(12, g, o, [2, 3], 0.5),
        [torch.ones(3, 2), torch.ones(2, 3)],
        OFFSETS,
    ),
    "fused_gather_gradient-scale": (
        lambda g, o, s: ops.fused_gather_embeddings_by_input_gradient(torch.tensor([12]), g, o, [2, 3], s),
        [torch.ones(3, 2), torch.ones(2, 3)],
        OFFSETS,
        torch.tensor([0.5]),
    ),
    "reduce_sum": (ops.reduce_sum, ids(2, 0, 2).view(3, 1), f32(3, 2), ids(4)),
    "reduce_mean": (ops.reduce_mean, ids(2, 0, 2).view(3, 1), f32(3, 2), ids(4)),
    "reduce_sqrtn": (ops.reduce_sqrtn, ids(2, 0, 2).view(3, 1), f32(3, 2), ids(4)),
    "fused_sorted_segment_sum": (
        lambda i, v: ops.fused_sorted_segment_sum(i, v, [[3, 2], [2]]),
        [ids(0, 2), ids(1, 1, 1)],
        [f32(2, 2), f32(3)],
    ),
    "fused_reduce_sum_and_split": (
        lambda i, v, n: ops.fused_reduce_sum_and_split(i, v, n, [1, 2]), ids(1, 1, 0), f32(3, 3), torch.tensor(3)
    ),
    "fused_reduce_and_split_gpu": (
        lambda s, e: ops.fused_reduce_and_split_gpu(s, e, [[1, 2], [2]]),
        [ids(0, 2, 2, 3), ids(0, 0, 1, 1)],
        [f32(3, 3), f32(1, 2)],
    ),
    "fused_value_rowids": (ops.fused_value_rowids, RAGGED),
    "normalize_merged_split": (ops.normalize_merged_split, ids(0, 1, 4, 0, 2), ids(3, 2, dtype=torch.int32)),
    "aligned_flat_concat": (lambda x: ops.aligned_flat_concat(x, 2.0), [f32(3), f32(2, 9)]),
    "aligned_flat_split": (lambda x, f: ops.aligned_flat_split(x, f), [torch.ones(3), torch.ones(2, 9)], f32(48)),
    "fused_embedding_to_layout": (
        layout, EMBEDDINGS, SHARDED.fid_offset, SHARDED.feature_offset, SHARDED.nfl_offset, SHARDED.batch_size
    ),
    "fused_embedding_to_layout-v5": (layout_v5, EMBEDDINGS, *SHARDED[1:9]),
    "fused_embedding_to_layout_grad": (
        layout_grad,
        [torch.ones(2, 2, 2), torch.ones(2, 2, 2), torch.ones(2, 1)],
        EMBEDDINGS,
        SHARDED[1:5],
        torch.tensor(0.5),
    ),
    "ReduceSum": (ReduceSum().combine, RAGGED, f32(5, 2)),
    "ReduceMean": (ReduceMean().combine, RAGGED, f32(5, 2)),
    "FirstN": (FirstN(2).combine, RAGGED, f32(5, 2)),
}  # fmt: skip
each = pytest.mark.parametrize("name", CASES)


def fresh(args):
    """The arguments with leaves and caches of their own, where tensors are made now."""
    device = torch.get_default_device()
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().to(device).requires_grad_(t.requires_grad), args
    )


def tensors(tree):
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def gradients(outs, args):
    """Gradients of a fixed function of the outputs with respect to the arguments that have one."""
    outs = [o for o in tensors(outs) if o.requires_grad]
    if not outs:
        return []
    torch.manual_seed(1)
    sum((o * torch.randn(o.shape)).sum() for o in outs).backward()
    return [t.grad for t in tensors(args) if t.requires_grad]


def assert_same(got, want):
    assert len(tensors(got)) == len(tensors(want))
    for a, b in zip(tensors(got), tensors(want), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


def skip_layouts_on_old_torch(name):
    if "layout" in name and torch.__version__ < "2.12":
        pytest.skip("this torch's compiler takes no configuration object as a constant")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def check_compiled(name, backend):
    skip_layouts_on_old_torch(name)
    function, *args = CASES[name]
    eager_args, compiled_args = fresh(args), fresh(args)
    want = function(*eager_args)
    got = torch.compile(lambda *a: function(*a), fullgraph=True, backend=backend)(*compiled_args)
    assert_same(got, want)
    assert_same(gradients(got, compiled_args), gradients(want, eager_args))


@each
def test_compiled_ops_give_the_same_values_and_gradients(name):
    check_compiled(name, "aot_eager")


def grown(k):
    """Arguments of more ids, rows and samples for a larger ``k``."""
    torch.manual_seed(k)
    rows = [torch.randint(0, 30, (1 + (k + b) % 3,)).tolist() for b in range(3 + k)]
    sharded = ops.sharding_sparse_fids({"a": rows, "b": ids(9, 6), "c": rows[::-1]}, 2, CONFIG, True, "example_batch")
    return {
        "split_by_indices": (torch.randint(0, 3, (5 + k,)), f32(5 + k, 2)),
        "fused_reorder_by_indices": ([torch.randint(-9, 9, (5 + k,)), torch.randint(0, 4, (3 + 2 * k,))],),
        "unique_key": (Ragged.from_row_lengths(torch.randint(0, 6, (9 + 2 * k,)), [4 + k, 5 + k]),),
        "reduce_mean": (torch.randint(0, 4, (5 + k, 1)), f32(5 + k, 2), ids(4 + k)),
        "aligned_flat_concat": ([f32(3 + k), f32(2, 9 + k)],),
        "fused_embedding_to_layout": ([f32(int(n)) for n in sharded.emb_size], *sharded[1:5]),
    }


@pytest.mark.parametrize("name", grown(0))
def test_one_compiled_program_serves_all_sizes(name):
    skip_layouts_on_old_torch(name)
    function = CASES[name][0]
    compiled = torch.compile(lambda *a: function(*a), fullgraph=True, dynamic=True, backend="aot_eager")
    for k in (1, 2, 5, 11):
        eager_args, compiled_args = fresh(grown(k)[name]), fresh(grown(k)[name])
        want = function(*eager_args)
        # Sizes that happen to be equal are not assumed to be the same.
        with torch._dynamo.config.patch(error_on_recompile=k > 1), symbols.patch(use_duck_shape=False):
            got = compiled(*compiled_args)
        assert_same(got, want)
        assert_same(gradients(got, compiled_args), gradients(want, eager_args))


@pytest.mark.parametrize("name", ["split_by_indices", "fused_embedding_to_layout"])
def test_inductor_takes_them(name):
    check_compiled(name, "inductor")


@each
def test_exported_ops_give_the_same_values(name):
    function, *args = CASES[name]

    class Model(torch.nn.Module):
        def forward(self, *a):
            return function(*a)

    args = fresh(args)
    args = pytree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, args)
    program = torch.export.export(Model(), tuple(args), strict=False)
    assert_same(program.module()(*fresh(args)), function(*fresh(args)))


@each
def test_opcheck(name, monkeypatch):
    function, *args = CASES[name]
    calls = []
    monkeypatch.setattr(_op.Op, "__call__", lambda self, *a: (calls.append((self, a)), self.overload(*a))[1])
    args = fresh(args)
    gradients(function(*args), args)
    monkeypatch.undo()
    for op, op_args in calls:
        # Second derivatives are not supported.
        detached = (
            fresh(op_args) if op.differentiable else pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, op_args)
        )
        torch.library.opcheck(op.overload, tuple(detached))


def test_the_reference_serves_where_there_is_no_kernel():
    """Every op's reference has the signature of the op: it is what other devices run."""
    for name in ("split_by_indices", "reduce_sum", "FirstN", "fused_embedding_to_layout", "fused_reorder_by_indices"):
        function, *args = CASES[name]
        want = function(*fresh(args))
        before = _op.Op.__call__
        _op.Op.__call__ = lambda self, *a: self.reference(*a)
        try:
            got = function(*fresh(args))
        finally:
            _op.Op.__call__ = before
        assert_same(got, want)


def test_a_small_op_costs_little(device, monkeypatch):
    """Its 30 us are few calls of Python, all on the way to its kernel: it does without the dispatcher."""
    if device != "cpu":
        pytest.skip("a figure of the CPU")
    torch.set_default_device(None)  # it is a mode, which makes calls itself
    index, values, length = ids(0, 1, 2, 0, 1, 2, 0, 1, 2, 0).view(10, 1), torch.randn(10, 4), ids(3)
    for op in _op.Op.all.values():
        monkeypatch.setattr(op, "overload", lambda *args: pytest.fail("went through the dispatcher"))
    ops.reduce_sum(index, values, length)
    calls = []

    def note(frame, event, argument):
        if event in ("call", "c_call"):
            calls.append(frame.f_code.co_qualname if event == "call" else argument)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        ops.reduce_sum(index, values, length)
    finally:
        sys.setprofile(before)
    assert len(calls) < 60, calls  # 37 on Python 3.11
