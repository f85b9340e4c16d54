"""A sync client: the tables that are attached to it, and its rounds of pushes."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.metrics import emit_counter, emit_timer
from shoal.proto.serving.parameter_sync_pb2 import ClientConfig, PushResult
from shoal.serving.status import Code, StatusError, invalid_argument
from shoal.serving.sync.history import History, Ids, merge
from shoal.serving.sync.manager import SyncClientManager
from shoal.serving.sync.split import Delta, DeltaBatch
from shoal.serving.sync.touched import CAPACITY, Missed, TouchedPairs
from shoal.stamps import Stamp
from shoal.table.touched import TouchedKeySet

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Attached:
    """One table, or one sub-table of the multi-table, as the client sees it."""

    name: str
    dim: int
    lookup: Callable[[torch.Tensor], torch.Tensor]


class SyncClientHandle:
    """What tables take as ``sync_client``: the process-wide client behind a shared name.

    Attributes:
        name: the shared name.
        device: where the client's parameter server is, empty when nobody said.
    """

    def __init__(self, name: str, device: str = "", config: ClientConfig | None = None) -> None:
        self.name = name
        self.device = device
        self.manager = SyncClientManager()
        if config is not None:
            self.manager.try_replace(config.targets, config.targets_extra_info)
        self.touched = TouchedPairs(name)
        self.freshness: dict[str, float] = {}
        """target -> seconds from the oldest gradient of the last push to its being servable."""
        self._missed = Missed(name)
        self._stamp = Stamp(0, 0)  # of the last round
        self._history: History | None = None  # pairs pushed since the last full export, when catching up
        self._instances: dict[str, str] = {}  # target -> the process that last answered there
        self._seen: set[str] = set()
        self._tables: list[_Attached] = []
        self._numbers: dict[str, int] = {}
        self._multi: str | None = None
        self._lock = threading.Lock()
        self._round = threading.Lock()
        self._logged: dict[str, float] = {}

    @property
    def is_dummy(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"SyncClientHandle({self.name!r})"

    # --- tables -----------------------------------------------------------------------------------------------------

    def attach_table(
        self, name: str, dim: int, lookup: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[TouchedKeySet, int] | None:
        """Adds a single table; returns the set that its trained ids go to and its number there.

        Raises:
            StatusError: invalid argument if a multi-table is attached, already exists for a name that is taken.
        """
        with self._lock:
            if self._multi is not None:
                raise invalid_argument(
                    f"{self.name}: table {name!r} cannot join multi-table {self._multi!r}; give it a client of its own"
                )
            if name in self._numbers:
                raise StatusError(Code.ALREADY_EXISTS, f"{self.name}: a table named {name!r} is attached already")
            number = self._numbers[name] = len(self._tables)
            self._tables.append(_Attached(name, dim, lookup))
        return self.touched.keys, number

    def attach_multi_table(
        self, name: str, tables: Sequence[tuple[str, int, Callable[[torch.Tensor], torch.Tensor]]]
    ) -> list[tuple[TouchedKeySet, int]] | None:
        """Adds the one multi-table, given as (sub-table name, dim, lookup) in the order of names.

        Returns, per sub-table, the set that its trained ids go to and its number there.

        Raises:
            StatusError: invalid argument if single tables are attached, already exists for a second multi-table.
        """
        with self._lock:
            if self._multi is not None:
                raise StatusError(
                    Code.ALREADY_EXISTS, f"{self.name}: {name!r} cannot join, multi-table {self._multi!r} is attached"
                )
            if self._tables:
                names = ", ".join(sorted(self._numbers))
                raise invalid_argument(f"{self.name}: multi-table {name!r} cannot join single tables ({names})")
            self._multi = name
            for sub, dim, lookup in tables:
                self._numbers[sub] = len(self._tables)
                self._tables.append(_Attached(sub, dim, lookup))
            return [(self.touched.keys, number) for number in range(len(self._tables))]

    @property
    def table_order(self) -> list[str]:
        """The attached tables, or sub-tables, by number."""
        return [table.name for table in self._tables]

    @property
    def table_names(self) -> dict[str, int]:
        """name -> dim of the attached tables, or sub-tables."""
        return {table.name: table.dim for table in self._tables}

    @property
    def multi_table_name(self) -> str | None:
        return self._multi

    def lookup(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """The current rows of an attached table."""
        return self._tables[self._numbers[name]].lookup(ids)

    def detach_all(self) -> None:
        """Forgets every table and what they touched; for processes that build their tables anew."""
        with self._round, self._lock:
            self._tables, self._numbers, self._multi = [], {}, None
            self.touched.steal()
            self._missed.keep_only(())

    # --- catching up ------------------------------------------------------------------------------------------------

    def catch_up(self, enable: bool = True) -> None:
        """Keeps the ids touched since the last full export and pushes them once to each target that newly appears.

        A target that was restarted at the same address counts as new.
        """
        with self._round:
            self._history = History(Stamp(0, 0), CAPACITY + 1) if enable else None

    def exported(self) -> None:
        """A full export has been made: what a new replica must catch up on starts from here."""
        with self._round:
            if self._history is not None:
                self._history.forget(self._stamp)

    # --- rounds -----------------------------------------------------------------------------------------------------

    def sync(self, config: ClientConfig) -> PushResult:
        """One round: pushes the current rows of all touched ids to all targets of ``config``.

        While there is no target the ids are kept. Ids of parts that a target did not take are kept for it and join
        its next round. Failed RPCs are reported in the result, not raised.
        """
        with self._round:
            self.manager.try_replace(config.targets, config.targets_extra_info)
            targets = self.manager.targets
            self._forget_all_but(targets)
            if not targets:
                self.touched.keys.report_dropped()
                self._seen.clear()
                return PushResult()
            groups, oldest = self.touched.steal()
            if self._history is not None:
                if fresh := set(targets) - self._seen:
                    former = self._history.since(self._history.floor) or {}
                    for target in fresh:
                        self._missed.add(target, former, None)
                self._stamp = Stamp(0, self._stamp.step + 1)
                if dropped := self._history.add(self._stamp, groups):
                    emit_counter("touched_key_set_dropped", dropped, f"name={self.name} catch-up")
                    log.warning("%s: new replicas do not catch up on %d ids; no more are held", self.name, dropped)
            self._seen = set(targets)
            if not groups and not self._missed:
                self._log("No updated FIDs!", 600)
                return PushResult()
            return self._push(config, targets, groups, oldest)

    def _forget_all_but(self, targets: list[str]) -> None:
        self._missed.keep_only(targets)
        for known in (self.freshness, self._instances):
            for gone in known.keys() - set(targets):
                del known[gone]

    def _log(self, text: str, every_secs: float, *args: Any) -> None:
        """One line, at most once in a while for each text."""
        now = time.monotonic()
        if now - self._logged.get(text, float("-inf")) >= every_secs:
            self._logged[text] = now
            log.info(text, *args)

    def _push(self, config: ClientConfig, targets: list[str], groups: Ids, oldest: float | None) -> PushResult:
        plan: dict[str, tuple[Ids, float | None]] = {}
        for target in targets:
            missed, since = self._missed.take(target)
            times = [each for each in (oldest, since) if each is not None]
            plan[target] = (merge(missed, groups) if missed else groups, min(times) if times else None)
        try:
            batches = self._build_each(config, plan)
            signature = next(iter(batches.values())).signature_name
            touched_at = {target: since for target, (_, since) in plan.items() if since is not None}
            fids = sum(sum(batch.counts()) for batch in batches.values())
            self._log("pushing %d rows to %d targets of %s", 60, fids, len(targets), config.model_name)
            result, failed = self.manager.push_each(batches, config.model_name, signature, touched_at)
        except BaseException:  # whatever it was, nobody is known to have these rows
            for target, (wanted, since) in plan.items():
                self._missed.add(target, wanted, since)
            raise
        self._log("responses: %s", 600, result)
        answered = {response.target for response in result.responses}
        for target, (wanted, since) in plan.items():
            if target not in answered:
                self._missed.add(target, wanted, since)
            elif target in failed:
                self._missed.add(target, self._groups_of(failed[target]), since)
        done = answered - set(failed)
        self._measure(done, touched_at)
        self._notice_restarts(done)
        return result

    def _build_each(self, config: ClientConfig, plan: Mapping[str, tuple[Ids, float | None]]) -> dict[str, DeltaBatch]:
        """The batch of each target; those that want the same ids share one."""
        built: dict[int, DeltaBatch] = {}
        try:
            for wanted, _ in plan.values():
                if id(wanted) not in built:
                    built[id(wanted)] = self._build(config, wanted)
        except Exception as error:
            raise invalid_argument(f"{self.name}: cannot build the push: {error}") from error
        return {target: built[id(wanted)] for target, (wanted, _) in plan.items()}

    def _notice_restarts(self, done: set[str]) -> None:
        """A target that answers as another process than before has only its export: it catches up next round."""
        for target in done:
            instance = self.manager.instance(target)
            before = self._instances.get(target)
            if instance:
                self._instances[target] = instance
            if self._history is not None and before and instance and before != instance:
                log.info("%s: %s was restarted; it catches up", self.name, target)
                self._missed.add(target, self._history.since(self._history.floor) or {}, None)

    def _build(self, config: ClientConfig, groups: Ids) -> DeltaBatch:
        multi = self._multi is not None
        signature = f"{self._multi}/raw_assign" if multi else config.signature_name
        batch = DeltaBatch(config.model_name, signature, config.timeout_in_ms, multi)
        order = range(len(self._tables)) if multi else [self._numbers[name] for name in sorted(self._numbers)]
        for number in order:
            table = self._tables[number]
            fids = groups.get(number, np.empty(0, np.int64))
            values = table.lookup(torch.from_numpy(fids)) if fids.size else torch.empty(0, table.dim, device="cpu")
            values = values.detach().to("cpu", torch.float32).contiguous().numpy()
            batch.deltas.append(Delta(table.name, table.dim, fids, values.reshape(fids.size, table.dim)))
        batch.read_at = time.time()  # after the reading: an export that was begun later has none of these rows older
        return batch

    def _groups_of(self, parts: list[DeltaBatch]) -> Ids:
        """The pairs of parts of one batch, which have none in common."""
        found: dict[int, list[np.ndarray]] = {}
        for part in parts:
            for delta in part.deltas:
                if len(delta.fids):
                    found.setdefault(self._numbers[delta.unique_id], []).append(delta.fids)
        return {number: np.concatenate(fids) for number, fids in found.items()}

    def _measure(self, done: set[str], touched_at: dict[str, float]) -> None:
        now = time.time()
        for target in done & touched_at.keys():
            self.freshness[target] = now - touched_at[target]
            emit_timer(
                "parameter_sync_freshness_seconds", self.freshness[target], f"client={self.name}|target={target}"
            )

    def waiting(self) -> dict[str, int]:
        """target -> ids that it missed, and under "" the ids touched since the last round."""
        return {"": len(self.touched), **{target: self._missed.count(target) for target in self.manager.targets}}


class DummySyncHandle(SyncClientHandle):
    """A client whose pushes succeed without doing anything; tables are not attached to it and track nothing."""

    @property
    def is_dummy(self) -> bool:
        return True

    def attach_table(self, name: str, dim: int, lookup: Any) -> None:
        return None

    def attach_multi_table(self, name: str, tables: Any) -> None:
        return None

    def sync(self, config: ClientConfig) -> PushResult:
        return PushResult()
