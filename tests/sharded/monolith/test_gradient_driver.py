"""The gradient driver: where gradients go, how they are clipped, and the order of updates."""

import math
from types import SimpleNamespace

import pytest
import torch

from shoal.sharded import (
    AsyncFunctionMgr,
    GradClipType,
    apply_gradients,
    apply_gradients_with_var_optimizer,
    set_summary_writer,
)
from tests.sharded.helpers import run_ranks

pytestmark = pytest.mark.timeout(600)

T = torch.tensor


class Column:
    def __init__(self, name, rows):
        self.feature_name = name
        self.rows = rows.requires_grad_()

    def get_all_embeddings_concat(self):
        return self.rows


class Context:
    def __init__(self, layouts=()):
        self.pushed = []
        self.manager = AsyncFunctionMgr(is_async=False)
        self.add_async_function = self.manager.add_async_function
        self.layout_factory = SimpleNamespace(flattened_layout=lambda: list(layouts))

    def apply_embedding_gradients(self, pairs, scale=1):
        self.pushed.append([(g * scale, t) for g, t in pairs])


def setting(lr=1.0):
    """loss = 3 w + 4 e: gradients 3 and 4, norm 5."""
    w = torch.nn.Parameter(T([1.0]))
    column = Column("item", T([[2.0]]))
    return w, column, torch.optim.SGD([w], lr=lr), (3 * w).sum() + (4 * column.rows).sum()


def run(clip_type, clip_norm, step=0, **more):
    w, column, optimizer, loss = setting()
    ctx, counter = Context(), T(step)
    apply_gradients_with_var_optimizer(ctx, [column], optimizer, loss, clip_type, clip_norm, counter, **more)
    assert int(counter) == step + 1
    [[(grad, tensor)]] = ctx.pushed
    assert tensor is column.rows
    return 1.0 - w.item(), grad.item()


@pytest.mark.parametrize(
    ("clip_type", "clip_norm", "more", "expected"),
    [
        (GradClipType.ClipByGlobalNorm, None, {}, (3, 4)),
        (GradClipType.ClipByGlobalNorm, 10.0, {}, (3, 4)),
        (GradClipType.ClipByGlobalNorm, 1.0, {}, (0.6, 0.8)),
        (GradClipType.ClipByGlobalNorm, 1.0, {"sparse_clip_norm": 2.5}, (0.6, 2.0)),
        (GradClipType.ClipByGlobalNorm, 1.0, {"sparse_norm_warmup_steps": 10, "step": 5}, (0.6, 0.4)),
        (GradClipType.ClipByGlobalNorm, 1.0, {"sparse_norm_warmup_steps": 10, "step": 0}, (0.6, 0.0)),
        (GradClipType.ClipByGlobalNorm, 1.0, {"sparse_norm_warmup_steps": 10, "step": 10}, (0.6, 0.8)),
        (GradClipType.ClipByNorm, 2.0, {}, (2, 2)),
        (GradClipType.ClipByValue, 3.5, {}, (3, 3.5)),
        (GradClipType.ClipByDenseAndSparse, 1.0, {}, (1, 4)),
        (GradClipType.ClipByDenseAndSparse, 1.0, {"sparse_clip_norm": 2.0}, (1, 2)),
        (GradClipType.ClipByDenseAndSparse, None, {"sparse_clip_norm": 2.0}, (3, 2)),
        (GradClipType.ClipByDenseAndSparse, 1.0, {"sparse_clip_norm": 2.0, "sparse_norm_warmup_steps": 10}, (1, 2)),
        (GradClipType.ClipByNorm, 2.0, {"sparse_clip_norm": 1.0, "sparse_norm_warmup_steps": 10}, (2, 2)),
        (GradClipType.NoClip, 1.0, {}, (3, 4)),
        (GradClipType.ClipByValue, None, {}, (3, 4)),
        (GradClipType.NoClip, None, {"dense_reduce_mean": True, "batch_size": 4}, (0.75, 4)),
        (GradClipType.ClipByGlobalNorm, 1.0, {"dense_reduce_mean": True, "batch_size": 1.0}, (0.6, 0.8)),
        (GradClipType.NoClip, None, {"dense_weight_decay": 0.5}, (3.5, 4)),
    ],
)  # fmt: skip
def test_clipping(clip_type, clip_norm, more, expected):
    assert run(clip_type, clip_norm, **more) == pytest.approx(expected)


@pytest.fixture
def written():
    """(name, value, step) of what a writer is given."""
    points = []

    def add(name, value, step):
        points.append((name, value.tolist() if isinstance(value, torch.Tensor) else value, step))

    set_summary_writer(SimpleNamespace(add_scalar=add, add_histogram=add))
    yield points
    set_summary_writer(None)


def test_the_global_norm_before_clipping_is_written_with_its_step(written):
    run(GradClipType.ClipByGlobalNorm, 1.0, step=9)
    assert written == [("global_gradient_norm", pytest.approx(5.0), 9)]
    written.clear()
    run(GradClipType.ClipByNorm, 1.0)
    assert written == []


@pytest.mark.parametrize("clip_type", [GradClipType.ClipByGlobalNorm, GradClipType.ClipByDenseAndSparse])
def test_a_gradient_that_is_no_number_is_not_clipped_to_zeros(clip_type):
    w, column, optimizer, _ = setting()
    other = torch.nn.Parameter(T([1.0]))
    optimizer.add_param_group({"params": [other]})
    loss = (math.nan * w).sum() + other.sum() + (math.nan * column.rows).sum()
    ctx = Context()
    apply_gradients_with_var_optimizer(ctx, [column], optimizer, loss, clip_type, 1.0, sparse_clip_norm=1.0)
    assert other.isnan().all()  # the norm is not a number, so nothing can be scaled by it
    assert ctx.pushed[0][0][0].isnan().all()


def test_a_summary_holds_gradients_and_values_of_parameters_and_embeddings(written):
    run(GradClipType.ClipByValue, 3.5, step=2, grads_and_vars_summary=True)
    assert written == [
        ("parameter_0/gradient", [3.0], 2),
        ("parameter_0/value", [1.0], 2),
        ("item/gradient", [[3.5]], 2),
        ("item/value", [[2.0]], 2),
    ]


def test_the_mean_comes_before_the_norm():
    w, column, optimizer, loss = setting()
    ctx = Context()
    apply_gradients_with_var_optimizer(
        ctx, [column], optimizer, loss, clip_norm=1.0, dense_reduce_mean=True, batch_size=3
    )
    norm = math.hypot(1, 4)
    assert 1 - w.item() == pytest.approx(1 / norm)
    assert ctx.pushed[0][0][0].item() == pytest.approx(4 / norm)


def test_what_has_no_gradient_is_left_out():
    w, column, optimizer, _ = setting()
    unused = torch.nn.Parameter(T([5.0]))
    optimizer.add_param_group({"params": [unused], "weight_decay": 1.0})
    ctx = Context()
    apply_gradients_with_var_optimizer(ctx, [column, Column("other", T([[1.0]]))], optimizer, (2 * w).sum())
    assert w.item() == -1
    assert unused.item() == 5
    assert ctx.pushed == []
    step = T(4)
    apply_gradients_with_var_optimizer(Context(), [], optimizer, T(1.0), global_step=step)
    assert int(step) == 4


def test_a_parameters_own_optimizer_wins():
    w = torch.nn.Parameter(T([1.0]))
    v = torch.nn.Parameter(T([1.0]))
    v.optimizer = torch.optim.SGD([v], lr=10.0)
    everything = torch.optim.SGD([w, v], lr=1.0)
    apply_gradients_with_var_optimizer(Context(), [], everything, (w + v).sum())
    assert (w.item(), v.item()) == (0, -9)


def test_features_count_while_their_norm_is_above_the_threshold():
    for threshold, expected in ((1.0, 4.0), (2.5, 0.0)):
        w, column, optimizer, loss = setting()
        ctx = Context()
        apply_gradients_with_var_optimizer(
            ctx, [column], optimizer, loss, ue_gradient_check=True, ue_fc_names=["item"],
            ue_euclidean_norm_threshold=threshold,
        )  # fmt: skip
        assert ctx.pushed[0][0][0].item() == expected
        assert w.item() == -2


def test_layouts_in_the_short_form():
    used, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    w = torch.nn.Parameter(T([1.0]))
    ctx, step = Context([used, unused]), T(0)
    apply_gradients(ctx, torch.optim.SGD([w], lr=1.0), (w * used.sum()).sum(), clip_norm=0, global_step=step)
    assert [g.tolist() for g, _ in ctx.pushed[0]] == [[1, 1], [0, 0, 0]]
    assert w.item() == -1
    assert int(step) == 1
    with pytest.raises(ValueError, match="ClipByGlobalNorm or ClipByNorm"):
        apply_gradients(ctx, torch.optim.SGD([w], lr=1.0), w.sum(), GradClipType.ClipByValue)


def averaged(rank, world, fusion, half):
    import os

    os.environ["MONOLITH_WITH_ALLREDUCE_FUSION"] = fusion
    os.environ["MONOLITH_WITH_ALLREDUCE_FP16"] = half
    w, v = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3, 1))
    loss = (w * (rank + 1)).sum() + (v * (10 * rank)).sum()
    column = Column("item", T([[1.0]]))
    ctx = Context()
    apply_gradients_with_var_optimizer(
        ctx, [column], torch.optim.SGD([w, v], lr=1.0), loss + (column.rows * (rank + 1)).sum(), use_allreduce=True
    )
    return w.tolist(), v.view(-1).tolist(), ctx.pushed[0][0][0].item()


@pytest.mark.parametrize(("fusion", "half"), [("", "0"), ("one", "1"), ("grouped", "0")])
def test_dense_gradients_are_averaged_and_sparse_ones_are_not(fusion, half):
    for rank, result in enumerate(run_ranks(2, averaged, fusion, half)):
        assert result == ([-1.5, -1.5], [-5, -5, -5], rank + 1)


def partly(rank, world, fusion):
    """Rank 0 has gradients of ``a`` and ``b``, rank 1 of ``b``, rank 2 has none; nobody has one of the third."""
    import os

    os.environ["MONOLITH_WITH_ALLREDUCE_FUSION"] = fusion
    a, b, _ = params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer, step, seen = torch.optim.SGD(params, lr=1.0, weight_decay=0.5), T(0), []
    losses = [lambda: (3 * a + 6 * b).sum(), lambda: (9 * b).sum(), lambda: T(0.0)]
    for loss in (losses[rank], lambda: T(0.0)):
        apply_gradients_with_var_optimizer(
            Context(), [], optimizer, loss(), GradClipType.NoClip, None, step, use_allreduce=True
        )
        seen.append(([p.tolist() for p in params], int(step)))
    return seen


@pytest.mark.parametrize("fusion", ["", "one", "grouped"])
def test_a_gradient_that_some_ranks_lack_counts_as_zeros_there(fusion):
    step = (
        [[1 - 1 - 0.5] * 2, [1 - 5 - 0.5] * 2, [1.0, 1.0]],
        1,
    )  # the third has no gradient, so not even a weight decay
    for seen in run_ranks(3, partly, fusion):
        assert seen == [step, step]  # the second time no rank has any: nothing happens


def test_an_unknown_fusion_is_refused(monkeypatch):
    monkeypatch.setenv("MONOLITH_WITH_ALLREDUCE_FUSION", "multi")
    with pytest.raises(ValueError, match="multi"):
        run(GradClipType.NoClip, None, use_allreduce=True)
    monkeypatch.setenv("MONOLITH_SKIP_ALLREDUCE", "1")
    assert run(GradClipType.NoClip, None, use_allreduce=True) == (3, 4)
