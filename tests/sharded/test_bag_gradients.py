"""Gradients of bags summed per distinct row: the native sum against the reference that lays out every id."""

import pytest
import torch

from shoal import _core
from shoal.sharded.bag_gradients import sum_gradients, sum_gradients_reference
from shoal.table.protocol import MEAN, SQRTN, SUM, Features, Found, Part

NONE = torch.empty(0, dtype=torch.int64)


def part_of(combiners, bags, dim, distinct, *, weighted=False, padding=None, seed=0):
    """A part with a gradient of bags, and where its rows begin."""
    make = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (len(combiners) * bags,), generator=make)
    n = int(lengths.sum())
    ids = torch.randint(0, max(1, distinct), (n,), generator=make)
    columns = tuple(1 + number * (dim + 2) for number in reversed(range(len(combiners))))
    features = Features((0,) * len(combiners), combiners, columns, len(combiners) * (dim + 2) + 1, padding)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    grad = torch.randn(bags, features.width, generator=make)
    weights = torch.rand(n, generator=make) if weighted else None
    counts = lengths.view(len(combiners), -1).sum(1)
    places = (ids * dim).int()
    if padding is not None:
        places[ids == padding] = -1
    return Part(Found(ids, counts, NONE, NONE), features, grad, offsets, weights), places


@pytest.mark.parametrize("dim", [1, 7, 8, 16, 32, 64])
@pytest.mark.parametrize("combiners", [(SUM,), (SUM, MEAN, SQRTN), (MEAN, MEAN)])
@pytest.mark.parametrize("options", [{}, {"weighted": True}, {"padding": 3, "weighted": True}], ids=str)
@pytest.mark.parametrize(("bags", "distinct"), [(0, 0), (1, 5), (37, 5), (3000, 20_000)])
def test_sums_are_those_of_the_reference(dim, combiners, options, bags, distinct):
    made = [part_of(combiners, bags, dim, distinct, seed=seed, **options) for seed in range(2)]
    parts, places = [p for p, _ in made], [at for _, at in made]
    rows = Part(parts[0].found, parts[0].features, torch.randn(places[0].numel(), dim))  # a gradient of rows between
    parts.insert(1, rows)
    places.insert(1, places[0])
    size = distinct * dim
    ours = sum_gradients(size, parts, places, dim)
    assert torch.equal(ours, sum_gradients_reference(size, parts, places, dim))


def test_bad_input_is_refused_and_changes_nothing():
    part, places = part_of((SUM, SUM), 5, 4, 10)
    out = torch.zeros(40)

    def add(*, columns=(0, 4), offsets=part.offsets, at=places, size=40):
        _core.add_bag_gradients(
            part.grad.data_ptr(), part.grad.shape[1], 5, 4, list(columns), offsets.data_ptr(), 0, 0, at.data_ptr(),
            at.numel(), out.data_ptr(), size,
        )  # fmt: skip

    with pytest.raises(ValueError, match="column 10 with 4 floats lies outside a gradient of width 13"):
        add(columns=(0, 10))
    with pytest.raises(ValueError, match="offsets must rise from 0"):
        add(offsets=part.offsets + 1)
    with pytest.raises(ValueError, match="offsets must rise from 0"):
        add(offsets=part.offsets.flip(0).contiguous())
    with pytest.raises(ValueError, match=r"place 36 .* lies outside the buffer of 36 floats"):
        add(at=torch.full_like(places, 36), size=36)
    assert not out.any()
