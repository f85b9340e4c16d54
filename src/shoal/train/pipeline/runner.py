"""Run a list of layers as pipeline stages that process micro-batches in a schedule's order."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, PipelineError
from shoal.train.pipeline.schedule import PipelineParallelConfig, PipelineStage, schedule_actions, split_into_stages
from shoal.train.sharding import shard_sizes

Trace = list[tuple[int, str, float, float]]


@dataclass(frozen=True)
class StepOutput:
    """One step's ``loss`` (mean over micro-batches), their ``losses`` and the joined ``outputs``, all detached.

    On ranks without the last stage they are None, ``[]`` and None.
    """

    loss: Tensor | None
    losses: list[Tensor]
    outputs: Tensor | None


class PipelineRunner:
    """Runs forward and backward of ``layers`` as a pipeline; gradients stay in the parameters for your optimizer.

    Args:
        layers: all modules, on every rank; each takes and returns one tensor.
        loss_fn: ``loss_fn(output, target) -> scalar``; the step's loss is its mean over micro-batches.
        group: None runs all stages in this process. With a process group, rank i runs stage i on torch's pipelining;
            only stage 0 passes ``inputs`` and only the last stage passes ``target``.
        devices: one device per stage.
        splits: the stages; by default ``split_into_stages``.
        allow_uneven: split a batch that is not divisible by ``num_micro_batches`` into balanced sizes, and weight each
            loss by its share of rows.
        return_loss: ``"all"`` returns the last stage's loss on every rank.
        schedule_class: a schedule from torch's pipelining; for interleaved and zero-bubble ones ``num_stages`` must be
            a multiple of the group's size.

    ``last_trace`` lists the last step's ``(stage, action, start, end)`` on one monotonic clock. Layers such as
    BatchNorm see micro-batches, not the batch.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        config: PipelineParallelConfig,
        *,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        group: Any = None,
        devices: Sequence[torch.device | str] | None = None,
        splits: Sequence[PipelineStage] | None = None,
        allow_uneven: bool = False,
        return_loss: str = "last",
        schedule_class: type | None = None,
    ) -> None:
        if return_loss not in ("last", "all"):
            raise ConfigError(f"PipelineRunner: return_loss must be 'last' or 'all', got {return_loss!r}")
        self.layers = list(layers)
        self.config = config
        self.stages = list(splits) if splits is not None else split_into_stages(len(self.layers), config.num_stages)
        _check_splits(self.stages, len(self.layers), config.num_stages)
        if devices is not None and len(devices) != config.num_stages:
            raise ConfigError(f"PipelineRunner: devices must be one per stage, {config.num_stages}, got {len(devices)}")
        self.devices = [torch.device(d) for d in devices] if devices is not None else None
        self.loss_fn = loss_fn
        self.allow_uneven = allow_uneven
        self.return_loss = return_loss
        self.last_trace: Trace = []
        self._remote: Any = None
        if group is not None:
            from shoal.train.pipeline.group import GroupPipeline

            self._remote = GroupPipeline(self, group, schedule_class)
        else:
            if schedule_class is not None:
                raise ConfigError(
                    "PipelineRunner: schedule_class needs a process group; without one use config.schedule"
                )
            self._place(range(config.num_stages))

    def stage_layers(self, stage: int) -> list[nn.Module]:
        """The modules of one stage."""
        cut = self.stages[stage]
        return self.layers[cut.start_layer : cut.end_layer]

    def _place(self, stages: Sequence[int] | range) -> None:
        if self.devices is not None:
            for stage in stages:
                for layer in self.stage_layers(stage):
                    layer.to(self.devices[stage])

    def step(self, inputs: Tensor | None = None, target: Tensor | None = None) -> StepOutput:
        """Run forward and backward over the batch.

        Raises:
            PipelineError: the batch is not divisible, or a stage failed (the message has its number and exception);
                with a group, on all its ranks.
        """
        self.last_trace = []
        if self._remote is not None:
            return self._remote.step(inputs, target)
        if inputs is None or target is None:
            raise PipelineError("PipelineRunner.step: inputs and target must both be given when there is no group")
        if inputs.ndim == 0 or target.ndim == 0:
            raise PipelineError("PipelineRunner.step: inputs and target must have rows along dim 0, got a scalar")
        sizes = self.micro_batch_sizes(len(inputs), len(target))
        return _LocalStep(self, inputs, target, sizes).run()

    def micro_batch_sizes(self, rows: int, target_rows: int | None = None) -> list[int]:
        """The number of rows in each micro-batch; ``PipelineError`` if the batch cannot be split."""
        parts = self.config.num_micro_batches
        if target_rows is not None and rows != target_rows:
            raise PipelineError(
                f"PipelineRunner.step: inputs and target must have equally many rows, got {rows} and {target_rows}"
            )
        if rows < parts:
            raise PipelineError(
                f"PipelineRunner.step: a batch must have at least one row per micro-batch ({parts}), got {rows}"
            )
        if rows % parts and not self.allow_uneven:
            raise PipelineError(
                f"PipelineRunner.step: the batch's rows must be divisible by {parts} micro-batches, got {rows}; pad "
                "the batch, or pass allow_uneven=True"
            )
        return shard_sizes(rows, parts)


def _check_splits(stages: Sequence[PipelineStage], num_layers: int, num_stages: int) -> None:
    ends = [0, *(s.end_layer for s in stages)]
    good = (
        len(stages) == num_stages
        and [s.start_layer for s in stages] == ends[:-1]
        and ends[-1] == num_layers
        and all(s.start_layer < s.end_layer for s in stages)
        and [s.rank for s in stages] == list(range(num_stages))
    )
    if not good:
        raise ConfigError(
            f"PipelineRunner: splits must be {num_stages} stages in order that cover {num_layers} layers, got {stages}"
        )


class _LocalStep:
    """One step with all stages in this process, in an order that the schedule's dependencies allow."""

    def __init__(self, runner: PipelineRunner, inputs: Tensor, target: Tensor, sizes: list[int]) -> None:
        self.runner = runner
        self.last = runner.config.num_stages - 1
        self.inputs = inputs.split(sizes)
        self.target = target.split(sizes)
        self.weights = [n / sum(sizes) for n in sizes]
        self.forwarded: dict[tuple[int, int], Tensor] = {}  # inputs of stage s for micro-batch m
        self.returned: dict[tuple[int, int], Tensor | None] = {}  # gradients of stage s's outputs
        self.saved: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}

    def run(self) -> StepOutput:
        config = self.runner.config
        waiting = [
            schedule_actions(config.schedule, config.num_stages, config.num_micro_batches, stage)[::-1]
            for stage in range(config.num_stages)
        ]
        while any(waiting):
            for stage, actions in enumerate(waiting):
                if actions and self._ready(stage, actions[-1]):
                    self._act(stage, actions.pop())
        losses = [self.losses[m] for m in range(config.num_micro_batches)]
        loss = weighted_mean(losses, self.weights)
        return StepOutput(loss, losses, torch.cat([self.outputs[m] for m in range(config.num_micro_batches)]))

    def _ready(self, stage: int, action: str) -> bool:
        m = int(action[1:])
        if action[0] == "F":
            return stage == 0 or (stage, m) in self.forwarded
        return stage == self.last or (stage, m) in self.returned

    def _act(self, stage: int, action: str) -> None:
        began = time.monotonic()
        try:
            (self._forward if action[0] == "F" else self._backward)(stage, int(action[1:]))
        except Exception as error:
            raise stage_error(stage, action, error) from error
        self.runner.last_trace.append((stage, action, began, time.monotonic()))

    def _forward(self, stage: int, m: int) -> None:
        runner = self.runner
        taken = self.inputs[m] if stage == 0 else self.forwarded.pop((stage, m))
        if runner.devices is not None:
            taken = taken.to(runner.devices[stage])
        if stage > 0:
            taken = taken.detach().requires_grad_(taken.is_floating_point())
        layers = runner.stage_layers(stage)
        given = writable(taken, layers)
        for layer in layers:
            given = layer(given)
        if stage < self.last:
            self.forwarded[stage + 1, m] = given.detach()
        else:
            self.outputs[m] = given.detach()
            given = runner.loss_fn(given, self.target[m].to(given.device))
            self.losses[m] = given.detach().clone()
            given = given * self.weights[m]
        self.saved[stage, m] = (taken, given)

    def _backward(self, stage: int, m: int) -> None:
        taken, given = self.saved.pop((stage, m))
        gradient = None
        if stage < self.last:
            gradient = self.returned.pop((stage, m))
            if gradient is not None:
                gradient = gradient.to(given.device)
        if given.requires_grad and (stage == self.last or gradient is not None):
            torch.autograd.backward(given, gradient)
        if stage > 0:
            self.returned[stage - 1, m] = taken.grad


def writable(taken: Tensor, layers: Sequence[nn.Module]) -> Tensor:
    """A stage's input, cloned if a layer works in place, which autograd does not allow on a leaf."""
    if taken.requires_grad and any(getattr(m, "inplace", False) for layer in layers for m in layer.modules()):
        return taken.clone()
    return taken


def weighted_mean(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean; for equal weights one sum and one division, without rounded weights."""
    stacked = torch.stack([loss.detach() for loss in losses])
    if len(set(weights)) == 1:
        return stacked.sum() / len(losses)
    return (stacked * torch.tensor(weights, dtype=stacked.dtype, device=stacked.device)).sum()


def stage_error(stage: int, action: str, error: BaseException) -> PipelineError:
    return PipelineError(f"pipeline stage {stage} failed in {action}: {type(error).__name__}: {error}")
