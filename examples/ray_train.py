"""Ray Train with tables spread over its workers, and checkpoints from which a run resumes after a worker is lost.

python examples/ray_train.py --workers 2        # pip install "shoal[train]" "ray[train]"

Ray starts the workers and their process group, and restarts them when one is lost. Shoal spreads the rows over the
workers; its checkpoints contain rows, weights and positions in the data, and another number of workers can resume from
them. Try it: kill a worker, or run the command again with more workers.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.comm import start_ranks
from shoal.data import CRITEO, Batch, CriteoLike, Samples, Stream, make_format, write_criteo
from shoal.nn import HashEmbedding
from shoal.sharded import AllToAllHashTable
from shoal.train import Checkpoints, Pipeline


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = HashEmbedding(AllToAllHashTable(8, name="item", optimizer="adagrad", lr=0.05))
        self.dense = nn.Sequential(nn.Linear(13 + 26 * 8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, samples: Samples) -> torch.Tensor:
        rows = self.rows(samples.ids).flatten(1)
        return self.dense(torch.cat([samples.dense, rows], dim=1)).squeeze(1)


def learn(config: Mapping[str, Any], report: Callable[[dict[str, Any], str], None]) -> dict[str, Any]:
    """Trains on one worker; calls ``report(metrics, checkpoint)`` after every checkpoint."""
    ranks = start_ranks()  # joins the process group that Ray has started
    torch.manual_seed(0)  # the same first weights on all workers
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    stream = Stream(
        [f"{config['folder']}/train.tsv"], make_format("criteo", CRITEO), CRITEO, batch_size=config["batch_size"],
        shuffle_rows=8192, rank=ranks.rank, world=ranks.world_size,
    )  # fmt: skip
    checkpoints = Checkpoints(f"{config['folder']}/checkpoints", model, optimizer, stream=stream)
    at = checkpoints.resume()
    metrics: dict[str, Any] = {"step": at.step, **at.values} if at else {"step": 0, "samples": 0, "loss": 0.0}
    state = stream.state

    def no_samples(last: Batch | None) -> Batch:
        """The empty batch of a worker that has read all of its data."""
        return Batch(samples=Samples.empty(13, 26), state=state if last is None else last.state)

    def save() -> None:
        path = checkpoints.save(metrics["step"], state, values={name: metrics[name] for name in ("samples", "loss")})
        report(metrics, path)

    # Reads the next batches and exchanges their ids while a step computes; results equal those of a plain loop.
    for batch in Pipeline(model, empty_batch=no_samples).batches(stream):
        part, state = batch.samples, batch.state
        loss = nn.functional.binary_cross_entropy_with_logits(model(part), part.label, reduction="sum")
        optimizer.zero_grad()
        (loss / (config["batch_size"] * ranks.world_size)).backward()  # updates the rows, too
        for parameter in model.parameters():
            ranks.sum(parameter.grad)
        optimizer.step()
        count, total_loss = ranks.sum(torch.tensor([len(part), loss.item()], dtype=torch.float64)).tolist()
        metrics = {
            "step": metrics["step"] + 1, "samples": metrics["samples"] + int(count), "loss": total_loss / count,
        }  # fmt: skip
        if metrics["step"] % config["every"] == 0:
            save()
    if metrics["step"] % config["every"]:
        save()
    return metrics


def train_loop(config: dict[str, Any]) -> None:
    """Runs `learn` in a Ray Train worker."""
    import ray.train

    def report(metrics: dict[str, Any], path: str) -> None:
        first = ray.train.get_context().get_world_rank() == 0  # the checkpoint is one folder for all workers
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(path) if first else None)

    learn(config, report)


def run(folder: Path, workers: int, loop: Callable[..., None] = train_loop, **config: Any) -> Any:
    """Trains on a Ray cluster and returns Ray's result. All hosts must reach ``folder``."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder), **config},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name="shoal", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=3)
        ),
    )
    return trainer.fit()


def main() -> None:
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("ray_run"), help="data and checkpoints, for all hosts")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--batch-size", type=int, default=256)
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "train.tsv").exists():
        write_criteo(folder / "train.tsv", CriteoLike(rows=options.lines, seed=1))
    ray.init()
    result = run(folder, options.workers, every=options.every, batch_size=options.batch_size)
    print(f"{result.metrics['samples']:,} samples; {result.checkpoint}")


if __name__ == "__main__":
    main()
