"""The ready-made models: shapes, gradients, options, and the native factorisation machine against its reference."""

import pytest
import torch

from shoal.errors import ConfigError
from shoal.models import MODELS, Inputs, Mlp, build_model, fm, pair_dots
from shoal.models.interactions import fm_reference

INPUTS = Inputs(dense=("age", "price"), sparse=("user", "item", "tag"), dim=4)
OPTIONS = {"two_tower": {"user": ["user", "age"], "item": ["item", "tag"]}}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [1, 5])
def test_a_model_gives_a_logit_a_sample_and_gradients_to_all_it_sees(name, batch):
    torch.manual_seed(0)
    model = build_model(name, INPUTS, OPTIONS.get(name))
    rows = torch.randn(batch, 3, 4, requires_grad=True)
    logits = model(torch.randn(batch, 2), rows)
    assert logits.shape == (batch,)
    logits.square().sum().backward()
    assert bool((rows.grad != 0).any(0).any(1).all())
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["deepfm", "dlrm", "dcn"])
def test_models_do_without_numbers(name):
    model = build_model(name, Inputs(sparse=("user", "item"), dim=4))
    assert model(torch.empty(3, 0), torch.randn(3, 2, 4)).shape == (3,)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "deepfm",
            {"hiden": [3]},
            "unexpected keyword argument 'hiden' .did you mean 'hidden'.*; its options are: hidden, dropout",
        ),
        ("deepfm", {"hidden": [0]}, "hidden widths must be integers of at least 1"),
        ("deepfm", {"dropout": 1.5}, r"dropout must be in \[0, 1\), got 1.5"),
        ("dcn", {"crosses": 0}, "crosses must be at least 1, got 0"),
        ("dcn", {"rank": 0}, "rank must be at least 1, got 0"),
        ("two_tower", {"user": ["x"], "item": ["item"]}, "the user tower has 'x', which is not a feature"),
        ("two_tower", {"user": ["user"], "item": ["user"]}, "a feature must be in one tower, but 'user' is in both"),
        ("two_tower", {"user": ["user"], "item": []}, "the item tower has no features"),
        ("two_tower", {}, "missing a required argument"),
        ("wide", {}, "name must be one of deepfm, dlrm, dcn, two_tower or package.module:Class, got 'wide'"),
        ("no_such_package.x:Y", {}, "there is no module 'no_such_package'"),
        ("torch.nn:NoSuch", {}, "module 'torch.nn' has no 'NoSuch'"),
        ("torch:nn", {}, "model 'torch:nn' must name a class or a function, got a module"),
        ("shoal.models.mlp:Mlp", {}, "missing a required argument"),
    ],
)
def test_wrong_names_and_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_model(name, INPUTS, options)


@pytest.mark.parametrize("shape", [(7, 26, 16), (1, 1, 1), (3, 2, 5), (33, 5, 21), (2, 3, 64)], ids=str)
@pytest.mark.parametrize("used", ["both", "flat", "term"])
def test_the_native_fm_is_its_reference(shape, used):
    rows = torch.randn(shape)
    found = []
    for function in (fm, fm_reference):
        leaf = rows.clone().requires_grad_()
        flat, term = function(leaf)
        weights = torch.linspace(-1, 1, flat.shape[1])
        loss = (flat * weights).sum() * (used != "term") + term.square().sum() * (used != "flat")
        loss.backward()
        found.append((flat.detach(), term.detach(), leaf.grad))
    for ours, reference in zip(*found, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)


def test_the_fm_of_nothing_is_nothing():
    flat, term = fm(torch.empty(0, 3, 4))
    assert (flat.shape, term.shape) == ((0, 12), (0,))


def test_an_mlp_over_parts_is_one_over_all_columns():
    torch.manual_seed(0)
    net = Mlp([2, 3], [4], 1)
    a, b = torch.randn(5, 2), torch.randn(5, 3)
    first, second = net.layers
    expected = second(torch.relu(first(torch.cat([a, b], 1))))
    torch.testing.assert_close(net(a, b), expected)


def test_pair_dots_are_all_pairs():
    rows = torch.randn(2, 4, 3)
    expected = [rows[0, i] @ rows[0, j] for i in range(4) for j in range(i)]
    torch.testing.assert_close(pair_dots(rows)[0], torch.stack(expected))
