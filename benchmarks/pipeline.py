"""`shoal.train.Pipeline` against the same loop without it.

    python -m benchmarks.pipeline [--only reader,gpu] [--repeats 5] [--json FILE]

* ``reader``: the reader waits as long as a step computes, like a reader of a remote store. A plain loop takes the sum
  of both times, a pipeline the longer one. Rows and weights must be equal afterwards.
* ``gpu``: the same with rows and the dense part on a GPU; and a reader that does not wait, with large batches that must
  be copied to the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.harness import Report, interleaved, median, parser
from shoal.nn import HashEmbeddingBag
from shoal.train import Pipeline

STEPS, BAGS, DIM, IDS = 20, 26, 16, 100_000
SIZES = {"cpu": (2048, 256), "cuda": (16_384, 2048)}  # samples and width of the net, for a step of a few milliseconds


class Clicks(nn.Module):
    """A model with a bag of 26 ids per sample, dense numbers, and a net above them."""

    def __init__(self, device: str, numbers: int, width: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": "cuda", "deterministic": True} if device == "cuda" else {}
        self.bag = HashEmbeddingBag(shoal.HashTable(DIM, optimizer="adagrad", seed=1, **options))
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(DIM + numbers, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        ).to(device)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = torch.cat([self.bag(batch["ids"]), batch["numbers"]], 1)
        return nn.functional.binary_cross_entropy_with_logits(self.net(rows).squeeze(-1), batch["label"])


def batches(steps: int, size: int, numbers: int = 13) -> list[dict[str, torch.Tensor]]:
    made = []
    for number in range(steps):
        g = torch.Generator().manual_seed(number)
        made.append(
            {
                "ids": torch.randint(IDS, (size, BAGS), generator=g),
                "numbers": torch.rand(size, numbers, generator=g),
                "label": torch.rand(size, generator=g).round(),
            }
        )
    return made


class Loop:
    """A model and its training loop; each call trains it further."""

    def __init__(
        self, device: str, data: list[dict[str, torch.Tensor]], width: int, *, piped: bool = False, staleness: int = 0
    ) -> None:
        self.device, self.data, self.wait_s = device, data, 0.0
        self.model = Clicks(device, data[0]["numbers"].shape[1], width)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.pipeline = Pipeline(self.model, self.optimizer, device, staleness=staleness) if piped else None

    def read(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self.data:
            if self.wait_s:
                time.sleep(self.wait_s)
            yield batch

    def __call__(self) -> None:
        if self.pipeline is not None:
            for _ in self.pipeline(self.read()):
                pass
        else:
            for batch in self.read():
                moved = {name: one.to(self.device) for name, one in batch.items()}
                self.optimizer.zero_grad()
                self.model(moved).backward()
                self.optimizer.step()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def state(self) -> list[torch.Tensor]:
        ids = torch.arange(0, IDS, 7, device=self.device)
        return [self.model.bag.table.lookup(ids), *self.model.parameters()]


def loops(device: str, data: list[dict[str, torch.Tensor]], width: int) -> tuple[Loop, Loop, Loop]:
    """Loops without a pipeline, with an exact one, and with one that has a staleness of 1."""
    return (
        Loop(device, data, width),
        Loop(device, data, width, piped=True),
        Loop(device, data, width, piped=True, staleness=1),
    )


def seconds_of(call: Callable[[], None], steps: int) -> float:
    call()
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) / steps


def slow_reader(report: Report, device: str, repeats: int) -> None:
    """Compares the loops with a reader that waits as long as a step takes."""
    size, width = SIZES[device]
    data = batches(STEPS, size)
    step_s = seconds_of(Loop(device, data, width), STEPS)
    plain, exact, stale = loops(device, data, width)
    for loop in (plain, exact, stale):
        loop.wait_s = step_s
    times = [median(one) / STEPS for one in interleaved([plain, exact, stale], repeats)]
    same = all(map(torch.equal, plain.state(), exact.state()))
    where = "rows and net on the GPU" if device == "cuda" else "CPU"
    what = f"reader waits {step_s * 1e3:.1f} ms per step, {where}"
    for name, taken, goal in (("staleness 0", times[1], 1.6), ("staleness 1", times[2], None)):
        ratio = times[0] / taken
        report.add(f"{what}, {name}", f"{taken * 1e3:.2f} ms", f"{times[0] * 1e3:.2f} ms", ratio, goal)
    report.add("results at staleness 0 equal to the last bit", "yes" if same else "NO", ratio=float(same), goal=1)


def large_batches(report: Report, repeats: int) -> None:
    """Compares the loops with batches whose copy to the device, from memory that is not pinned, takes long."""
    data = batches(STEPS, 16_384, 256)
    plain, exact, stale = loops("cuda", data, 256)
    times = [median(one) / STEPS for one in interleaved([plain, exact, stale], repeats)]
    size = sum(one.numel() * one.element_size() for one in data[0].values()) / 2**20
    for name, taken in (("staleness 0", times[1]), ("staleness 1", times[2])):
        report.add(
            f"{size:.0f} MiB per batch copied to the GPU, {name}", f"{taken * 1e3:.2f} ms", f"{times[0] * 1e3:.2f} ms",
            times[0] / taken,
        )  # fmt: skip
    same = all(map(torch.equal, plain.state(), exact.state()))
    report.add("results at staleness 0 equal to the last bit", "yes" if same else "NO", ratio=float(same), goal=1)


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--only", default="reader,gpu", help="parts to run, separated by commas")
    given = flags.parse_args()
    report = Report("pipeline (ours: with, rival: without)")
    report.start()
    if "reader" in given.only:
        slow_reader(report, "cpu", given.repeats)
    if "gpu" in given.only and torch.cuda.is_available():
        slow_reader(report, "cuda", given.repeats)
        large_batches(report, given.repeats)
    report.save(given.json)


if __name__ == "__main__":
    main()
