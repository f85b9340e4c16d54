"""A model whose rows count samples: each sample subtracts the same from each of its rows."""

import os

import torch
from torch import nn


class Counting(nn.Module):
    """Its logits are 0, so that a sample with label 0 has a gradient of 0.5 / batch size, whatever number of ranks."""

    def __init__(self, inputs):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))  # the loss is the mean over all ranks

    def forward(self, dense, rows):
        total = rows.flatten(1).sum(1)
        return self.ranks * (total - total.detach()) + self.bias * 0
