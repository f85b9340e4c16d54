"""A complete training run on Criteo-like files: `shoal train`'s own loop against the same model on other embeddings.

    python -m benchmarks.train
    python -m benchmarks.train --lines 400000 --hidden 256 128 --json out.json

The model is a DeepFM on 13 counts and 26 categories, with rows of 16 and batches of 4,096. All contestants read the
same lines in the same order with the same reader, and have the same dense part, seed, optimizer, initial scale, rate
and metrics; only the embeddings differ:

- ours: `shoal.HashTable`, one row per category, created when it is first seen;
- `nn.EmbeddingBag(sparse=True)`, one bag per feature as in DLRM's reference code, or one for all features, with
  `torch.optim.Adagrad` or `SparseAdam`; ids hashed into twice as many rows as there are categories;
- TorchRec's fused `EmbeddingBagCollection` (FBGEMM's kernels) with its Adagrad, with ids hashed in the same way.

They take turns in several rounds, each in a separate process over all lines. The rate is the median over stretches of
20 steps in the last two thirds of a run, when tables are warm; AUC is that of all predictions, each made before its
sample was learnt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import machine, touch_memory
from shoal.data import CRITEO, CriteoLike, Samples, Stream, make_format, write_criteo
from shoal.data.generate import _CARDINALITY
from shoal.models import DeepFm, Inputs
from shoal.trainer import Metrics

DIM, BATCH, STRETCH, SCALE, LR, DENSE_LR, SHUFFLE = 16, 4096, 20, 0.01, 0.02, 0.001, 65536
SIGNATURE = (1 << 48) - 1
INPUTS = Inputs(dense=CRITEO.dense, sparse=CRITEO.sparse, dim=DIM)


def ours(path: str, hidden: list[int], optimizer: str) -> dict[str, Any]:
    """Runs `shoal train` in a separate process."""
    settings = {
        "table.lr": LR, "table.init_scale": SCALE, "table.optimizer": optimizer, "model.hidden": hidden,
        "data.shuffle_rows": SHUFFLE,
    }  # fmt: skip
    flags = ["--train", path, "--dim", DIM, "--batch-size", BATCH, "--lr", DENSE_LR, "--log-steps", STRETCH, "--json"]
    command = [sys.executable, "-m", "shoal", "train", *map(str, flags), "--set"]
    command += [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    rates = [event["samples_per_s"] for event in events if event["event"] == "progress"]
    return {"rates": rates, "auc": events[-1]["auc"], "rows": events[-1]["rows"]}


def apart(name: str, path: str, hidden: list[int], factor: int) -> dict[str, Any]:
    """Runs a rival in a separate process."""
    command = [sys.executable, "-m", "benchmarks.train", "--one", name, "--data", path]
    command += ["--factor", str(factor), "--hidden", *map(str, hidden)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def rival(path: str, hidden: list[int], factor: int, make: Callable[[list[int]], tuple[Any, Any]]) -> dict[str, Any]:
    """The same loop by hand; ``make`` returns ``ids [B, F] -> rows [B, F, D]`` and its optimizer, if any."""
    torch.manual_seed(0)
    model = DeepFm(INPUTS, hidden=hidden)
    dense = torch.optim.Adam(model.parameters(), lr=DENSE_LR, fused=True)
    sizes = [factor * max(3, n) for n in _CARDINALITY]
    embed, sparse = make(sizes)
    stream = Stream([path], make_format("criteo", CRITEO, threads=True), CRITEO, batch_size=BATCH,
                    shuffle_rows=SHUFFLE)  # fmt: skip
    metrics, rates, mark, done = Metrics(), [], time.perf_counter(), 0
    for number, batch in enumerate(stream, start=1):
        samples: Samples = batch.samples
        logits = model(samples.dense, embed(samples.ids))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, samples.label, reduction="sum") / BATCH
        dense.zero_grad()
        if sparse is not None:
            sparse.zero_grad()
        loss.backward()
        dense.step()
        if sparse is not None:
            sparse.step()
        metrics.add(logits.detach().numpy(), samples.label.numpy())
        done += len(samples)
        if number % STRETCH == 0:
            metrics.values()
            now = time.perf_counter()
            rates.append(done / (now - mark))
            mark, done = time.perf_counter(), 0
    return {"rates": rates, "auc": metrics.auc(), "rows": sum(sizes)}


def bag_per_feature(optimizer: str) -> Callable[[list[int]], tuple[Any, Any]]:
    def make(sizes: list[int]) -> tuple[Any, Any]:
        bags = nn.ModuleList(nn.EmbeddingBag(n, DIM, mode="sum", sparse=True, include_last_offset=True) for n in sizes)
        modulo = torch.tensor(sizes)
        offsets = torch.arange(BATCH + 1)

        def embed(ids: Tensor) -> Tensor:
            columns = ((ids & SIGNATURE) % modulo).t().contiguous()
            at = offsets[: len(ids) + 1]
            return torch.stack([bag(column, at) for bag, column in zip(bags, columns, strict=True)], 1)

        return embed, sparse_optimizer(bags, optimizer)

    return make


def one_bag(optimizer: str) -> Callable[[list[int]], tuple[Any, Any]]:
    def make(sizes: list[int]) -> tuple[Any, Any]:
        bag = nn.EmbeddingBag(sum(sizes), DIM, mode="sum", sparse=True, include_last_offset=True)
        modulo, begins = torch.tensor(sizes), torch.tensor([0, *sizes[:-1]]).cumsum(0)
        offsets = torch.arange(BATCH * len(sizes) + 1)

        def embed(ids: Tensor) -> Tensor:
            rows = bag(((ids & SIGNATURE) % modulo + begins).view(-1), offsets[: ids.numel() + 1])
            return rows.view(*ids.shape, DIM)

        return embed, sparse_optimizer(bag, optimizer)

    return make


def sparse_optimizer(module: nn.Module, optimizer: str) -> torch.optim.Optimizer:
    with torch.no_grad():
        for weight in module.parameters():
            weight.uniform_(-SCALE, SCALE)
    if optimizer == "adam":
        return torch.optim.SparseAdam(module.parameters(), lr=LR)
    return torch.optim.Adagrad(module.parameters(), lr=LR)


def torchrec_fused(sizes: list[int]) -> tuple[Any, Any]:
    import torchrec
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    names = list(CRITEO.sparse)
    tables = [
        torchrec.EmbeddingBagConfig(
            name=name, embedding_dim=DIM, num_embeddings=n, feature_names=[name],
            init_fn=lambda weight: weight.uniform_(-SCALE, SCALE),
        )
        for name, n in zip(names, sizes, strict=True)
    ]  # fmt: skip
    collection = FusedEmbeddingBagCollection(
        tables=tables, optimizer_type=torch.optim.Adagrad, optimizer_kwargs={"lr": LR}, device=torch.device("cpu")
    )
    modulo = torch.tensor(sizes)
    lengths = torch.ones(BATCH * len(sizes), dtype=torch.int32)

    def embed(ids: Tensor) -> Tensor:
        values = ((ids & SIGNATURE) % modulo).t().reshape(-1)
        keyed = torchrec.KeyedJaggedTensor.from_lengths_sync(names, values, lengths[: ids.numel()])
        return collection(keyed).values().view(*ids.shape, DIM)

    return embed, None


RIVALS: dict[str, Callable[[list[int]], tuple[Any, Any]]] = {
    "EmbeddingBag x 26, Adagrad": bag_per_feature("adagrad"),
    "EmbeddingBag x 1, Adagrad": one_bag("adagrad"),
    "EmbeddingBag x 26, SparseAdam": bag_per_feature("adam"),
    "EmbeddingBag x 1, SparseAdam": one_bag("adam"),
    "TorchRec + FBGEMM, Adagrad": torchrec_fused,
}


def import_seconds(name: str) -> float:
    """Seconds of ``import name`` in a fresh interpreter, the fastest of five."""
    code = f"import time; t = time.perf_counter(); import {name}; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return min(float(run.stdout) for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=600_000)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 32])
    parser.add_argument("--factor", type=int, default=2, help="rows of the rivals per category; more reduce collisions")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", help="names of contestants, or their beginnings")
    parser.add_argument("--data", help="a file for the generated lines; reused if it exists")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    hidden = options.hidden
    if options.one:
        print(json.dumps(rival(options.data, hidden, options.factor, RIVALS[options.one])))
        return
    contestants: dict[str, Callable[[str], dict[str, Any]]] = {
        "shoal train, adagrad": lambda path: ours(path, hidden, "adagrad"),
        "shoal train, adam": lambda path: ours(path, hidden, "adam"),
    }
    contestants |= {name: lambda path, n=name: apart(n, path, hidden, options.factor) for name in RIVALS}
    if options.only:
        contestants = {n: c for n, c in contestants.items() if any(n.startswith(only) for only in options.only)}
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    imports = {name: import_seconds(name) for name in ("torch", "shoal")}
    print(f"import torch {imports['torch']:.2f} s, import shoal {imports['shoal'] * 1e3:.0f} ms")
    print(f"DeepFM {hidden}, {options.lines:,} lines, batches of {BATCH:,}, {options.rounds} rounds\n")
    touch_memory(1.0)
    results: dict[str, Any] = {name: {"rates": [], "auc": []} for name in contestants}
    with tempfile.TemporaryDirectory() as folder:
        path = options.data or os.path.join(folder, "criteo.tsv")
        if not os.path.exists(path):
            write_criteo(path, CriteoLike(rows=options.lines))
        for round_ in range(options.rounds):
            names = list(contestants) if round_ % 2 == 0 else list(reversed(contestants))
            for name in names:
                one = contestants[name](path)
                results[name]["rates"] += one["rates"][len(one["rates"]) // 3 :]
                results[name]["auc"].append(one["auc"])
                results[name]["rows"] = one["rows"]
    print(f"{'':30} {'samples/s':>10} {'best':>10} {'AUC':>8} {'rows':>10} {'ours / it':>10}")
    for name, one in results.items():
        one["rate"], one["best"] = statistics.median(one["rates"]), max(one["rates"])
        one["auc"] = statistics.mean(one["auc"])
        mine = results.get("shoal train, adam" if name.endswith("Adam") else "shoal train, adagrad", {}).get("rates")
        one["ratio"] = statistics.median(mine) / one["rate"] if mine else float("nan")
        ratio = f"{one['ratio']:9.2f}x" if not name.startswith("shoal") else ""
        print(f"{name:30} {one['rate']:10,.0f} {one['best']:10,.0f} {one['auc']:8.4f} {one['rows']:10,} {ratio:>10}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": about, "imports": imports, "hidden": hidden, "results": results}, file, indent=2)


if __name__ == "__main__":
    main()
