"""The live half of the demo: train online, serve from two other processes, push to one of them every second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.demo.model import DIM, Collisionless, DeepFm
from shoal.demo.run import EXPIRE_DAYS, auc
from shoal.demo.stream import FIELDS, Batch, StreamConfig, stream
from shoal.errors import PeerError

PADDING = -1
START_S, ANSWER_S = 300.0, 120.0  # nobody waits longer, and a machine that stalls is no reason to fail
LABELS = ("pushed every second", "initial export only")


@dataclass(slots=True)
class Live:
    """What the replicas came to; ``auc`` has a list of points for each of ``LABELS``."""

    samples: list[int] = field(default_factory=list)
    auc: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    mean_auc: tuple[float, float] = (float("nan"), float("nan"))
    freshness_s: list[float] = field(default_factory=list)
    pushed_rows: int = 0
    rounds: int = 0

    def report(self) -> dict[str, Any]:
        ages = sorted(self.freshness_s)
        pick = lambda share: ages[min(len(ages) - 1, int(len(ages) * share))] if ages else None  # noqa: E731
        return {
            "auc": dict(zip(LABELS, self.mean_auc, strict=True)),
            "freshness_s": {"p50": pick(0.5), "p99": pick(0.99), "max": ages[-1] if ages else None},
            "rounds": self.rounds,
            "pushed_rows": self.pushed_rows,
            "over_time": {"samples": self.samples, **dict(zip(LABELS, self.auc, strict=True))},
        }


class ServedNet(nn.Module):
    """The dense part of the model as it is exported: pooled rows of each field in, click probability out."""

    def __init__(self, model: DeepFm) -> None:
        super().__init__()
        self.deep = model.deep

    def forward(
        self, user: Tensor, item: Tensor, author: Tensor, tags: Tensor, hour: Tensor, category: Tensor
    ) -> dict[str, Tensor]:
        pooled = torch.cat([user, item, author, tags, hour, category], 1)  # the order of FIELDS
        fields = pooled.view(-1, len(FIELDS), DIM)
        linear, factors = fields[..., 0].sum(1), fields[..., 1:]
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        return {"click": torch.sigmoid(linear + pairs + self.deep(pooled).squeeze(1))}


def run_live(
    config: StreamConfig, seconds: float, progress: Callable[[str, int, int, float], None] | None = None
) -> Live:
    """Learns a third of the stream, exports, and keeps learning while two replicas answer for ``seconds``."""
    from shoal.serving.sync.handle import SyncClientHandle

    torch.manual_seed(config.seed)
    table = Collisionless(EXPIRE_DAYS, config.seed)
    handle = SyncClientHandle("demo")
    table.table.attach(handle)
    model = DeepFm(table.bag)
    dense = torch.optim.Adam(model.deep.parameters(), lr=0.001)
    batches = stream(config)
    warm_up = config.days * config.batches_per_day // 3
    for number in range(1, warm_up + 1):
        _learn(table, model, dense, next(batches))
        if progress is not None:
            progress("learning before export", number, warm_up, float("nan"))
    handle.touched.steal()
    with tempfile.TemporaryDirectory() as folder:
        _export(Path(folder), model, table)
        return _serve_and_learn(Path(folder), table, model, dense, batches, handle, seconds, progress)


def _learn(table: Collisionless, model: DeepFm, dense: torch.optim.Optimizer, batch: Batch) -> None:
    table.now_s = batch.time_s
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch.ids), batch.clicks, reduction="sum")
    dense.zero_grad()
    table.optimizer.zero_grad()
    loss.backward()
    dense.step()
    table.optimizer.step()


def _export(folder: Path, model: DeepFm, table: Collisionless) -> None:
    from shoal.serving import Feature, ModelExporter

    features = {name: Feature(slot="demo", padding=PADDING if name == "tags" else None) for name in FIELDS}
    exporter = ModelExporter(folder, model_name="demo", net=ServedNet(model), features=features)
    exporter.export([{"demo": table.table}], global_step=1)


def _padded(values: Tensor, offsets: Tensor, width: int = 3) -> Tensor:
    """``[B, width]`` of ragged ids."""
    lengths = offsets.diff()
    if int(lengths.max()) == int(lengths.min()) == 1:
        return values.unsqueeze(1)
    place = offsets[:-1].unsqueeze(1) + torch.arange(width, device="cpu")
    there = torch.arange(width, device="cpu") < lengths.unsqueeze(1)
    return torch.where(there, values[place.clamp(max=len(values) - 1)], PADDING)


class _Replica:
    """`shoal serve` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "shoal", "serve", str(folder), "--port", "0", "--threads", "1", "--json"]
        path = os.pathsep.join(each for each in sys.path if each)
        self._said = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would fill  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._said, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        self.address = ""

    def wait(self) -> None:
        """Until it serves."""
        late = threading.Timer(START_S, self._process.kill)
        late.start()
        try:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            self._process.wait(60)
            self._said.seek(0)
            raise PeerError(f"a replica of the demo did not start: {self._said.read()[-500:]}")
        self.address = json.loads(line)["grpc"]

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._said.close()


def _serve_and_learn(
    folder: Path,
    table: Collisionless,
    model: DeepFm,
    dense: Any,
    batches: Any,
    handle: Any,
    seconds: float,
    progress: Any,
) -> Live:
    from shoal.serving import SyncLoop, set_address_table
    from shoal.serving.cluster.backends import SyncBackend

    replicas = [_Replica(folder) for _ in LABELS]

    class OnlyTheFirst(SyncBackend):
        def subscribe_model(self, model_name: str) -> None: ...
        def start(self) -> None: ...
        def stop(self) -> None: ...
        def get_sync_targets(self, sub_graph: str) -> tuple[str, list[str]]:
            return "demo", [replicas[0].address]

    live, loop = Live(), None
    try:
        for replica in replicas:
            replica.wait()
        set_address_table({f"ps:{which}": [replica.address] for which, replica in enumerate(replicas)})
        loop = SyncLoop(OnlyTheFirst(), 0, handle, period_secs=1.0).start()
        scores: tuple[list[Tensor], list[Tensor]] = ([], [])
        clicks: list[Tensor] = []
        begin, told, count, seen = time.monotonic(), 0.0, 0, 0
        while (not clicks or time.monotonic() - begin < seconds) and (batch := next(batches, None)) is not None:
            inputs = {name: _padded(*batch.ids[name]) for name in FIELDS}
            for which in range(2):
                scores[which].append(_ask(which, inputs))
            clicks.append(batch.clicks)
            _learn(table, model, dense, batch)
            count += len(batch.clicks)
            if loop.rounds > seen:
                seen = loop.rounds
                if replicas[0].address in handle.freshness:
                    live.freshness_s.append(handle.freshness[replicas[0].address])
                answers = json.loads(loop.last_result or "{}").get("responses", ())
                live.pushed_rows += sum(each.get("update_num", 0) for each in answers)
            if time.monotonic() - told > 1.0:
                told = time.monotonic()
                live.samples.append(count)
                for which in range(2):
                    recent = auc(torch.cat(scores[which][-20:]), torch.cat(clicks[-20:]))
                    live.auc[which].append(recent)
                if progress is not None:
                    progress("serving, live", int(told - begin), int(seconds), live.auc[0][-1])
        truth = torch.cat(clicks)
        live.mean_auc = (auc(torch.cat(scores[0]), truth), auc(torch.cat(scores[1]), truth))
        live.rounds = loop.rounds
        return live
    finally:
        if loop is not None:
            loop.stop(final_round=False)
        set_address_table(None)
        for replica in replicas:
            replica.stop()


def _ask(which: int, inputs: dict[str, Tensor]) -> Tensor:
    """What a replica predicts; one that is too busy for a new connection is asked again."""
    from shoal.serving import remote_predict
    from shoal.serving.status import Code, StatusError

    until = time.monotonic() + ANSWER_S
    while True:
        left_ms = max(1.0, (until - time.monotonic()) * 1000)
        try:
            return remote_predict(
                list(inputs), list(inputs.values()), ["click"], "demo", which, None, max_rpc_deadline_millis=left_ms
            )[0]
        except StatusError as error:
            if error.code != Code.UNAVAILABLE or time.monotonic() > until:
                raise
        time.sleep(0.2)


def draw_live(live: Live, path: Path) -> None:
    """AUC of both replicas over time, and how old rows were when they became servable."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), gridspec_kw={"width_ratios": [2, 1]})
    for label, values, color in zip(LABELS, live.auc, ("#0b6bcb", "#9aa5b1"), strict=True):
        left.plot([count / 1000 for count in live.samples], values, label=label, color=color, linewidth=2)
    left.set_xlabel("thousand samples since the export")
    left.set_ylabel("AUC of the last 20 batches")
    left.set_title("Two replicas of one export")
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
