"""The live half of the demo: train while two other processes serve the model, and update one of them every second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.demo.model import Collisionless, DeepFm, logits_of
from shoal.demo.run import EXPIRE_DAYS, auc
from shoal.demo.stream import FIELDS, Batch, StreamConfig, stream
from shoal.errors import PeerError

PADDING = -1
START_S, ANSWER_S = 300.0, 120.0  # long enough for a machine that stalls
LABELS = ("fed by the trainer every second", "a new export every day")


@dataclass(slots=True)
class Live:
    """The results of the replicas; ``auc`` has a list of points for each of ``LABELS``."""

    samples: list[int] = field(default_factory=list)
    auc: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    mean_auc: tuple[float, float] = (float("nan"), float("nan"))
    freshness_s: list[float] = field(default_factory=list)
    rounds: int = 0

    def report(self) -> dict[str, Any]:
        ages = sorted(self.freshness_s)
        pick = lambda share: ages[min(len(ages) - 1, int(len(ages) * share))] if ages else None  # noqa: E731
        return {
            "auc": dict(zip(LABELS, self.mean_auc, strict=True)),
            "freshness_s": {"p50": pick(0.5), "p99": pick(0.99), "max": ages[-1] if ages else None},
            "rounds": self.rounds,
            "over_time": {"samples": self.samples, **dict(zip(LABELS, self.auc, strict=True))},
        }


class ServedNet(nn.Module):
    """The exported dense part of the model: takes the pooled rows of each field, returns the click probability."""

    def __init__(self, model: DeepFm) -> None:
        super().__init__()
        self.deep = model.deep

    def forward(
        self, user: Tensor, item: Tensor, author: Tensor, tags: Tensor, hour: Tensor, category: Tensor
    ) -> dict[str, Tensor]:
        pooled = torch.cat([user, item, author, tags, hour, category], 1)  # the order of FIELDS
        return {"click": torch.sigmoid(logits_of(pooled, self.deep))}


def run_live(
    config: StreamConfig, seconds: float, progress: Callable[[str, int, int, float], None] | None = None
) -> Live:
    """Train on a third of the stream, export, and continue to train for ``seconds`` while two replicas predict."""
    torch.manual_seed(config.seed)
    table = Collisionless(EXPIRE_DAYS, config.seed)
    model = DeepFm(table.bag)
    dense = torch.optim.Adam(model.deep.parameters(), lr=0.001)
    batches = stream(config)
    warm_up = config.days * config.batches_per_day // 3
    for number in range(1, warm_up + 1):
        _learn(table, model, dense, next(batches))
        if progress is not None:
            progress("training before export", number, warm_up, float("nan"))
    with tempfile.TemporaryDirectory() as folder:
        trained = _Trained(table, model, dense, Path(folder))
        return _serve_and_learn(trained, batches, config.batches_per_day, seconds, progress)


def _learn(table: Collisionless, model: DeepFm, dense: torch.optim.Optimizer, batch: Batch) -> None:
    table.now_s = batch.time_s
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch.ids), batch.clicks, reduction="sum")
    dense.zero_grad()
    table.optimizer.zero_grad()
    loss.backward()
    dense.step()
    table.optimizer.step()


class _Trained:
    """The model under training, and the folders that its replicas load exports from."""

    def __init__(self, table: Collisionless, model: DeepFm, dense: torch.optim.Optimizer, folder: Path) -> None:
        from shoal.serving import Feature, ModelExporter

        self.table, self.dense, self.model, self.net = table, dense, model, ServedNet(model)
        self.folders = folder / "live", folder / "daily"
        features = {name: Feature(slot="demo", padding=PADDING if name == "tags" else None) for name in FIELDS}
        self._exporters = [
            ModelExporter(each, model_name="demo", net=self.net, features=features) for each in self.folders
        ]

    def export(self, which: int, day: int) -> None:
        self._exporters[which].export([{"demo": self.table.table}], global_step=day)


def _padded(values: Tensor, offsets: Tensor, width: int = 3) -> Tensor:
    """Ragged ids as ``[B, width]``, padded; ``[B, 1]`` if each sample has one id."""
    lengths = offsets.diff()
    if int(lengths.max()) == int(lengths.min()) == 1:
        return values.unsqueeze(1)
    place = offsets[:-1].unsqueeze(1) + torch.arange(width, device="cpu")
    there = torch.arange(width, device="cpu") < lengths.unsqueeze(1)
    return torch.where(there, values[place.clamp(max=len(values) - 1)], PADDING)


class _Replica:
    """`shoal serve` in another process."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "shoal", "serve", str(folder), "--port", "0", "--threads", "1", "--json"]
        path = os.pathsep.join(each for each in sys.path if each)
        self._errors = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would fill  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._errors, text=True, env={**os.environ, "PYTHONPATH": path}
        )

    def wait(self) -> str:
        """Wait until it serves; return its address."""
        late = threading.Timer(START_S, self._process.kill)
        late.start()
        try:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            self._process.wait(60)
            self._errors.seek(0)
            raise PeerError(f"a replica of the demo did not start: {self._errors.read()[-500:]}")
        return json.loads(line)["grpc"]

    def __enter__(self) -> _Replica:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._errors.close()


def _serve_and_learn(
    trained: _Trained,
    batches: Iterator[Batch],
    batches_per_day: int,
    seconds: float,
    progress: Callable[[str, int, int, float], None] | None,
) -> Live:
    from shoal.serving import Client, publish

    for which in range(2):
        trained.export(which, 1)
    with ExitStack() as stack:
        replicas = [stack.enter_context(_Replica(folder)) for folder in trained.folders]
        addresses = [replica.wait() for replica in replicas]
        clients = [stack.enter_context(Client(address, model="demo")) for address in addresses]
        publication = stack.enter_context(
            publish({"demo": trained.table.table}, net=trained.net, targets=addresses[:1], model="demo", every=None)
        )
        live, scores, clicks = Live(), ([], []), []
        begin, reported_at, count, day, sent = time.monotonic(), 0.0, 0, 1, 0
        while (not clicks or time.monotonic() - begin < seconds) and (batch := next(batches, None)) is not None:
            inputs = {name: _padded(*batch.ids[name]) for name in FIELDS}
            for which, client in enumerate(clients):
                scores[which].append(client.predict(inputs, deadline=ANSWER_S)["click"])
            clicks.append(batch.clicks)
            _learn(trained.table, trained.model, trained.dense, batch)
            count += len(batch.clicks)
            if len(clicks) % batches_per_day == 0:
                day += 1
                trained.export(1, day)
            status = publication.status()[0]
            if status.rounds > sent and (age := status.targets[0].freshness) is not None:
                sent = status.rounds
                live.freshness_s.append(age)
            if time.monotonic() - reported_at > 1.0:
                reported_at = time.monotonic()
                publication.round()  # between two steps, so that rows and weights are of the same step
                live.samples.append(count)
                for which in range(2):
                    live.auc[which].append(auc(torch.cat(scores[which][-20:]), torch.cat(clicks[-20:])))
                if progress is not None:
                    progress("serving, live", int(reported_at - begin), int(seconds), live.auc[0][-1])
        truth = torch.cat(clicks)
        live.mean_auc = (auc(torch.cat(scores[0]), truth), auc(torch.cat(scores[1]), truth))
        live.rounds = publication.status()[0].rounds
        return live


def draw_live(live: Live, path: Path) -> None:
    """Plot the AUC of both replicas over time, and the seconds from gradient to replica, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), gridspec_kw={"width_ratios": [2, 1]})
    for label, values, color in zip(LABELS, live.auc, ("#0b6bcb", "#9aa5b1"), strict=True):
        left.plot([count / 1000 for count in live.samples], values, label=label, color=color, linewidth=2)
    left.set_xlabel("thousand samples since the first export")
    left.set_ylabel("AUC of the last 20 batches")
    left.set_title("Two replicas of one model")
    left.legend(frameon=False)
    rounds = range(1, len(live.freshness_s) + 1)
    right.plot(rounds, live.freshness_s, "o", color="#0b6bcb")
    right.set_ylim(0, max([1.0, *live.freshness_s]) * 1.2)
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_xlabel("round of pushes")
    right.set_title("Seconds from gradient to replica")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
