"""Batches of three features over two tables, and what a group is compared with."""

import torch

from shoal.table.pooling import row_gradients
from shoal.table.protocol import MEAN, SQRTN, SUM, Features, Found, Part, Step

FEATURES = Features(tables=(0, 1, 1), combiners=(SUM, MEAN, SQRTN), columns=(0, 4, 8), width=12)


def make_batch(device, n=30, bags=5, low=0, high=50, seed=0):
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(low, high, (3 * n,), generator=make).to(device)
    cuts = [torch.sort(torch.randint(0, n + 1, (bags - 1,), generator=make))[0] for _ in range(3)]
    offsets = torch.cat(
        [torch.cat([torch.tensor([0]), c]) + k * n for k, c in enumerate(cuts)] + [torch.tensor([3 * n])]
    )
    return ids, torch.full((3,), n), offsets.to(device), torch.randn(bags, 12, generator=make).to(device)


def train(group, ids, counts, offsets, grad, step=None):
    found = group.find(ids, counts, FEATURES, missing="initial")
    out = torch.empty(grad.shape, device=ids.device)
    group.pooled(found, FEATURES, offsets, None, out, missing="initial")
    group.update([Part(found, FEATURES, grad, offsets)], step=step or Step())
    return out


def one_by_one(tables, ids, counts, offsets, grad, step=0):
    """The same with CPU tables and the references."""
    found = Found(ids.cpu(), counts, ids.new_empty(0), ids.new_empty(0))
    part = Part(found, FEATURES, grad.cpu(), offsets.cpu())
    rows = row_gradients(part, 4).split(counts.tolist())
    for number, table in enumerate(tables):
        own = [k for k, of in enumerate(FEATURES.tables) if of == number]
        mine = torch.cat([found.ids.split(counts.tolist())[k] for k in own])
        table.apply_gradients(mine, torch.cat([rows[k] for k in own]), step, enable_dedup=True)
