"""Connects a sync client to the publisher: its touched ids are the source, its targets accept plain Predict calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.fid import distinct
from shoal.metrics import emit_counter
from shoal.proto.serving.parameter_sync_pb2 import ClientConfig, PushResponse, PushResult
from shoal.serving.sync.history import Ids, count
from shoal.serving.sync.monolith.touched import CAPACITY
from shoal.serving.sync.publication import Changes
from shoal.serving.sync.split import DeltaBatch
from shoal.serving.sync.target import Layout, Package, Sent, Session
from shoal.stamps import Stamp, new_run

if TYPE_CHECKING:
    from shoal.serving.sync.monolith.handle import SyncClientHandle

log = logging.getLogger(__name__)


class TouchedSource:
    """The tables of a sync client: touched ids and their current rows. Rounds are numbered from 1."""

    base: Stamp | None = None

    def __init__(self, handle: SyncClientHandle) -> None:
        self._handle = handle
        self.name = handle.name
        self.stamp = Stamp(new_run(), 0)
        """The stamp of the last round."""

    @property
    def tables(self) -> dict[str, int]:
        return self._handle.table_names

    def take(self) -> Changes:
        groups, oldest = self._handle.touched.steal()
        self.stamp = Stamp(self.stamp.run, self.stamp.step + 1)
        names = self._handle.table_order
        ids = {names[number]: torch.from_numpy(each) for number, each in groups.items()}
        return Changes(stamp=self.stamp, ids=ids, since=oldest if ids else 0.0)

    def read(self, table: str, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = self._handle.lookup(table, ids).detach().to("cpu", torch.float32).contiguous()
        values = values.reshape(len(ids), self.tables[table])  # rows that are gone are zeros, and are pushed as zeros
        return values, torch.ones(len(ids), dtype=torch.bool, device="cpu")

    def scan(self, table: str) -> Iterator[torch.Tensor]:
        return iter(())  # a new target has loaded an export

    def owns(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(ids), dtype=torch.bool, device="cpu")


class Answers:
    """The messages of a round and its targets' answers."""

    def __init__(self, config: ClientConfig, layout: Layout) -> None:
        self.config, self.layout = config, layout
        self.failure: Exception | None = None
        """An error of this process."""
        self._of: dict[str, list[PushResponse]] = {}
        self._batches: dict[int, DeltaBatch] = {}
        self._lock = threading.Lock()

    def batch(self, package: Package) -> DeltaBatch:
        """The push of a package, created once for all of its targets."""
        with self._lock:
            if id(package) not in self._batches:
                batch = package.whole(self.layout, self.config.timeout_in_ms)
                batch.model_name = self.config.model_name
                self._batches[id(package)] = batch
            return self._batches[id(package)]

    def add(self, target: str, responses: list[PushResponse]) -> None:
        with self._lock:
            self._of[target] = responses

    def result(self) -> PushResult:
        """All answers, by target, then by part."""
        return PushResult(responses=[each for _, responses in sorted(self._of.items()) for each in responses])


class PlainTarget:
    """One target of a sync client, pushed to through its manager."""

    def __init__(self, address: str, handle: SyncClientHandle) -> None:
        self.address, self._handle = address, handle
        self._instance = ""  # the process that last answered there

    def hello(self, source: str, run: int, base: Stamp | None, everything: bool, timeout: float) -> Session:
        """Sends nothing: a new target has loaded an export, and catches up from it if that is enabled."""
        handle = self._handle
        return Session(0, "", handle.newcomers_have(), None, (handle.answers.layout,), {}, {}, plain=True)

    def send(
        self, package: Package, session: Session, digest: str, complete: bool, touched_at: float, timeout: float
    ) -> Sent:
        """Push the parts that hold ids. The error of a failed part is in the answers, and its ids are kept."""
        handle, answers = self._handle, self._handle.answers
        batch = answers.batch(package)
        if not batch.counts():  # no table is attached: a push of no tables would have an answer
            return Sent()
        layout = answers.layout
        try:
            pushed = handle.manager.push_to(
                self.address, batch, answers.config.model_name, layout.signature, touched_at
            )
        except Exception as error:
            answers.failure, pushed = error, None
        if pushed is None:  # it may not have these rows
            return Sent(left=self._bounded([batch]))
        responses, failed = pushed
        answers.add(self.address, responses)
        if failed:
            return Sent(left=self._bounded(failed))
        return Sent(sum(batch.counts()), since=self._restarted())

    def _bounded(self, parts: list[DeltaBatch]) -> Ids:
        """The ids of parts; beyond the capacity all of them are dropped, counted and logged."""
        found: dict[str, list[np.ndarray]] = {}
        for part in parts:
            for delta in part.deltas:
                if len(delta.fids):
                    found.setdefault(delta.unique_id, []).append(delta.fids)
        left = {table: distinct(np.concatenate(each)) for table, each in found.items()}
        if (total := count(left)) > CAPACITY + 1:
            name = self._handle.name
            emit_counter("touched_key_set_dropped", total, f"name={name}|target={self.address}")
            log.warning("%s: %s missed %d ids, more than the limit; they were dropped", name, self.address, total)
            return {}
        return left

    def _restarted(self) -> Stamp | None:
        """If another process answers at this address, the stamp from which it catches up; otherwise None."""
        before, instance = self._instance, self._handle.manager.instance(self.address)
        self._instance = instance or before
        if before and instance and before != instance and self._handle.catches_up:
            log.info("%s: %s was restarted; it is catching up", self._handle.name, self.address)
            return self._handle.newcomers_have()
        return None

    def close(self) -> None:
        """The manager closes its client."""
