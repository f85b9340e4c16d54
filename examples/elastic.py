"""A training loop that survives the loss of ranks, and resumes with more or fewer of them.

shoal launch -n 3 --max-restarts 10 examples/elastic.py      # kill a rank: all resume from the last checkpoint
shoal launch -n 2 examples/elastic.py                        # resumes the same run with fewer ranks
torchrun --nproc-per-node 3 --max-restarts 10 examples/elastic.py
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from shoal.comm import start_ranks
from shoal.data import CRITEO, CriteoLike, Samples, Stream, make_format, write_criteo
from shoal.nn import HashEmbedding
from shoal.sharded import AllToAllHashTable
from shoal.train import Checkpoints


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = HashEmbedding(AllToAllHashTable(8, name="item", optimizer="adagrad", lr=0.05))
        self.dense = nn.Sequential(nn.Linear(13 + 26 * 8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, samples: Samples) -> torch.Tensor:
        rows = self.rows(samples.ids.view(len(samples), 26))
        return self.dense(torch.cat([samples.dense, rows.flatten(1)], dim=1)).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("elastic"), help="data and checkpoints, for all hosts")
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--batch-size", type=int, default=256)
    options = parser.parse_args()
    ranks = start_ranks()
    data = options.folder / "train.tsv"

    def prepare() -> None:
        options.folder.mkdir(exist_ok=True)
        if ranks.first and not data.exists():
            write_criteo(data, CriteoLike(rows=options.lines, seed=1))

    ranks.together(prepare)
    torch.manual_seed(0)  # the same first weights on all ranks
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    stream = Stream(
        [str(data)], make_format("criteo", CRITEO), CRITEO, batch_size=options.batch_size, shuffle_rows=8192,
        rank=ranks.rank, world=ranks.world_size,
    )  # fmt: skip
    checkpoints = Checkpoints(options.folder / "checkpoints", model, optimizer, stream=stream)

    at = checkpoints.resume()  # rows, weights and positions, for any number of ranks
    step, samples = (at.step, at.values["samples"]) if at else (0, 0)
    batches, state = iter(stream), stream.state
    while True:
        batch = next(batches, None)
        total = int(ranks.sum(torch.tensor([len(batch) if batch else 0])))
        if not total:  # all ranks have finished; until then all must make every call
            break
        part = batch.samples if batch else Samples.empty(13, 26)
        loss = nn.functional.binary_cross_entropy_with_logits(model(part), part.label, reduction="sum") / total
        optimizer.zero_grad()
        loss.backward()  # updates the rows, too
        for parameter in model.parameters():
            ranks.sum(parameter.grad)
        optimizer.step()
        step, samples = step + 1, samples + total
        state = batch.state if batch else state
        if step % options.every == 0:
            checkpoints.save(step, state, values={"samples": samples})
            if ranks.first:
                print(f"step {step}, {samples:,} samples, {ranks.world_size} ranks", flush=True)
    checkpoints.save(step, state, values={"samples": samples})
    if ranks.first:
        print(f"done: {step} steps, {samples:,} samples")
    ranks.close()


if __name__ == "__main__":
    main()
