"""Bags of rows in a flat buffer, and their gradients summed per row: natively, against plain torch."""

from itertools import product

import pytest
import torch

from shoal import _core
from shoal.sharded.bags import add_gradients, pool_rows
from shoal.table.pooling import pool_columns, row_gradients
from shoal.table.protocol import FIRSTN, MAX, MEAN, SQRTN, SUM, Features, Found, Part, marks_shape

NONE = torch.empty(0, dtype=torch.int64)


def part_of(combiners, bags, dim, distinct, *, weighted=False, padding=None, seed=0):
    """A part with a gradient of bags, of rows that begin where `Found.where` says."""
    make = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (len(combiners) * bags,), generator=make)
    n = int(lengths.sum())
    ids = torch.randint(0, max(1, distinct), (n,), generator=make)
    rows = tuple(3 if kind == FIRSTN else 1 for kind in combiners)
    columns = tuple(1 + number * (3 * dim + 2) for number in reversed(range(len(combiners))))
    features = Features((0,) * len(combiners), combiners, columns, len(combiners) * (3 * dim + 2), padding, rows)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    grad = torch.randn(bags, features.width, generator=make)
    weights = torch.rand(n, generator=make) if weighted else None
    counts = lengths.view(len(combiners), -1).sum(1)
    places = (ids * dim).int()
    if padding is not None:
        places[ids == padding] = -1
    return Part(Found(ids, counts, places, NONE), features, grad, offsets, weights)


def marked(part, flat, dim):
    """The part with the marks of its rows; what is pooled is that of plain torch."""
    found, features, offsets = part.found, part.features, part.offsets
    n = found.ids.numel()
    rows = flat.view(-1, dim)[found.ids] if flat.numel() else torch.zeros(n, dim)
    if features.padding is not None:
        rows[found.ids == features.padding] = 0
    ours, want = (torch.full(part.grad.shape, 9.0) for _ in range(2))
    marks, judge = (torch.zeros(marks_shape(n, dim), dtype=torch.uint8) for _ in range(2))
    pool_columns(rows, found, features, offsets, part.weights, want, judge)
    pool_rows(flat, found, features, offsets, part.weights, ours, dim, marks)
    torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)
    part = part._replace(marks=marks)
    assert torch.equal(row_gradients(part, dim), row_gradients(part._replace(marks=judge), dim))
    return part


ALL = (SUM, MEAN, SQRTN, MAX, FIRSTN)
SOME, MANY = [(0, 0), (1, 5), (37, 5)], (1500, 9000)


@pytest.mark.parametrize(
    ("dim", "combiners", "size"),
    [
        *product([1, 7, 8, 16, 64], [(SUM,), ALL, (MEAN, MEAN), (MAX, MAX), (FIRSTN,)], SOME),
        *product([7, 64], [(SUM,), ALL], [MANY]),
    ],
)
@pytest.mark.parametrize("options", [{}, {"weighted": True}, {"padding": 3, "weighted": True}], ids=str)
def test_sums_are_those_of_the_reference(dim, combiners, size, options):
    bags, distinct = size
    flat = torch.randint(-3, 3, (distinct * dim,)).float()
    parts = [marked(part_of(combiners, bags, dim, distinct, seed=seed, **options), flat, dim) for seed in range(2)]
    found = parts[0].found
    parts.insert(1, Part(found, parts[0].features, torch.randn(found.ids.numel(), dim)))  # a gradient of rows
    want = torch.zeros(distinct, dim)
    for part in parts:
        keep = part.found.where >= 0
        want.index_add_(0, part.found.ids[keep], row_gradients(part, dim)[keep])
    assert torch.equal(add_gradients(parts, distinct, dim), want.view(-1))


def test_bad_input_is_refused_and_changes_nothing():
    part = part_of((SUM, SUM), 5, 4, 10)
    out = torch.zeros(40)

    def add(*, columns=(0, 4), offsets=part.offsets, at=part.found.where, size=40, combiners=(SUM, SUM)):
        _core.add_pooled_at(
            out.data_ptr(), size, at.data_ptr(), at.numel(), offsets.data_ptr(), 5, 4, list(combiners), list(columns),
            [], 0, 0, part.grad.data_ptr(), part.grad.shape[1],
        )  # fmt: skip

    with pytest.raises(ValueError, match=r"columns of feature 1 must be within 0\.\.\d+, got 4 columns from 26"):
        add(columns=(0, 26))
    with pytest.raises(ValueError, match="offsets must rise from 0"):
        add(offsets=part.offsets + 1)
    with pytest.raises(ValueError, match="offsets must rise from 0"):
        add(offsets=part.offsets.flip(0).contiguous())
    with pytest.raises(ValueError, match="outside the buffer of 36 floats"):
        add(at=torch.full_like(part.found.where, 36), size=36)
    with pytest.raises(ValueError, match="max needs the marks"):
        add(combiners=(SUM, MAX))
    with pytest.raises(ValueError, match="length of firstn"):
        add(combiners=(SUM, FIRSTN))
    assert not out.any()
