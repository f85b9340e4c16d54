"""What shared rows and stale replicas cost, measured on MovieLens-100k in the order of its ratings.

    python examples/movielens.py                    # downloads the data; five seeds, about five minutes on two cores
    python examples/movielens.py --data u.data --seeds 1 --out out/movielens

Two experiments with one small factorisation model on user and movie ids; a movie is "liked" if it has at least four
stars:

* collisions: the model is trained for several epochs on the first four fifths of each user's ratings and tested on the
  last fifth, with a row per id, and with ids hashed into fewer and fewer rows;
* freshness: one pass over the stream. Replicas that are refreshed at different intervals predict every batch before the
  trainer learns it. A refresh pushes the rows that were touched since the last one, and the weights.

Prints both tables, and writes `movielens_collisions.png`, `movielens_freshness.png` and `movielens.json`.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import urllib.request
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.demo.run import auc
from shoal.nn import HashEmbedding
from shoal.serving import (
    Client,
    Feature,
    ModelConfig,
    ModelConfigList,
    ModelExporter,
    ModelServer,
    ModelServerConfig,
    publish,
)

WHEEL = "recbole==1.2.1"  # a wheel on PyPI that contains the ratings; it is not installed
ARCHIVE = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
MEMBERS = ("recbole/dataset_example/ml-100k/ml-100k.inter", "ml-100k/u.data")
DIM = 9  # a weight and eight factors
ROW_BYTES = DIM * 8  # weights and Adagrad's accumulator, without an index: a row of an `nn.Embedding`
DAY = 86400
INTERVALS = {"every batch": 0.0, "1 hour": 1 / 24, "5 hours": 5 / 24, "1 day": 1.0, "1 week": 7.0}


@dataclass
class Ratings:
    """One line per rating, oldest first. Users are in slot 1 and movies in slot 2, so that their ids differ."""

    ids: Tensor  # [N, 2]
    liked: Tensor  # [N]
    time_s: Tensor  # [N]


def obtain(folder: Path) -> Path:
    """The path of the data, which is downloaded from PyPI or GroupLens unless `folder` already has it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (found := [*folder.glob("recbole-*.whl"), *folder.glob("ml-100k.zip")]):
        print(f"fetching MovieLens-100k into {folder}", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), WHEEL]
        if subprocess.run(pip, stderr=subprocess.DEVNULL, check=False).returncode != 0:
            part = folder / "ml-100k.part"
            try:
                with urllib.request.urlopen(ARCHIVE, timeout=60) as source:
                    part.write_bytes(source.read())
            except OSError as error:
                raise SystemExit(
                    f"movielens: `pip download {WHEEL}` failed, and so did {ARCHIVE} ({error}). "
                    "Download one of them elsewhere and pass it as --data."
                ) from None
            part.rename(folder / "ml-100k.zip")
        found = [*folder.glob("recbole-*.whl"), *folder.glob("ml-100k.zip")]
    return found[0]


def load(path: Path) -> Ratings:
    """Reads `ml-100k.inter` or `u.data` (user, movie, stars, seconds; tabs between), or an archive with one of them."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            member = next((name for name in MEMBERS if name in archive.namelist()), None)
            if member is None:
                raise SystemExit(f"movielens: {path} has none of {', '.join(MEMBERS)}")
            lines = io.TextIOWrapper(archive.open(member), "utf-8").read().splitlines()
    else:
        lines = path.read_text("utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            user, movie, stars, seconds = line.split("\t")
            rows.append((int(user), int(movie), float(stars), int(float(seconds))))
        except ValueError:
            if number > 1:  # the first line may be a heading
                raise SystemExit(f"movielens: {path}, line {number}: not a rating: {line[:60]!r}") from None
    if not rows:
        raise SystemExit(f"movielens: {path} contains no ratings")
    user, movie, stars, seconds = (torch.tensor(column) for column in zip(*rows, strict=True))
    order = torch.argsort(seconds, stable=True)
    ids = torch.stack([user + (1 << 48), movie + (2 << 48)], dim=1)
    return Ratings(ids[order], (stars >= 4).float()[order], seconds[order])


class Factorisation(nn.Module):
    """The weights of user and movie, the product of their factors, and a small perceptron over both factors."""

    def __init__(self, table: shoal.HashTable) -> None:
        super().__init__()
        self.rows = HashEmbedding(table)
        self.dense = nn.Sequential(nn.Linear(2 * (DIM - 1), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return combine(self.rows(ids), self.dense)


def combine(rows: Tensor, dense: nn.Module) -> Tensor:
    """Scores of ``[B, 2, DIM]`` rows."""
    weights, factors = rows[..., 0], rows[..., 1:]
    return weights.sum(1) + factors.prod(1).sum(1) + dense(factors.flatten(1)).squeeze(1)


class Trainer:
    """A model, its table and the dense optimizer; the table's own optimizer runs in `backward`."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.table = shoal.HashTable(DIM, optimizer=shoal.Adagrad(lr=0.05), seed=seed)
        self.model = Factorisation(self.table)
        self.optimizer = torch.optim.Adam(self.model.dense.parameters(), lr=0.001)

    def learn(self, ids: Tensor, liked: Tensor) -> None:
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(ids), liked, reduction="sum")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def export(self, folder: Path) -> None:
        """Exports the model for model servers; users and movies are in one table."""
        features = {name: Feature(slot="movies") for name in ("user", "movie")}
        exporter = ModelExporter(folder, model_name="movies", net=Served(self.model), features=features)
        exporter.export([{"movies": self.table}], global_step=0)

    @torch.no_grad()
    def auc(self, ids: Tensor, liked: Tensor) -> float:
        score = auc(self.model.eval()(ids), liked)
        self.model.train()
        return score


def into_rows(ids: Tensor, rows: int, seed: int) -> Tensor:
    """The row number that an id hashes to; which ids collide depends on the seed."""
    mixed = (ids ^ (seed * 0x9E3779B9 + 1)) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 32)) * -0x61C8864680B583EB
    return (mixed ^ (mixed >> 29)) % rows


def last_fifth(ratings: Ratings) -> Tensor:
    """True for the last fifth of each user's ratings."""
    user = ratings.ids[:, 0]
    _, which, counts = torch.unique(user, return_inverse=True, return_counts=True)
    rank = torch.empty_like(which)
    rank[torch.argsort(which, stable=True)] = torch.cat([torch.arange(n) for n in counts.tolist()])
    return rank >= counts[which] * 0.8


def collisions(ratings: Ratings, *, epochs: int, seed: int, batch: int = 64) -> dict[str, dict[str, Any]]:
    """AUC after each epoch: with a row per id, and hashed into 5, 1, 1/2 and 1/4 times the memory of these rows."""
    late = last_fifth(ratings)
    learnt, asked = torch.nonzero(~late).flatten(), torch.nonzero(late).flatten()
    results: dict[str, dict[str, Any]] = {}
    memory = 0
    for name, share in (("a row per id", 0), ("5x memory", 5), ("equal memory", 1), ("1/2", 0.5), ("1/4", 0.25)):
        rows = int(memory * share) // ROW_BYTES
        ids = into_rows(ratings.ids, rows, seed) if share else ratings.ids
        trainer, scores = Trainer(seed), []
        for _ in range(epochs):
            for part in learnt.split(batch):
                trainer.learn(ids[part], ratings.liked[part])
            scores.append(trainer.auc(ids[asked], ratings.liked[asked]))
        if not share:
            rows, memory = len(trainer.table), trainer.table.memory_bytes()
        distinct = torch.unique(ratings.ids[learnt])
        counts = torch.bincount(into_rows(distinct, rows, seed)) if share else torch.ones(1)
        shared = 1 - int((counts == 1).sum()) / len(distinct) if share else 0.0
        results[name] = {"auc": scores, "rows": rows, "bytes": rows * ROW_BYTES if share else memory, "shared": shared}
    return results


class Served(nn.Module):
    """The exported part of the model: the user's and the movie's rows in, the score out."""

    def __init__(self, model: Factorisation) -> None:
        super().__init__()
        self.dense = model.dense

    def forward(self, user: Tensor, movie: Tensor) -> dict[str, Tensor]:
        return {"score": combine(torch.stack([user, movie], 1), self.dense)}


class Replica:
    """A model server with an export, to which the trainer pushes rows and weights at an interval."""

    def __init__(self, trainer: Trainer, folder: Path, every_days: float) -> None:
        self.every_s, self.refreshed_s = every_days * DAY, float("-inf")
        files = ModelConfig(name="movies", base_path=str(folder / "exported_models"))
        models = ModelServerConfig(model_config_list=ModelConfigList(config=[files]))
        self._server = ModelServer(config=models, poll_wait_seconds=0).start()
        self._client = Client(self._server.address, model="movies")
        self._publication = publish(
            {"movies": trainer.table}, net=Served(trainer.model), targets=[self._server.address], model="movies",
            every=None,
        )  # fmt: skip

    def refresh(self, now_s: float) -> None:
        if now_s - self.refreshed_s >= self.every_s:
            self._publication.flush()
            self.refreshed_s = now_s

    def score(self, ids: Tensor) -> Tensor:
        return self._client.predict({"user": ids[:, :1], "movie": ids[:, 1:]})["score"]

    def close(self) -> None:
        self._publication.close()
        self._client.close()
        self._server.stop(0)


def freshness(
    ratings: Ratings, *, seed: int, batch: int = 32, warm_up_days: int = 30, bin_days: int = 14
) -> dict[str, dict[str, Any]]:
    """AUC of replicas by how often they are refreshed, after ``warm_up_days``."""
    trainer = Trainer(seed)
    scores: dict[str, list[Tensor]] = {name: [] for name in INTERVALS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        trainer.export(folder)
        replicas = {name: Replica(trainer, folder, days) for name, days in INTERVALS.items()}
        for replica in replicas.values():
            stack.callback(replica.close)
        for part in torch.arange(len(ratings.liked)).split(batch):
            ids = ratings.ids[part]
            for name, replica in replicas.items():
                replica.refresh(float(ratings.time_s[part[0]]))
                scores[name].append(replica.score(ids))
            trainer.learn(ids, ratings.liked[part])
    day = (ratings.time_s - ratings.time_s[0]) / DAY
    last = int((day.max() - warm_up_days) // bin_days)
    bins = [(day >= warm_up_days + k * bin_days) & (day < warm_up_days + (k + 1) * bin_days) for k in range(last)]
    results = {}
    for name, parts in scores.items():
        score = torch.cat(parts)
        results[name] = {
            "auc": auc(score[day >= warm_up_days], ratings.liked[day >= warm_up_days]),
            "by_fortnight": [auc(score[chosen], ratings.liked[chosen]) for chosen in bins],
        }
    return results


def spread(values: list[float]) -> str:
    """The mean, and half the distance from the lowest to the highest value."""
    return f"{sum(values) / len(values):.4f} ± {(max(values) - min(values)) / 2:.4f}"


def report(collided: list[dict[str, Any]], aged: list[dict[str, Any]]) -> str:
    epochs = len(collided[0]["a row per id"]["auc"])
    lines = [
        f"| table | rows | KB | ids that share | AUC, epoch 1 | AUC, epoch {epochs} |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in collided[0].items():
        first, end = ([run[name]["auc"][k] for run in collided] for k in (0, -1))
        shared = sum(run[name]["shared"] for run in collided) / len(collided)
        label = name if name == "a row per id" else f"hashed, {name}"
        size = f"{one['rows']:,} | {one['bytes'] / 1000:.0f}"
        lines.append(f"| {label} | {size} | {shared:.0%} | {spread(first)} | {spread(end)} |")
    lines += ["", "| replica refreshed | AUC, predicted before learnt |", "|---|---|"]
    lines += [f"| {name} | {spread([run[name]['auc'] for run in aged])} |" for name in aged[0]]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="ml-100k.inter, u.data, ml-100k.zip, or the recbole wheel")
    parser.add_argument("--out", type=Path, default=Path("out/movielens"), help="the folder for pictures and numbers")
    parser.add_argument("--seeds", type=int, default=5, help="runs with different initial rows and collisions")
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the dense part is too small for more; the table has its own threads
    ratings = load(args.data or obtain(args.out / "data"))
    print(f"{len(ratings.liked):,} ratings, {len(torch.unique(ratings.ids)):,} ids", flush=True)
    collided, aged = [], []
    for seed in range(args.seeds):
        collided.append(collisions(ratings, epochs=args.epochs, seed=seed))
        aged.append(freshness(ratings, seed=seed))
        print(f"seed {seed} done", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "movielens.json").write_text(json.dumps({"collisions": collided, "freshness": aged}, indent=1) + "\n")
    from movielens_plots import draw_collisions, draw_freshness  # next to this file

    draw_collisions(collided, args.out / "movielens_collisions.png")
    draw_freshness(aged, args.out / "movielens_freshness.png")
    print(report(collided, aged))
    return 0


if __name__ == "__main__":
    sys.exit(main())
