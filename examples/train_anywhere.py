"""One model whose rows can be in this process, spread over the trainers, or on parameter servers.

python examples/train_anywhere.py                                        # in this process
torchrun --nproc-per-node 2 examples/train_anywhere.py --rows all-to-all # over the trainers
shoal ps --port 7100 &                                                   # on a parameter server
python examples/train_anywhere.py --rows tcp://127.0.0.1:7100            # separate several servers by commas
"""

import argparse
import os

import torch
import torch.distributed as dist

import shoal
from shoal import nn as snn
from shoal.sharded import AllToAllHashTable, PsClient, ps_table

ROWS = {"optimizer": shoal.Adagrad(lr=0.1), "initializer": "uniform", "name": "item"}


def make_table(rows: str, dim: int):
    if rows == "local":
        return shoal.HashTable(dim, seed=1, **ROWS)
    if rows == "all-to-all":
        return AllToAllHashTable(dim, seed=1, **ROWS)
    return ps_table(PsClient(rows.split(",")), dim, seed=1, **ROWS)


def batches(steps: int, size: int, rank: int, world: int):
    """Clicks that depend on the items of a session; every rank takes its share of each batch."""
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        items = torch.randint(0, 2000, (size, 5), generator=g)
        clicks = ((items % 7 == 0).float().mean(1) > 0.15).float()
        yield items[rank::world], clicks[rank::world]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="local", help="local, all-to-all, or the addresses of parameter servers")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    torch.manual_seed(0)
    bag = snn.HashEmbeddingBag(make_table(args.rows, dim=8), combiner="mean")
    dense = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(dense.parameters(), lr=0.01)
    losses = []
    for step, (items, clicks) in enumerate(batches(args.steps, args.batch, rank, world)):
        logits = dense(bag(items)).squeeze(-1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, clicks)
        optimizer.zero_grad()
        loss.backward()
        if world > 1:
            for parameter in dense.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                parameter.grad /= world
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1:4}: loss {sum(losses[-50:]) / len(losses[-50:]):.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
