"""Between a forward and its backward: other forwards, other writers, other threads, recomputation."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.nn import EmbeddingBagCollection, HashEmbedding, HashEmbeddingBag, SparseOptimizer

IDS, ONE = torch.tensor([[1, 2], [2, 3]]), torch.tensor([1, 2, 3])


def make_table(**options):
    options.setdefault("initializer", "zeros")
    return shoal.HashTable(2, optimizer=shoal.Sgd(lr=1.0), seed=3, **options)


def column(table, ids=ONE):
    return table.lookup(ids)[:, 0].tolist()


def erase(table, path):
    assert table.erase(torch.tensor([2])) == 1


def evict(table, path):
    table.evict(4_000_000_000)


def restore(table, path):
    make_table().assign(torch.tensor([1, 99]), torch.full((2, 2), 5.0)).save(str(path / "rows"))
    table.restore(str(path / "rows"))


def grow(table, path):
    table.assign(torch.arange(1000, 200_000), torch.ones(199_000, 2))


def clear(table, path):
    table.clear()


@pytest.mark.parametrize("kind", [HashEmbedding, HashEmbeddingBag])
@pytest.mark.parametrize(
    ("change", "before"),
    [(erase, [10, 0, 10]), (evict, [0, 0, 0]), (restore, [5, 0, 0]), (grow, [10, 10, 10]), (clear, [0, 0, 0])],
)
def test_rows_that_went_or_moved_get_the_gradient_all_the_same(change, before, kind, tmp_path):
    table = make_table(expire_after="1d")
    table.assign(ONE, torch.full((3, 2), 10.0))
    out = kind(table)(IDS)
    change(table, tmp_path)
    out.sum().backward()
    assert column(table) == [a - b for a, b in zip(before, (1, 2, 1), strict=True)]


def test_other_forwards_and_modules_between():
    table, other = make_table(), make_table()
    bag, rows = HashEmbeddingBag(table), HashEmbedding(table)
    both = EmbeddingBagCollection({"a": table, "b": other})
    first = bag(IDS).sum()
    rows(torch.tensor([77]))
    both({"a": IDS, "b": IDS}).sum().backward()
    second = bag(IDS).sum()
    assert second.item() == -2 * (1 + 2 + 2 + 1)
    first.backward()
    second.backward()
    assert column(table) == [-3.0, -6.0, -3.0]
    assert column(other) == [-1.0, -2.0, -1.0]
    assert len(table) == 3


def test_two_losses_over_one_forward():
    table = make_table()
    out = HashEmbeddingBag(table)(IDS)
    out.sum().backward(retain_graph=True)
    (2 * out).sum().backward()
    assert column(table) == [-3.0, -6.0, -3.0]


def test_several_forwards_wait_for_one_step_and_their_modules_may_be_gone():
    table = shoal.HashTable(2, optimizer=shoal.Adagrad(lr=1.0, initial_accumulator=0.0), initializer="zeros")
    other = make_table()
    optimizer = SparseOptimizer([table, other])
    for _ in range(3):
        HashEmbeddingBag(table)(IDS).sum().backward()
        EmbeddingBagCollection({"a": table, "b": other})({"a": IDS, "b": IDS}).sum().backward()
    assert len(table) == len(other) == 0
    optimizer.step()
    assert column(table) == [-1.0, -1.0, -1.0]  # one step of size lr
    assert column(other) == [-3.0, -6.0, -3.0]
    optimizer.step()
    assert column(other) == [-3.0, -6.0, -3.0]


def test_looking_at_gradients_does_not_change_the_step():
    results = []
    for look in (False, True):
        tables = {name: shoal.HashTable(2, optimizer=shoal.Adagrad(lr=1.0), seed=1) for name in "ab"}
        bags = EmbeddingBagCollection(tables)
        optimizer = SparseOptimizer(bags)
        for seed in range(3):
            ids = torch.randint(0, 5, (4, 2), generator=torch.Generator().manual_seed(seed))
            bags({"a": ids, "b": ids + 1}).sum().backward()
            if look:
                optimizer.gradients()
        optimizer.step()
        results.append(torch.stack([table.lookup(torch.arange(6)) for table in tables.values()]))
    assert torch.equal(*results)


def test_forward_and_backward_in_different_threads():
    table = make_table()
    bag = HashEmbeddingBag(table)
    losses, errors = [], []

    def forward(number):
        losses.append(bag(IDS + 10 * number).sum())

    def backward(loss):
        try:
            loss.backward()
        except BaseException as error:
            errors.append(error)

    for work, arguments in ((forward, range(8)), (backward, losses)):
        threads = [threading.Thread(target=work, args=(argument,)) for argument in arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not errors
    assert len(table) == 24
    for number in range(8):
        assert column(table, ONE + 10 * number) == [-1.0, -2.0, -1.0]


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [HashEmbedding, HashEmbeddingBag, "max"])
def test_recomputed_activations_train_as_kept_ones(kind, reentrant, held):
    results = []
    for wrap in (False, True):
        torch.manual_seed(0)
        table = shoal.HashTable(4, optimizer=shoal.Adagrad(lr=0.1), seed=1)
        module = HashEmbeddingBag(table, combiner="max") if kind == "max" else kind(table)
        top = nn.Linear(4, 1)
        optimizer = SparseOptimizer(module) if held else None
        scale = torch.ones(1, requires_grad=True)  # reentrant checkpoints need an input with a gradient

        def block(ids, scale, module=module, top=top):
            return torch.relu(top(module(ids) * scale))

        for step in range(3):
            ids = IDS + step
            out = checkpoint(block, ids, scale, use_reentrant=reentrant) if wrap else block(ids, scale)
            out.square().sum().backward()
            if optimizer:
                optimizer.step()
        results.append((table.lookup(torch.arange(8)), top.weight.grad, scale.grad, torch.tensor(len(table))))
    for kept, again in zip(*results, strict=True):
        assert torch.equal(kept, again)


def test_a_backward_through_a_graph_that_is_kept_for_higher_derivatives():
    table = make_table()
    weight = torch.ones(1, requires_grad=True)
    out = (HashEmbeddingBag(table)(IDS) + 3.0) * weight
    (gradient,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    assert column(table) == [0.0, 0.0, 0.0]
    gradient.sum().backward()
    assert column(table) == [-12.0, -24.0, -12.0]  # d(2 w x^2)/dx at x = 3, w = 1
