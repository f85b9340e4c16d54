"""The wheel's smoke test: uses an installed shoal, from outside its source tree, with any torch and Python.

python scripts/wheel_smoke.py            # needs only what shoal needs: torch, numpy, nanobind-backend and protobuf
"""

import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch

import shoal
from shoal.table import restore_incremental, save_incremental


def train() -> float:
    """Trains a small model on a table and returns its last loss."""
    torch.manual_seed(0)
    table = shoal.HashTable(dim=8, optimizer=shoal.Adagrad(lr=0.1), name="smoke", seed=1)
    model = torch.nn.Sequential(shoal.nn.HashEmbeddingBag(table, combiner="mean"), torch.nn.Linear(8, 1))
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = torch.zeros(())
    for _ in range(100):
        ids = torch.randint(500, (256, 1)) * 982451653
        clicked = (ids % 3 == 0).float()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids), clicked)
        dense.zero_grad()
        loss.backward()
        dense.step()
    assert len(table) == 500, len(table)
    return loss.item()


def checkpoints(folder: str) -> None:
    table = shoal.HashTable(dim=4, name="item").assign(torch.arange(1000), torch.randn(1000, 4), req_time=7)
    table.save(os.path.join(folder, "plain"))
    save_incremental(table, os.path.join(folder, "chain"))
    other = shoal.HashTable(dim=4, name="item")
    restore_incremental(other, os.path.join(folder, "chain"))
    ids = torch.arange(1000)
    assert torch.equal(other.lookup(ids), table.lookup(ids))
    from shoal.table.offline.source import open_source

    rows = sum(len(batch) for _, batch in open_source(os.path.join(folder, "plain")).scan())
    assert rows == 1000, rows


def ops() -> None:
    ids = torch.tensor([5, 3, 5, 8, 3])
    output, sizes = shoal.ops.reorder_by_indices(ids, torch.remainder(ids, 2).int(), 2)
    assert sorted(output.tolist()) == [3, 5, 8]
    assert sizes.tolist() == [1, 2]


def main() -> int:
    where = os.path.dirname(os.path.abspath(shoal.__file__))
    source = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "src")
    assert not where.startswith(source), f"shoal comes from the source tree: {where}"
    last = train()
    assert last < 0.6, last  # it was 0.69 before the first step
    with tempfile.TemporaryDirectory() as folder:
        checkpoints(folder)
    ops()
    said = subprocess.run([sys.executable, "-m", "shoal", "--version"], capture_output=True, text=True, check=True)
    report = {
        "shoal": said.stdout.split()[-1], "from": where, "isa": shoal._core.isa(), "loss": round(last, 4),
        "python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__,
    }  # fmt: skip
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
