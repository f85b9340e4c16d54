"""Rows under a `torch.amp.GradScaler`: unscaled, skipped on overflow, refused if backward updates them."""

import pytest
import torch

import shoal
from shoal.nn import HashEmbedding, HashEmbeddingBag, SparseOptimizer


def ids(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def make(**options):
    table = shoal.HashTable(dim=2, optimizer=shoal.Sgd(lr=1.0), initializer="zeros", name="rows")
    return table, HashEmbeddingBag(table, **options)


def scaler(**options):
    return torch.amp.GradScaler("cpu", init_scale=1024.0, **options)


def test_a_scaled_step_moves_rows_as_an_unscaled_one():
    table, bag = make()
    optimizer, scale = SparseOptimizer(bag), scaler()
    for _ in range(2):
        optimizer.zero_grad()
        scale.scale(bag([[7, 7], [8]]).sum()).backward()
        scale.step(optimizer)
        scale.update()
    assert table.lookup(ids(7, 8)).tolist() == [[-4, -4], [-2, -2]]
    assert scale.get_scale() == 1024


def test_rows_and_dense_parameters_take_the_same_steps_under_a_scaler():
    torch.manual_seed(0)
    table, bag = make()
    linear = torch.nn.Linear(2, 1)
    table.assign(torch.arange(5), torch.randn(5, 2))
    dense = torch.nn.EmbeddingBag.from_pretrained(table.lookup(torch.arange(5)), mode="sum", freeze=False)
    twin = torch.nn.Linear(2, 1)
    twin.load_state_dict(linear.state_dict())
    rows, parts = SparseOptimizer(bag), torch.optim.SGD(linear.parameters(), lr=0.1)
    whole = torch.optim.SGD([{"params": dense.parameters(), "lr": 1.0}, {"params": twin.parameters()}], lr=0.1)
    scale, other = scaler(), scaler()
    batch = torch.tensor([[0, 1], [2, 2], [3, 4]])
    for _ in range(3):
        for optimizer in (rows, parts, whole):
            optimizer.zero_grad()
        scale.scale(linear(bag(batch)).square().mean()).backward()
        other.scale(twin(dense(batch)).square().mean()).backward()
        for optimizer in (rows, parts):
            scale.step(optimizer)
        other.step(whole)
        scale.update()
        other.update()
    torch.testing.assert_close(table.lookup(torch.arange(5)), dense.weight.detach())
    torch.testing.assert_close(linear.weight, twin.weight)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_skips_the_step_and_lowers_the_scale(bad):
    table, bag = make()
    optimizer, scale = SparseOptimizer(bag), scaler()
    scale.scale((bag([[7], [8]]) * torch.tensor([[1.0], [bad]])).sum()).backward()
    assert scale.step(optimizer) is None
    scale.update()
    assert scale.get_scale() == 512
    assert table.lookup(ids(7, 8)).tolist() == [[0, 0], [0, 0]]
    optimizer.zero_grad()
    scale.scale(bag([[7]]).sum()).backward()
    scale.step(optimizer)
    scale.update()
    assert table.lookup(ids(7)).tolist() == [[-1, -1]]


def test_gradients_can_be_clipped_between_unscaling_and_the_step():
    table, bag = make()
    optimizer, scale = SparseOptimizer(bag), scaler()
    scale.scale(bag([[7]]).sum() * 30).backward()
    scale.unscale_(optimizer)
    assert optimizer.gradients()["rows"][1].tolist() == [[30, 30]]
    assert float(optimizer.clip_grad_norm(1.0)) == pytest.approx(30 * 2**0.5)
    scale.step(optimizer)
    scale.update()
    torch.testing.assert_close(table.lookup(ids(7)), torch.full((1, 2), -(0.5**0.5)))


def test_torchs_own_clipping_sees_the_rows():
    _, bag = make()
    optimizer = SparseOptimizer(bag)
    (bag([[7]]).sum() * 30).backward()
    norm = torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    assert float(norm) == pytest.approx(30 * 2**0.5)
    torch.testing.assert_close(optimizer.gradients()["rows"][1], torch.full((1, 2), 0.5**0.5))


def test_a_batch_without_ids_is_stepped_too():
    table, bag = make()
    optimizer, scale = SparseOptimizer(bag), scaler()
    scale.scale(bag([[], []]).sum()).backward()
    scale.step(optimizer)
    scale.update()
    assert table.size() == 0


def test_gradients_of_several_backwards_are_unscaled_together():
    table, bag = make()
    optimizer, scale = SparseOptimizer(bag), scaler()
    for batch in ([[7]], [[7, 8]]):
        scale.scale(bag(batch).sum()).backward()
    scale.step(optimizer)
    scale.update()
    assert table.lookup(ids(7, 8)).tolist() == [[-2, -2], [-1, -1]]


REFUSED = r"'rows' updates its rows in backward.*nothing was applied.*SparseOptimizer.*scaler.step.*bfloat16"


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("module", [HashEmbedding, HashEmbeddingBag])
def test_an_update_in_backward_under_a_scaler_is_refused_with_the_way_out(module, options):
    table = shoal.HashTable(dim=2, optimizer=shoal.Sgd(lr=1.0), initializer="zeros", name="rows")
    model, scale = module(table, insert_missing=False, **options), scaler()
    batch = torch.tensor([[7, 8]])
    with pytest.raises(ValueError, match=REFUSED):
        scale.scale(model(batch).sum()).backward()
    with pytest.raises(ValueError, match=REFUSED):
        torch.autograd.backward(scale.scale([model(batch).sum(), model(batch).sum()]))
    assert table.size() == 0
    model(batch).sum().backward()  # an unscaled loss works as before
    assert table.lookup(ids(7)).tolist() == [[-1, -1]]


def test_a_compiled_model_is_refused_as_well():
    table, bag = make(insert_missing=False)
    compiled, scale = torch.compile(bag, fullgraph=True, backend="aot_eager"), scaler()
    with pytest.raises(ValueError, match=REFUSED):
        scale.scale(compiled(ids(7, 8), ids(0, 1, 2)).sum()).backward()
    assert table.size() == 0


def test_a_scaler_that_is_switched_off_changes_nothing():
    table, bag = make()
    scaler(enabled=False).scale(bag([[7]]).sum()).backward()
    assert table.lookup(ids(7)).tolist() == [[-1, -1]]


def test_a_learning_rate_that_is_text_is_refused():
    _, bag = make()
    with pytest.raises(ValueError, match=r"SparseOptimizer: lr must be a number.*'0.1'"):
        SparseOptimizer(bag, lr="0.1")
