"""`Learner`: the model, its rows and their optimizers on one rank; makes predictions and learns from samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from shoal.comm.launch.config import DistributedConfig
from shoal.comm.ranks.ranks import Ranks
from shoal.data.samples import Samples
from shoal.errors import ConfigError, DataError
from shoal.host import require_bfloat16
from shoal.models.build import build_model
from shoal.models.inputs import Inputs
from shoal.nn.optimizer import SparseOptimizer
from shoal.train.aggregation.all_reduce import AllReduceAggregator
from shoal.train.aggregation.buckets import GradientBucket
from shoal.train.dense_optimizers import OPTIMIZERS
from shoal.train.loop.config import Config
from shoal.train.loop.machine import find_device, find_table_device
from shoal.train.loop.measure.metrics import Metrics
from shoal.train.loop.rows.rows import Rows
from shoal.train.loop.rows.servers import ServerRows
from shoal.train.loop.schedule import factor


class Learner:
    """The model and rows that a run trains. All ranks must call `learn`, `step` and `rows` together."""

    def __init__(self, config: Config, ranks: Ranks, note: Callable[[str], None]) -> None:
        self.config, self.ranks = config, ranks
        train = config.train
        self.device = find_device(train.device)
        if train.amp == "bf16" and self.device.type == "cpu":
            require_bfloat16('[train] amp = "bf16"')
        table_device = find_table_device(config, self.device)
        if table_device != "cpu" and self.device.type == "cpu":
            note('rows are on the GPU, but the dense part is on the CPU; set [train] device = "cuda" to avoid copies')
        torch.manual_seed(train.seed)
        self.model = build_model(config.model.name, inputs_of(config), config.model.options).to(self.device)
        fused = self.device.type == "cpu" or train.optimizer != "adagrad"  # torch's Adagrad has no fused step on GPUs
        self.optimizer = OPTIMIZERS[train.optimizer](self.model.parameters(), lr=train.lr, fused=fused)
        own = (train.seed * 1_000_003 + ranks.rank) & ((1 << 63) - 1)  # for dropout, which differs between ranks
        torch.manual_seed(own)
        rows = ServerRows if train.ps else Rows
        self.rows = rows(config, ranks, table_device, note).to(self.device)
        self.bucket = GradientBucket(self.model.parameters(), numbers=8)
        among = DistributedConfig(ranks.world_size, ranks.rank)
        self._aggregator = AllReduceAggregator(among, ranks, average=False, check="first")
        self.metrics = Metrics(config.out.auc_window)
        self._scale = 1.0 / (train.batch_size * train.accumulate * ranks.world_size)
        self._row_optimizer = SparseOptimizer(self.rows) if train.defers and self.rows.features else None

    def logits(self, samples: Samples) -> Tensor:
        """The model's logits for ``samples``, ``[B]``."""
        least, most = samples.label.aminmax()
        if least < 0 or most > 1:
            got = float(least if least < 0 else most)
            label = self.config.data.schema().label
            raise ConfigError(
                f"[data] label {label!r}: labels must be between 0 and 1, got {got:g}; set positive_above = T to make "
                "labels above T 1 and the others 0"
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
        """Compute the dense gradients and update rows; return the loss (NaN without samples) and the sample count."""
        self.bucket.zero()
        losses, count = [], 0
        for samples in parts:
            losses.append(self._learn_part(samples, step))
            count += 0 if samples is None else len(samples)
        return sum(loss for loss in losses if not math.isnan(loss)) if count else math.nan, count

    def _learn_part(self, samples: Samples | None, step: int) -> float:
        if not samples:
            self.rows.join_without_samples(learn=True, samples=samples)
            return math.nan
        logits = self.logits(samples)
        label = samples.label.to(self.device)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label, reduction="sum") * self._scale
        if self.device.type == "cpu":
            _check_finite(loss, step)
            loss.backward()
        else:  # checked after backward was queued; GPU tables reject non-finite gradients themselves
            loss.backward()
            _check_finite(loss, step)
        self.metrics.add(logits.detach().cpu().numpy(), samples.label.numpy())
        return loss.item()

    def step(self, numbers: tuple[float, ...], step: int) -> list[float]:
        """Sum gradients and eight numbers over all ranks; return the sums. Update the dense part if the first is > 0.

        Rows that were not updated in backward are updated here as well. ``step`` counts from 0.
        """
        if self.ranks.world_size > 1:
            self.bucket.numbers.copy_(torch.tensor(numbers, device="cpu"))
            (total,) = self._aggregator.aggregate([self.bucket.flat])
            self.bucket.flat.copy_(total)
        summed = list(numbers) if self.ranks.world_size == 1 else self.bucket.numbers.tolist()
        if summed[0]:  # 0 at the end of an epoch, when no rank had samples
            self._set_rates(step)
            self.optimizer.step()
            self._update_rows()
        elif self._row_optimizer is not None:
            self._row_optimizer.zero_grad()
        return summed

    def _set_rates(self, step: int) -> None:
        train = self.config.train
        if train.scheduled:
            share = factor(train, step)
            for group in self.optimizer.param_groups:
                group["lr"] = train.lr * share
            for group in self._row_optimizer.param_groups if self._row_optimizer is not None else ():
                group["lr"] = group["base_lr"] * share

    def _update_rows(self) -> None:
        """Update the rows whose gradients were deferred to this step."""
        if self._row_optimizer is not None:
            number = max(self.rows.steps().values())
            self._row_optimizer.step(number)
            self.rows.set_steps(dict.fromkeys(self.rows.tables, number + 1))


def _check_finite(loss: Tensor, step: int) -> None:
    if not math.isfinite(loss.item()):
        raise DataError(
            f"step {step}: the loss must be finite, got {loss.item()}; lower [table] lr or [train] lr, or check the "
            "dense columns for huge numbers (log_dense = true takes their logarithm)"
        )


def inputs_of(config: Config) -> Inputs:
    """The description of a configuration's inputs, for building its model."""
    schema = config.data.schema()
    dims = {feature: one.config.dim for one in config.tables() for feature in one.features}
    return Inputs(
        dense=schema.dense, sparse=schema.sparse, dim=config.table.dim,
        dims=tuple(dims[name] for name in schema.sparse),
        lengths=tuple(config.table.of_feature(name).length for name in schema.sparse),
    )  # fmt: skip
