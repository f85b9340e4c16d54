"""`Control`: step, times and learning rates of an update in device memory, where a captured graph reads them."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.errors import ConfigError, UnsupportedError
from shoal.table.clock import Now, now
from shoal.table.config.learning_rate import PolynomialDecay
from shoal.table.cuda.backend import capturing
from shoal.table.cuda.kernels import located as lk
from shoal.table.protocol import Step

if TYPE_CHECKING:
    from shoal.table.cuda.table import CudaHashTable

_TABLES_AT = lk.TABLES_AT.value
_STEPPED = ("dynamic_wd_adagrad", "batch_softmax")  # their rows store the step


class Control:
    """The parameters that update kernels read, sent only when they have changed."""

    def __init__(self, tables: tuple[CudaHashTable, ...]) -> None:
        self._tables, self._device = tables, tables[0].device
        segments = tables[0]._layout.segments
        self.segments = len(segments)
        self._steps = any(s.kind in _STEPPED for s in segments)
        ends = _TABLES_AT + 2 * len(tables)
        room = (len(tables) * self.segments + 3) // 4 * 2
        self.words = torch.zeros(ends + 2 * room, dtype=torch.int64, device=self._device)
        self.rates = self.words[ends : ends + room].view(torch.float32)[: len(tables) * self.segments]
        self._unscaled = self.words[ends + room :].view(torch.float32)[: len(tables) * self.segments]
        self._number = self.words[:1]
        self._times = self.words[_TABLES_AT:ends].view(-1, 2)
        self._ends, self._room = ends, room
        self._functions = [list(table.config.learning_rate_fns) for table in tables]
        constant = [float(fn) for of in self._functions for fn in of if isinstance(fn, Real)]
        self._constant = constant if len(constant) == len(tables) * self.segments else None
        self._clocked = [table.clocked for table in tables]
        self._sent: Any = None
        self._last_time = -1

    def forget(self) -> None:
        """Makes the next `set` read the tables again and send everything."""
        self._sent, self._last_time = None, -1

    def set(self, step: Step, captured: bool) -> None:
        """Sets ``step`` for the next update, or for the next replay of a captured one.

        If ``captured``, numbers keep their last values, because a graph would not read them again; tensors are read.
        """
        number, time, scale = step.number, step.time_s, step.lr_scale
        if not isinstance(number, Tensor) and number < 0:
            for table in self._tables:
                table._check_step(number)
        if not captured:
            self._send(number, time, scale)
        if isinstance(number, Tensor):
            self._number.copy_(number.reshape(1))
            if self._constant is None:
                self._unscaled.copy_(self._schedules(number))
                self.rates.copy_(self._unscaled)
        if isinstance(scale, Tensor):
            torch.mul(self._unscaled.view(-1, self.segments), scale.view(-1, 1), out=self.rates.view(-1, self.segments))
            self._sent = None
        if isinstance(time, Tensor):
            for table in self._tables:
                self._keep_times(table)
            self._times[:, 0].copy_(time.reshape(1))
            self._times[:, 1].zero_()
            self._sent = None

    def _send(self, number: Any, time: Any, scale: Any) -> None:
        if isinstance(number, Tensor):
            step, rates = 0, self._constant or [0.0] * (len(self._tables) * self.segments)
        else:
            step = number if self._steps else 0
            rates = self._constant or self._rates_at(number)
        scaled = rates if scale is None or isinstance(scale, Tensor) else self._scaled(rates, scale)
        given = isinstance(time, Tensor)
        seconds = now() if time is None else 0 if given else time
        key = (step, int(seconds), time is None, rates, scaled, given)
        if key == self._sent:
            return
        if not given and seconds != self._last_time:
            seconds = self._checked(time, seconds)
            self._last_time = seconds
        home = torch.zeros(self.words.numel(), dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda")
        words = home.numpy()
        words[0] = step
        for place, clocked in enumerate(self._clocked):
            words[_TABLES_AT + 2 * place] = int(seconds) if clocked or time is not None else 0
            words[_TABLES_AT + 2 * place + 1] = clocked and isinstance(seconds, Now)
        for at, values in ((self._ends, scaled), (self._ends + self._room, rates)):
            words[at : at + self._room].view("float32")[: len(values)] = values
        self.words.copy_(home, non_blocking=True)
        self._sent = key

    def _checked(self, time: Any, seconds: int) -> int:
        """Checks the time with every table, which records it as its latest; returns the seconds."""
        times = [
            table._time(time) if time is not None else seconds if table.clocked else 0 for table in self._tables
        ]  # all of them first, because any table can refuse the time
        for table, own in zip(self._tables, times, strict=True):
            if own:
                self._keep_times(table)
            table._host.raise_max_update_time(int(own))
        return seconds

    def _keep_times(self, table: CudaHashTable) -> None:
        arena = table._storage.arena
        if not arena.timed:
            if capturing(self._device):  # each replay would forget the times
                raise UnsupportedError(
                    "the first write with a time cannot be captured; run the step once before the capture"
                )
            arena.keep_times()

    def _rates_at(self, number: int) -> list[float]:
        return [rate for table in self._tables for rate in table.rates(number)]

    def _scaled(self, rates: list[float], scale: Sequence[float]) -> list[float]:
        if len(scale) != len(self._tables):
            raise ConfigError(f"step.lr_scale must have {len(self._tables)} factors, one per table, got {len(scale)}")
        return [rate * float(scale[place // self.segments]) for place, rate in enumerate(rates)]

    def _schedules(self, number: Tensor) -> Tensor:
        """Rates at a step in device memory, computed there."""
        step, made = number.reshape(()).double(), []
        for of in self._functions:
            for fn in of:
                if isinstance(fn, Real):
                    made.append(torch.full_like(step, float(fn)))
                elif type(fn) is PolynomialDecay and not fn.cycle:
                    start, end = float(fn.initial_learning_rate), float(fn.end_learning_rate)
                    part = step.clamp(max=float(fn.decay_steps)) / float(fn.decay_steps)
                    made.append((start - end) * (1.0 - part) ** float(fn.power) + end)
                else:
                    raise UnsupportedError(
                        f"a learning rate {type(fn).__name__} cannot be computed on {self._device}; pass the step as a "
                        "number, and call set_step before each replay of a captured graph"
                    )
        return torch.stack(made).float()
