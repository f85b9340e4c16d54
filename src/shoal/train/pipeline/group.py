"""A pipeline over a process group, built on torch's stages and schedules.

It adds two things to them. A stage that raises continues with zeros so that its neighbours do not wait, and the flag
exchanged after the step makes every rank raise. Micro-batches of unequal size are padded to the largest one; each stage
removes the padding before its layers and adds it again afterwards, so layers and losses never see it.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.comm.ranks.torch_ranks import ProcessGroup, default_ranks
from shoal.errors import ConfigError, PipelineError
from shoal.train.aggregation.exchange import named_errors
from shoal.train.pipeline.runner import StepOutput, stage_error, weighted_mean, writable

if TYPE_CHECKING:
    from shoal.train.pipeline.runner import PipelineRunner

Meta = tuple[tuple[int, ...], torch.dtype]


class _Guarded(nn.Module):
    """Runs a stage's layers on the rows without padding; after a failure, returns zeros of the expected shape."""

    def __init__(self, owner: "GroupPipeline", stage: int, layers: list[nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)
        self.owner = [owner]  # in a list, so that it is not registered as a submodule
        self.stage = stage
        self.chunk = 0
        self.taken: Meta | None = None
        self.given: Meta | None = None

    def forward(self, x: Tensor) -> Tensor:
        owner = self.owner[0]
        assert self.given is not None
        shape, dtype = self.given
        if owner.failure is None:
            try:
                rows = owner.sizes[self.chunk]
                x = writable(x, [self.body])
                y = self.body(x[:rows] if rows < len(x) else x)
                if self.stage == owner.last and (y.ndim == 0 or len(y) != rows):
                    return y
                if tuple(y.shape[1:]) != shape[1:] or len(y) != rows or y.dtype != dtype:
                    raise ValueError(f"the output must be {shape} {dtype}, got {tuple(y.shape)} {y.dtype}")
                return y if rows == shape[0] else torch.cat([y, y.new_zeros(shape[0] - rows, *shape[1:])])
            except Exception as error:
                owner.fail(self.stage, f"F{self.chunk}", error)
        zeros = torch.zeros(shape, dtype=dtype, device=x.device, requires_grad=dtype.is_floating_point)
        return zeros + 0 * x.sum() if x.requires_grad else zeros * 1


class GroupPipeline:
    """The stages of this rank and the schedule that runs them; created by ``PipelineRunner``."""

    def __init__(self, runner: "PipelineRunner", group: Any, schedule_class: type | None) -> None:
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti

        self.runner = runner
        self.group = group
        self.ranks = default_ranks(group)
        self.rank, self.world_size = self.ranks.rank, self.ranks.world_size
        config = runner.config
        self.last = config.num_stages - 1
        if schedule_class is None:
            fits = config.num_micro_batches >= config.num_stages  # torch's 1F1B needs at least one per stage
            schedule_class = Schedule1F1B if config.schedule == "1f1b" and fits else ScheduleGPipe
        self.schedule_class: Any = schedule_class
        self.multi = issubclass(schedule_class, PipelineScheduleMulti)
        self.rank_of = self._placement()
        self.local = [s for s in range(config.num_stages) if self.rank_of[s] == self.rank]
        self.device = self._device()
        runner._place(self.local)
        self.guards = {s: _Guarded(self, s, runner.stage_layers(s)) for s in self.local}
        self.failure: tuple[int, str, BaseException] | None = None
        self.sizes: list[int] = []
        self.weights: list[float] = []
        self.target: tuple[Tensor, ...] = ()
        self.losses: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self._built_for: Any = None
        self._schedule: Any = None

    def _placement(self) -> list[int]:
        stages, world = self.runner.config.num_stages, self.world_size
        if not self.multi:
            if stages != world:
                raise ConfigError(f"PipelineRunner: num_stages must be the size of the group, {world}, got {stages}")
            return list(range(stages))
        if stages % world:
            raise ConfigError(
                f"PipelineRunner: num_stages must be a multiple of the group's {world} ranks, got {stages}"
            )
        if self.schedule_class.__name__ in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
            return [s if s < world else stages - 1 - s for s in range(stages)]  # torch's V-shaped placement
        return [s % world for s in range(stages)]

    def _device(self) -> torch.device:
        if self.runner.devices is not None:
            return self.runner.devices[self.local[0]]
        parameters = [p for s in self.local for layer in self.runner.stage_layers(s) for p in layer.parameters()]
        return parameters[0].device if parameters else torch.device("cpu")

    def fail(self, stage: int, action: str, error: BaseException) -> None:
        self.failure = self.failure or (stage, action, error)

    def step(self, inputs: Tensor | None, target: Tensor | None) -> StepOutput:
        self.failure, self.losses, self.outputs = None, [], []
        self._agree_on_batch(inputs, target)
        self._build()
        args, kwargs = [], {}
        if 0 in self.local:
            assert inputs is not None
            args = [self._padded(inputs.detach().to(self.device))]
        if self.last in self.local:
            assert target is not None
            self.target = target.to(self.device).split(self.sizes)
            kwargs["target"] = torch.arange(len(self.sizes), device="cpu")  # `_loss` takes the rows from self.target
        if self._schedule is not None:
            assert isinstance(self.ranks, ProcessGroup)
            with named_errors("a pipeline step", self.rank), self.ranks.watch.naming("a pipeline step"):
                self._schedule.step(*args, return_outputs=False, **kwargs)
        return self._finish()

    def _share(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. They are sent as JSON, so nothing from a peer is unpickled."""
        with named_errors("an agreement of the pipeline's stages", self.rank):
            return self.ranks.gather(value)

    def _agree_on_batch(self, inputs: Tensor | None, target: Tensor | None) -> None:
        """Set sizes and weights on all ranks, or raise the same ``PipelineError`` on all, before any data moves."""
        problem = described = rows = None
        if 0 in self.local:
            if inputs is None or inputs.ndim == 0:
                problem = f"stage 0 (rank {self.rank}) must pass inputs with rows along dim 0"
            else:
                described = _to_json((tuple(inputs.shape), inputs.dtype))
        if self.last in self.local:
            if target is None or target.ndim == 0:
                problem = problem or f"the last stage (rank {self.rank}) must pass target with rows along dim 0"
            else:
                rows = len(target)
        everyone = self._share((problem, described, rows))
        problems = [p for p, _, _ in everyone if p]
        if problems:
            raise PipelineError(f"PipelineRunner.step: {'; '.join(problems)}")
        shape, dtype = _from_json(next(d for _, d, _ in everyone if d))
        target_rows = next(r for _, _, r in everyone if r is not None)
        self.sizes = self.runner.micro_batch_sizes(shape[0], target_rows)
        self.weights = [n / shape[0] for n in self.sizes]
        self.input_meta: Meta = ((max(self.sizes), *shape[1:]), dtype)

    def _padded(self, inputs: Tensor) -> Tensor:
        longest = max(self.sizes)
        if min(self.sizes) == longest:
            return inputs
        pieces = [torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])]) for x in inputs.split(self.sizes)]
        return torch.cat(pieces)

    def _build(self) -> None:
        """Build stages and schedule for micro-batches of this shape; ranks first exchange each stage's output shape."""
        if self._built_for == self.input_meta:
            return
        from torch.distributed.pipelining import PipelineStage

        metas = [self.input_meta]
        for stage in range(self.last + 1):
            answer = None
            if stage in self.local:
                try:
                    answer = _to_json(infer(self.guards[stage].body, metas[-1], self.device))
                except Exception as error:
                    answer = str(stage_error(stage, "F0", error))
            answer = self._share(answer)[self.rank_of[stage]]
            if isinstance(answer, str):
                raise PipelineError(answer)
            metas.append(_from_json(answer))
        stages = []
        for s in self.local:
            self.guards[s].taken, self.guards[s].given = metas[s], metas[s + 1]
            stage = PipelineStage(
                self.guards[s],
                s,
                self.last + 1,
                self.device,
                input_args=_example(metas[s], grad=s > 0),
                output_args=_example(metas[s + 1], grad=True),
                group=self.group,
            )
            self._watch(stage, self.guards[s])
            stages.append(stage)
        options = {"loss_fn": self._loss, "scale_grads": False}
        count = self.runner.config.num_micro_batches
        self._schedule = self.schedule_class(stages if self.multi else stages[0], count, **options)
        self._built_for = self.input_meta

    def _loss(self, output: Tensor, index: Tensor) -> Tensor:
        i = int(index[0])
        if self.failure is None:
            try:
                rows = output[: self.sizes[i]]
                loss = self.runner.loss_fn(rows, self.target[i])
                self.losses.append(loss.detach().clone())
                self.outputs.append(rows.detach())
                return loss * self.weights[i]
            except Exception as error:
                self.fail(self.last, f"F{i}", error)
        return output.sum() * 0

    def _watch(self, stage: Any, guard: _Guarded) -> None:
        """Record the stage's actions, and keep its failures from stopping its neighbours."""
        stage.forward_one_chunk = self._recorded(stage.forward_one_chunk, guard, "F", stage)
        stage.backward_one_chunk = self._recorded(stage.backward_one_chunk, guard, "B", stage)
        stage.backward_weight_one_chunk = self._recorded(stage.backward_weight_one_chunk, guard, "W", stage)

    def _recorded(self, call: Callable, guard: _Guarded, letter: str, stage: Any) -> Callable:
        def recorded(chunk: int, *args: Any, **kwargs: Any) -> Any:
            guard.chunk = chunk
            began = time.monotonic()
            try:
                result = call(chunk, *args, **kwargs)
            except Exception as error:
                if letter == "F":
                    raise
                self.fail(guard.stage, f"{letter}{chunk}", error)
                assert guard.taken is not None
                shape, dtype = guard.taken
                stage.bwd_cache.setdefault(chunk, (torch.zeros(shape, dtype=dtype, device=self.device),))
                result = None
            self.runner.last_trace.append((guard.stage, f"{letter}{chunk}", began, time.monotonic()))
            return result

        return recorded

    def _finish(self) -> StepOutput:
        failure = self.failure
        text = str(stage_error(*failure)) if failure is not None else None
        loss = weighted_mean(self.losses, self.weights) if self.last in self.local and failure is None else None
        shared = None
        if loss is not None and self.runner.return_loss == "all":
            shared = (loss.tolist(), str(loss.dtype).removeprefix("torch."))
        everyone = self._share((text, shared))
        texts = [t for t, _ in everyone if t is not None]
        if texts:
            raise PipelineError("; ".join(texts)) from (failure[2] if failure is not None else None)
        if self.runner.return_loss == "all":
            value, name = next(v for _, v in everyone if v is not None)
            loss = torch.tensor(value, dtype=getattr(torch, name), device=self.device)
        outputs = torch.cat(self.outputs) if self.outputs else None
        return StepOutput(loss, self.losses, outputs)


def _to_json(meta: Meta) -> list[Any]:
    shape, dtype = meta
    return [list(shape), str(dtype).removeprefix("torch.")]


def _from_json(described: list[Any]) -> Meta:
    shape, name = described
    return tuple(shape), getattr(torch, name)


def _example(meta: Meta, *, grad: bool) -> Tensor:
    shape, dtype = meta
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad and dtype.is_floating_point)


def infer(body: nn.Module, meta: Meta, device: torch.device) -> Meta:
    """Shape and dtype of ``body``'s output, without touching its parameters, buffers or random state."""
    shape, dtype = meta
    state = {**dict(body.named_parameters()), **dict(body.named_buffers())}
    try:
        with torch.no_grad():
            fake = {name: t.to("meta") for name, t in state.items()}
            out = torch.func.functional_call(body, fake, (torch.empty(shape, dtype=dtype, device="meta"),))
    except Exception:  # an op without a meta kernel, or one that reads values
        copies = {name: t.detach().clone() for name, t in state.items()}
        devices = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            out = torch.func.functional_call(body, copies, (torch.zeros(shape, dtype=dtype, device=device),))
    return tuple(out.shape), out.dtype
