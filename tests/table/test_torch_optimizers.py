"""The short spellings of row optimizers against their counterparts in `torch.optim`, with every id in every batch."""

import dataclasses
import inspect

import pytest
import torch

import shoal
from shoal.table.config import optim

OF_TORCH = {
    "sgd": (shoal.Sgd, torch.optim.SGD, {}, {}),
    "momentum": (shoal.Momentum, torch.optim.SGD, {}, {"momentum": 0.9}),
    "nesterov": (shoal.Momentum, torch.optim.SGD, {"nesterov": True}, {"momentum": 0.9, "nesterov": True}),
    "momentum, decay": (
        shoal.Momentum, torch.optim.SGD, {"weight_decay": 0.1}, {"momentum": 0.9, "weight_decay": 0.1},
    ),
    "adagrad": (shoal.Adagrad, torch.optim.Adagrad, {}, {}),
    "adagrad, decay": (shoal.Adagrad, torch.optim.Adagrad, {"weight_decay": 0.1}, {"weight_decay": 0.1}),
    "adagrad, accumulator": (
        shoal.Adagrad, torch.optim.Adagrad, {"initial_accumulator": 0.1}, {"initial_accumulator_value": 0.1},
    ),
    "adadelta": (shoal.Adadelta, torch.optim.Adadelta, {}, {}),
    "adadelta, decay": (shoal.Adadelta, torch.optim.Adadelta, {"weight_decay": 0.1}, {"weight_decay": 0.1}),
    "adam": (shoal.Adam, torch.optim.Adam, {}, {}),
    "adam, decay": (shoal.Adam, torch.optim.Adam, {"weight_decay": 0.1}, {"weight_decay": 0.1}),
    "adam, large eps": (shoal.Adam, torch.optim.Adam, {"eps": 0.01}, {"eps": 0.01}),
    "amsgrad": (shoal.Amsgrad, torch.optim.Adam, {}, {"amsgrad": True}),
    "adamw": (shoal.AdamW, torch.optim.AdamW, {}, {}),
    "adamw, decay": (shoal.AdamW, torch.optim.AdamW, {"weight_decay": 0.3}, {"weight_decay": 0.3}),
    "rmsprop": (shoal.RmsProp, torch.optim.RMSprop, {}, {}),
    "rmsprop, decay": (shoal.RmsProp, torch.optim.RMSprop, {"weight_decay": 0.1}, {"weight_decay": 0.1}),
}  # fmt: skip
SAME = {"initial_accumulator": "initial_accumulator_value"}


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-7, 1e-11], ids=lambda s: f"gradients of {s:g}")
@pytest.mark.parametrize("case", OF_TORCH)
def test_a_row_optimizer_moves_rows_as_torch_moves_parameters(case, scale):
    ours, theirs, options, torch_options = OF_TORCH[case]
    generator = torch.Generator().manual_seed(7)
    ids, start = torch.arange(40), torch.rand(40, 12, generator=generator) - 0.5
    table = shoal.HashTable(dim=12, optimizer=ours(**options))
    table.assign(ids, start)
    weights = torch.nn.Parameter(start.clone())
    optimizer = theirs([weights], **torch_options)
    for step in range(60):
        grads = torch.randn(40, 12, generator=generator) * scale
        grads[:, step % 12] = 0
        table.apply_gradients(ids, grads, step)
        weights.grad = grads.clone()
        optimizer.step()
    moved, wanted = table.lookup(ids) - start, weights.detach() - start
    rounding = 2e-6  # of weights near 0.5, over all steps
    torch.testing.assert_close(moved, wanted, rtol=1e-3, atol=max(rounding, 1e-3 * float(wanted.abs().mean())))


@pytest.mark.parametrize(
    ("ours", "theirs"), sorted({(o, t) for o, t, _, _ in OF_TORCH.values()}, key=str), ids=lambda c: c.__name__
)
def test_the_defaults_are_those_of_torch(ours, theirs):
    defaults = {name: p.default for name, p in inspect.signature(theirs).parameters.items()}
    own = {field.name: getattr(ours(), field.name) for field in dataclasses.fields(ours)}
    shared = {
        name: (value, defaults[SAME.get(name, name)]) for name, value in own.items() if SAME.get(name, name) in defaults
    }
    if ours is shoal.Momentum:  # SGD with momentum, which is off by default
        assert shared.pop("momentum") == (0.9, 0)
    assert "lr" in shared
    assert {name: ours for name, (ours, _) in shared.items()} == {name: theirs for name, (_, theirs) in shared.items()}


def test_every_short_spelling_is_compared_with_torch_or_is_not_in_torch():
    compared = {ours for ours, _, _, _ in OF_TORCH.values()}
    alone = {
        optim.RowwiseAdagrad, optim.Lamb, optim.RmsPropV2, optim.Ftrl, optim.GroupFtrl, optim.GroupAdagrad,
        optim.MovingAverage, optim.BatchSoftmax,
    }  # fmt: skip
    assert compared | alone == set(optim.ROW_OPTIMIZERS.values())


def test_a_model_learns_as_well_with_rows_as_with_a_dense_table():
    """Under a mean loss gradients are small: an accumulator that does not start at 0 would keep the rows in place."""
    generator = torch.Generator().manual_seed(3)
    truth = torch.randn(200, generator=generator)
    ids = torch.randint(0, 200, (100, 256), generator=generator)
    labels = (torch.rand(ids.shape, generator=generator) < torch.sigmoid(2 * truth[ids])).float()
    table = shoal.HashTable(dim=1, optimizer=shoal.Adagrad(lr=0.05), initializer="zeros")
    bag = shoal.nn.HashEmbedding(table)
    dense = torch.nn.Embedding(200, 1)
    torch.nn.init.zeros_(dense.weight)
    optimizer = torch.optim.Adagrad(dense.parameters(), lr=0.05)
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    for batch, wanted in zip(ids, labels, strict=True):
        ours, theirs = loss(bag(batch)[:, 0], wanted), loss(dense(batch)[:, 0], wanted)
        ours.backward()
        optimizer.zero_grad()
        theirs.backward()
        optimizer.step()
    assert ours.item() < 0.6
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-3)


def test_configurations_keep_the_defaults_of_their_messages():
    assert optim.as_row_optimizer(shoal.table.AdagradOptimizer())[0].adagrad.initial_accumulator_value == pytest.approx(
        0.1
    )
    adam = shoal.table.AdamOptimizer().as_proto().adam
    assert (adam.beta2, adam.epsilon, adam.bias_corrected_epsilon) == (pytest.approx(0.99), pytest.approx(0.01), False)
    assert shoal.table.RmspropOptimizer().as_proto().rmsprop.epsilon == 1.0
