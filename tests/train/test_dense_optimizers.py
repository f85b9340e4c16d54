"""The optimizers of the dense part against torch's own, and the modules that they import."""

import subprocess
import sys

import pytest
import torch

from shoal.train.dense_optimizers import OPTIMIZERS

TORCH = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


def trained(kind):
    """A parameter and the optimizer's state after some steps, saved and loaded in the middle."""
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(7, 3))
    optimizer = kind([parameter], lr=0.1, fused=True)
    for step in range(6):
        optimizer.zero_grad()
        parameter.grad = torch.randn(7, 3)
        optimizer.step()
        if step == 2:
            saved = optimizer.state_dict()
            optimizer = kind([parameter], lr=0.1, fused=True)
            optimizer.load_state_dict(saved)
    return parameter.detach(), optimizer.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_the_dense_part_is_torchs(name):
    assert OPTIMIZERS.keys() == TORCH.keys()
    mine, my_state = trained(OPTIMIZERS[name])
    theirs, their_state = trained(TORCH[name])
    assert torch.equal(mine, theirs)
    assert my_state["param_groups"] == their_state["param_groups"]
    for key, value in their_state["state"].get(0, {}).items():
        assert torch.equal(my_state["state"][0][key], value)


def test_an_optimizer_of_the_dense_part_does_not_import_the_compiler():
    code = """
import sys, torch
from shoal.train.dense_optimizers import OPTIMIZERS
for kind in OPTIMIZERS.values():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], lr=0.1, fused=True)
    parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
