"""The sync client: tables attach to it, rounds push what they trained to the serving replicas."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError

from shoal.proto.serving.parameter_sync_pb2 import ClientConfig, PushResult
from shoal.serving.manager import SyncClientManager
from shoal.metrics import emit_timer
from shoal.serving.push import result_json
from shoal.serving.split import Delta, DeltaBatch
from shoal.serving.status import Code, StatusError, invalid_argument
from shoal.serving.touched import Groups, History, Missed, TouchedPairs, merge
from shoal.table.export_mode import is_exporting_standalone
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
            StatusError: invalid argument beside a multi-table, already exists for a name that is taken.
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
            StatusError: invalid argument beside single tables, already exists for a second multi-table.
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
            self._history = History() if enable else None

    def exported(self) -> None:
        """A full export has been made: what a new replica must catch up on starts from here."""
        with self._round:
            if self._history is not None:
                self._history = History()

    # --- rounds -----------------------------------------------------------------------------------------------------

    def sync(self, config: ClientConfig) -> PushResult:
        """One round: pushes the current rows of all touched ids to all targets of ``config``.

        While there is no target the ids are kept. Ids of parts that a target did not take are kept for it and join
        its next round. Failed RPCs are reported in the result, not raised.
        """
        with self._round:
            self.manager.try_replace(config.targets, config.targets_extra_info)
            targets = self.manager.targets
            self._missed.keep_only(targets)
            if not targets:
                self._seen.clear()
                return PushResult()
            groups, oldest = self.touched.steal()
            if self._history is not None:
                if fresh := set(targets) - self._seen:
                    former = self._history.groups()
                    for target in fresh:
                        self._missed.add(target, former, None)
                self._history.add(groups)
            self._seen = set(targets)
            if not groups and not self._missed:
                self._log("No updated FIDs!", 600)
                return PushResult()
            return self._push(config, targets, groups, oldest)

    def _log(self, text: str, every_secs: float, *args: Any) -> None:
        """One line, at most once in a while for each text."""
        now = time.monotonic()
        if now - self._logged.get(text, float("-inf")) >= every_secs:
            self._logged[text] = now
            log.info(text, *args)

    def _push(self, config: ClientConfig, targets: list[str], groups: Groups, oldest: float | None) -> PushResult:
        plan: dict[str, tuple[Groups, float | None]] = {}
        for target in targets:
            missed, since = self._missed.take(target)
            times = [each for each in (oldest, since) if each is not None]
            plan[target] = (merge(missed, groups) if missed else groups, min(times) if times else None)
        try:
            batches, built = {}, {}
            for target, (wanted, _) in plan.items():
                if id(wanted) not in built:
                    built[id(wanted)] = self._build(config, wanted)
                batches[target] = built[id(wanted)]
        except Exception as error:
            for target, (wanted, since) in plan.items():
                self._missed.add(target, wanted, since)
            raise invalid_argument(f"{self.name}: cannot build the push: {error}") from error
        signature = next(iter(batches.values())).signature_name
        touched_at = {target: since for target, (_, since) in plan.items() if since is not None}
        fids = sum(sum(batch.counts()) for batch in batches.values())
        self._log("pushing %d rows to %d targets of %s", 60, fids, len(targets), config.model_name)
        result, failed = self.manager.push_each(batches, config.model_name, signature, touched_at)
        self._log("responses: %s", 600, result)
        for target, parts in failed.items():
            self._missed.add(target, self._groups_of(parts), plan[target][1])
        done = {response.target for response in result.responses} - set(failed)
        self._measure(done, touched_at)
        self._notice_restarts(done)
        return result

    def _notice_restarts(self, done: set[str]) -> None:
        """A target that answers as another process than before has only its export: it catches up next round."""
        for target in done:
            instance = self.manager.instance(target)
            before = self._instances.get(target)
            if instance:
                self._instances[target] = instance
            if self._history is not None and before and instance and before != instance:
                log.info("%s: %s was restarted; it catches up", self.name, target)
                self._missed.add(target, self._history.groups(), None)

    def _build(self, config: ClientConfig, groups: Groups) -> DeltaBatch:
        multi = self._multi is not None
        signature = f"{self._multi}/raw_assign" if multi else config.signature_name
        batch = DeltaBatch(config.model_name, signature, config.timeout_in_ms, multi)
        order = range(len(self._tables)) if multi else [self._numbers[name] for name in sorted(self._numbers)]
        for number in order:
            table = self._tables[number]
            fids = groups.get(number, np.empty(0, np.int64))
            values = table.lookup(torch.from_numpy(fids)) if fids.size else torch.empty(0, table.dim)
            values = values.detach().to("cpu", torch.float32).contiguous().numpy()
            batch.deltas.append(Delta(table.name, table.dim, fids, values.reshape(fids.size, table.dim)))
        return batch

    def _groups_of(self, parts: list[DeltaBatch]) -> Groups:
        groups: Groups = {}
        for part in parts:
            groups = merge(groups, {self._numbers[d.unique_id]: d.fids for d in part.deltas if len(d.fids)})
        return groups

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


@dataclass(slots=True)
class _Registry:
    handles: dict[str, SyncClientHandle] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, name: str, make: Callable[[], SyncClientHandle]) -> SyncClientHandle:
        with self.lock:
            if name not in self.handles:
                self.handles[name] = make()
            return self.handles[name]


_registry = _Registry()


def reset_sync_clients() -> None:
    """Closes and forgets every sync client of the process."""
    with _registry.lock:
        handles = list(_registry.handles.values())
        _registry.handles.clear()
    for handle in handles:
        handle.manager.close()


def parameter_sync_client_from_config(
    config: ClientConfig | bytes | None = None, name_suffix: str = ""
) -> SyncClientHandle:
    """The client ``MonolithSyncClient_<suffix>``; asking twice returns the same object.

    ``config`` gives the first targets and is used on creation only.
    """
    name = f"MonolithSyncClient_{name_suffix}"
    if isinstance(config, bytes):
        config = _parse(config)
    return _registry.get(name, lambda: SyncClientHandle(name, config=config))


def create_parameter_sync_clients(num_ps: int) -> list[SyncClientHandle]:
    """One client per parameter server, or the one client with the empty suffix when there is none."""
    if num_ps == 0:
        return [parameter_sync_client_from_config()]
    handles = []
    for index in range(num_ps):
        handle = parameter_sync_client_from_config(name_suffix=str(index))
        handle.device = "" if is_exporting_standalone() else f"/job:ps/task:{index}/device:CPU:0"
        handles.append(handle)
    return handles


def create_dummy_sync_client() -> SyncClientHandle:
    """The shared client that pushes nothing."""
    return _registry.get("MonolithDummySyncClient", lambda: DummySyncHandle("MonolithDummySyncClient"))


def _parse(config_bytes: bytes) -> ClientConfig:
    try:
        return ClientConfig.FromString(bytes(config_bytes))
    except (DecodeError, TypeError) as error:
        raise invalid_argument(f"expected a serialised ClientConfig, got {len(config_bytes)} bytes: {error}") from None


class ParameterSyncClient:
    """A handle's operations."""

    def __init__(self, handle: SyncClientHandle) -> None:
        self._handle = handle.handle if isinstance(handle, ParameterSyncClient) else handle

    @property
    def handle(self) -> SyncClientHandle:
        return self._handle

    def as_op(self) -> SyncClientHandle:
        """Forces creation, which the handle's existence already did."""
        return self._handle

    def create_sync_op(self, config_bytes: bytes | ClientConfig) -> list[str]:
        """Performs one sync round before it returns; the one element is the result as JSON.

        Raises:
            StatusError: invalid argument when the bytes are not a ``ClientConfig``; the empty bytes are one.
        """
        config = config_bytes if isinstance(config_bytes, ClientConfig) else _parse(config_bytes)
        return [result_json(self._handle.sync(config))]
