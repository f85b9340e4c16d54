"""`Learner`: the model, its rows and their optimizers on one rank; it predicts samples and learns from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from shoal.comm.launch.config import DistributedConfig
from shoal.comm.ranks.ranks import Ranks
from shoal.data.samples import Samples
from shoal.errors import ConfigError, DataError
from shoal.models.build import build_model
from shoal.models.inputs import Inputs
from shoal.nn.optimizer import SparseOptimizer
from shoal.train.aggregation.all_reduce import AllReduceAggregator
from shoal.train.aggregation.buckets import GradientBucket
from shoal.train.dense_optimizers import OPTIMIZERS
from shoal.train.loop.config import Config
from shoal.train.loop.machine import find_device, find_table_device
from shoal.train.loop.measure.metrics import Metrics
from shoal.train.loop.schedule import factor
from shoal.train.loop.tables import Rows


class Learner:
    """What is trained. All ranks call `learn`, `step` and `rows` together."""

    def __init__(self, config: Config, ranks: Ranks, note: Callable[[str], None]) -> None:
        self.config, self.ranks = config, ranks
        train = config.train
        self.device = find_device(train.device)
        table_device = find_table_device(config, self.device)
        if table_device != "cpu" and self.device.type == "cpu":
            note(
                'the rows are on the GPU and the dense part is on the CPU; [train] device = "cuda" brings them together'
            )
        torch.manual_seed(train.seed)
        self.model = build_model(config.model.name, inputs_of(config), config.model.options).to(self.device)
        fused = self.device.type == "cpu" or train.optimizer != "adagrad"  # torch's Adagrad has no fused step on GPUs
        self.optimizer = OPTIMIZERS[train.optimizer](self.model.parameters(), lr=train.lr, fused=fused)
        own = (train.seed * 1_000_003 + ranks.rank) & ((1 << 63) - 1)  # for dropout, which differs between ranks
        torch.manual_seed(own)
        self.rows = Rows(config, ranks, table_device, note).to(self.device)
        self.bucket = GradientBucket(self.model.parameters(), numbers=8)
        among = DistributedConfig(ranks.world_size, ranks.rank)
        self._aggregator = AllReduceAggregator(among, ranks, average=False, check="first")
        self.metrics = Metrics(config.out.auc_window)
        self._scale = 1.0 / (train.batch_size * train.accumulate * ranks.world_size)
        self._waiting = SparseOptimizer(self.rows) if train.defers and self.rows.features else None

    def logits(self, samples: Samples) -> Tensor:
        """``[B]``."""
        least, most = samples.label.aminmax()
        if least < 0 or most > 1:
            got = float(least if least < 0 else most)
            label = self.config.data.schema().label
            raise ConfigError(
                f"[data] label {label!r}: labels must be between 0 and 1, got {got:g}; with positive_above = T "
                "those above T are 1 and the others 0"
            )
        dense, rows = samples.dense.to(self.device), self.rows(samples)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.train.amp == "bf16"):
            logits = self.model(dense, rows).float()
        if logits.shape != (len(samples),):
            raise ConfigError(
                f"model {self.config.model.name!r}: forward must return logits of shape [{len(samples)}], "
                f"got {list(logits.shape)}"
            )
        return logits

    def learn(self, parts: Iterable[Samples | None], step: int) -> tuple[float, int]:
        """Computes the dense gradients and updates rows. Returns the loss, NaN without samples, and how many came."""
        self.bucket.zero()
        losses, count = [], 0
        for samples in parts:
            losses.append(self._learn_part(samples, step))
            count += 0 if samples is None else len(samples)
        return sum(loss for loss in losses if not math.isnan(loss)) if count else math.nan, count

    def _learn_part(self, samples: Samples | None, step: int) -> float:
        if not samples:
            self.rows.nothing(learn=True, samples=samples)
            return math.nan
        logits = self.logits(samples)
        label = samples.label.to(self.device)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label, reduction="sum") * self._scale
        if self.device.type == "cpu":
            _check_finite(loss, step)
            loss.backward()
        else:  # which computes meanwhile; its tables refuse gradients that are not finite
            loss.backward()
            _check_finite(loss, step)
        self.metrics.add(logits.detach().cpu().numpy(), samples.label.numpy())
        return loss.item()

    def step(self, numbers: tuple[float, ...], step: int) -> list[float]:
        """Sums gradients and eight numbers over all ranks; updates the dense part if the first number is above 0.

        Rows that were not updated in backward are updated here, too. ``step`` counts from 0.
        """
        if self.ranks.world_size > 1:
            self.bucket.numbers.copy_(torch.tensor(numbers, device="cpu"))
            (total,) = self._aggregator.aggregate([self.bucket.flat])
            self.bucket.flat.copy_(total)
        summed = list(numbers) if self.ranks.world_size == 1 else self.bucket.numbers.tolist()
        if summed[0]:  # else it was the end of an epoch, and nobody learnt anything
            self._set_rates(step)
            self.optimizer.step()
            self._update_rows()
        elif self._waiting is not None:
            self._waiting.zero_grad()
        return summed

    def _set_rates(self, step: int) -> None:
        train = self.config.train
        if train.scheduled:
            share = factor(train, step)
            for group in self.optimizer.param_groups:
                group["lr"] = train.lr * share
            for group in self._waiting.param_groups if self._waiting is not None else ():
                group["lr"] = group["base_lr"] * share

    def _update_rows(self) -> None:
        """Updates the rows whose gradients were held back for this step."""
        if self._waiting is not None:
            number = max(self.rows.steps().values())
            self._waiting.step(number)
            self.rows.set_steps(dict.fromkeys(self.rows.tables, number + 1))


def _check_finite(loss: Tensor, step: int) -> None:
    if not math.isfinite(loss.item()):
        raise DataError(
            f"step {step}: the loss is {loss.item()}; lower [table] lr or [train] lr, or look for huge numbers in the "
            "dense columns (log_dense = true makes them small)"
        )


def inputs_of(config: Config) -> Inputs:
    """What a configuration's model is told."""
    schema = config.data.schema()
    dims = {feature: one.config.dim for one in config.tables() for feature in one.features}
    return Inputs(
        dense=schema.dense, sparse=schema.sparse, dim=config.table.dim,
        dims=tuple(dims[name] for name in schema.sparse),
        lengths=tuple(config.table.of_feature(name).length for name in schema.sparse),
    )  # fmt: skip
