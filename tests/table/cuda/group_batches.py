"""Batches of three features over two tables, and the tables that a group is compared with."""

import torch

from shoal.table.cuda.backend import interpreted
from shoal.table.pooling import row_gradients
from shoal.table.protocol import FIRSTN, MAX, MEAN, SQRTN, SUM, Features, Found, Part, Step, marks_shape

FEATURES = Features(tables=(0, 1, 1), combiners=(SUM, MEAN, SQRTN), columns=(0, 4, 8), width=12)
MIXED = Features(
    tables=(0, 1, 1), combiners=(MAX, FIRSTN, MEAN), columns=(8, 0, 12), width=16, padding=3, lengths=(1, 2, 1)
)


STEPS = 2 if interpreted() else 3
ROUNDS = 2 if interpreted() else 10
"""Of threads at once: the interpreter runs one kernel at a time."""


def make_batch(device, n=30, bags=5, low=0, high=50, seed=0, features=FEATURES):
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(low, high, (3 * n,), generator=make).to(device)
    cuts = [torch.sort(torch.randint(0, n + 1, (bags - 1,), generator=make))[0] for _ in range(3)]
    offsets = torch.cat(
        [torch.cat([torch.tensor([0]), c]) + k * n for k, c in enumerate(cuts)] + [torch.tensor([3 * n])]
    )
    return ids, torch.full((3,), n), offsets.to(device), torch.randn(bags, features.width, generator=make).to(device)


def read(group, ids, counts, offsets, features):
    """What is found, what is pooled, and the marks, which are for max alone."""
    found = group.find(ids, counts, features, missing="initial")
    out = torch.empty((offsets.numel() - 1) // 3, features.width, device=ids.device)
    marks = torch.empty(marks_shape(ids.numel(), 4), dtype=torch.uint8, device=ids.device)
    group.pooled(found, features, offsets, None, out, missing="initial", marks=marks)
    return found, out, marks


def train(group, ids, counts, offsets, grad, step=None, features=FEATURES):
    """One step; what was pooled, and the marks."""
    found, out, marks = read(group, ids, counts, offsets, features)
    group.update([Part(found, features, grad, offsets, None, marks)], step=step or Step())
    return out, marks


def one_by_one(tables, ids, counts, offsets, grad, step=0, features=FEATURES, marks=None):
    """The same with CPU tables and the references."""
    found = Found(ids.cpu(), counts, ids.new_empty(0), ids.new_empty(0))
    part = Part(found, features, grad.cpu(), offsets.cpu(), None, None if marks is None else marks.cpu())
    rows = row_gradients(part, 4).split(counts.tolist())
    for number, table in enumerate(tables):
        own = [k for k, of in enumerate(features.tables) if of == number]
        mine = torch.cat([found.ids.split(counts.tolist())[k] for k in own])
        grads = torch.cat([rows[k] for k in own])
        keep = mine != features.padding if features.padding is not None else slice(None)
        table.apply_gradients(mine[keep], grads[keep], step, enable_dedup=True)
