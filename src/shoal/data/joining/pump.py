"""`Pump`: reads two live streams into a joiner, closes windows of quiet streams, and writes checkpoints."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable
from typing import Any

from shoal.data.joining.config import JoinConfig, micros
from shoal.data.joining.joiner import ACTIONS, FOREVER, IMPRESSIONS, SIDES, Joiner, Write
from shoal.data.live import Reader, open_reader
from shoal.metrics import emit_counter, emit_store

BATCH = 8192
_TAIL_BYTES = 1 << 28
_MEASURE_S = 1.0
_SHOWN_BYTES = 1 << 16


class Pump:
    """A joiner and its two inputs. Used by one thread at a time.

    Args:
        config: the settings of the join.
        write: called with the samples; see `Joiner`.
        before_checkpoint: called before each checkpoint; samples that were written must be on disk when it returns.
        to_end: stop at the current ends of the inputs, and close all windows there.
        note: called with messages for people.
    """

    def __init__(
        self,
        config: JoinConfig,
        write: Write,
        *,
        before_checkpoint: Callable[[], None] | None = None,
        to_end: bool = False,
        note: Callable[[str], None] | None = None,
        block_bytes: int = 0,
    ) -> None:
        self.config, self._flush, self._to_end = config, before_checkpoint or (lambda: None), to_end
        self._note = note or (lambda text: None)
        self._idle_us = micros(config.idle, "idle")
        self._dead = config.dead_letters or os.path.join(config.state, "dead_letters.jsonl")
        self._noted_broken = False
        self.readers: list[Reader] = []
        self._ended = [False, False]
        self._counted: dict[str, int] = {}
        self.measured: dict[str, Any] = {}
        """The last result of `measure`."""
        self.joiner = Joiner(config, write, note=note, block_bytes=block_bytes)
        try:
            for side, one in ((IMPRESSIONS, config.impressions), (ACTIONS, config.actions)):
                self.readers.append(open_reader(one.source, self.joiner.position(side)))
        except BaseException:
            self.close()
            raise
        now = time.monotonic()
        self._heard, self._asked = [now, now], [now, now]
        self._saved_s = self._measured_s = now
        self._counted = dict(self.joiner.native.counters())  # an earlier process reported these

    @property
    def ended(self) -> bool:
        """Whether both inputs have ended and all windows are closed."""
        return all(self._ended)

    def step(self, timeout_s: float) -> int:
        """Join available messages; return their number. Waits about ``timeout_s`` at most if there are none."""
        native = self.joiner.native
        # The side that is behind goes first, to keep the number of open impressions low.
        order = sorted((IMPRESSIONS, ACTIONS), key=native.newest)
        taken = self._take(order[0], 0.0) or self._take(order[1], 0.0)
        if not taken:
            for side in order:
                taken = taken or self._take(side, timeout_s / 2)
        if not taken:
            self._close_quiet()
        now = time.monotonic()
        if now - self._saved_s >= self.config.checkpoint_s or native.tail_bytes > _TAIL_BYTES:
            self.checkpoint()
        if now - self._measured_s >= _MEASURE_S:
            self.measure()
        return taken

    def _take(self, side: int, timeout_s: float) -> int:
        reader = self.readers[side]
        if self._ended[side]:
            return 0
        if reader.ended:
            self._end(side)
            return 0
        chunks = reader.poll(BATCH, timeout_s)
        messages = [record for chunk in chunks for record in chunk.records]
        if not messages:
            return 0
        self.joiner.offer(side, messages, reader.positions(), bury=lambda broken: self._bury(side, messages, broken))
        self._heard[side] = time.monotonic()
        return len(messages)

    def _end(self, side: int) -> None:
        self.joiner.advance(side, FOREVER, self.readers[side].positions())
        self._ended[side] = True

    def _close_quiet(self) -> None:
        """Close the windows of a side that has been quiet for a while and has no unread messages."""
        now = time.monotonic()
        pause = min(1.0, self._idle_us / 4e6)
        for side in (IMPRESSIONS, ACTIONS):
            quiet = now - self._heard[side] >= self._idle_us / 1e6
            if self._ended[side] or not (quiet or self._to_end) or now - self._asked[side] < pause * (not self._to_end):
                continue
            self._asked[side] = now
            lag = self.readers[side].lag()
            if lag.records != 0 and not (lag.records is None and quiet and self._pipe(side)):
                continue  # it is unreachable, or has messages
            if self._to_end:
                self._end(side)
                continue
            watermark = time.time_ns() // 1000 - self._idle_us
            if watermark > self.joiner.native.watermark(side):
                self.joiner.advance(side, watermark)

    def _pipe(self, side: int) -> bool:
        """Whether the input is a pipe, which cannot report a lag and cannot be unreachable."""
        return (self.config.impressions, self.config.actions)[side].source in ("-", "stdin", "stdin:")

    def checkpoint(self) -> None:
        """Write a checkpoint, and acknowledge to the inputs what it contains."""
        self._flush()
        self.joiner.checkpoint()
        for side, reader in enumerate(self.readers):
            at = self.joiner.position(side)
            if at is not None:
                reader.acknowledge(at)
        self._saved_s = time.monotonic()
        emit_counter("join_checkpoints_total", 1)

    def measure(self) -> dict[str, Any]:
        """The current counts and levels, which also go to the metrics."""
        self._measured_s = time.monotonic()
        native = self.joiner.native
        counts = native.counters()
        for name, value in counts.items():
            emit_counter(f"join_{name}_total", value - self._counted.get(name, 0))
        self._counted = dict(counts)
        levels = {
            "open_impressions": native.open_impressions, "waiting_actions": native.waiting_actions,
            "spilled": native.spilled, "memory_bytes": native.memory, "tail_bytes": native.tail_bytes,
            "samples": native.emitted,
        }  # fmt: skip
        if abs(native.closed) < FOREVER:
            levels["watermark_lag_s"] = time.time() - native.closed / 1e6
        for name, value in levels.items():
            emit_store(f"join_{name}", value)
        self.measured = {**counts, **levels}
        return self.measured

    def _bury(self, side: int, messages: list[bytes], broken: list[tuple[int, str]]) -> None:
        with open(self._dead, "a", encoding="utf-8") as file:
            for index, why in broken:
                message = messages[index][:_SHOWN_BYTES]
                try:
                    shown = {"message": message.decode()}
                except UnicodeDecodeError:
                    shown = {"base64": base64.b64encode(message).decode()}
                file.write(json.dumps({"side": SIDES[side], "why": why, **shown}) + "\n")
        if not self._noted_broken:
            self._noted_broken = True
            self._note(
                f"a message of {SIDES[side]} {broken[0][1]}; broken messages are written to {self._dead}, and only the "
                "first is reported"
            )

    def close(self) -> None:
        """Close the inputs and release the state folder. Call `checkpoint` first to make resuming faster."""
        for reader in self.readers:
            reader.close()
        self.joiner.close()
