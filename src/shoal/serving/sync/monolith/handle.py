"""A sync client: the tables that are attached to it, and its rounds of pushes."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.metrics import emit_counter
from shoal.proto.serving.parameter_sync_pb2 import ClientConfig, PushResult
from shoal.serving.status import Code, StatusError, invalid_argument
from shoal.serving.sync.monolith.manager import ROUND_BUDGET_SECS, SyncClientManager
from shoal.serving.sync.monolith.plain import Answers, PlainTarget, TouchedSource
from shoal.serving.sync.monolith.touched import CAPACITY, TouchedPairs
from shoal.serving.sync.publisher import Publisher
from shoal.serving.sync.target import Layout
from shoal.stamps import Stamp
from shoal.table.tracking.touched import TouchedKeySet

log = logging.getLogger(__name__)

_NEWEST = Stamp(1 << 62, 0)  # no target needs earlier changes


@dataclass(slots=True)
class _Attached:
    """One table, or one sub-table of the multi-table, as the client sees it."""

    name: str
    dim: int
    lookup: Callable[[torch.Tensor], torch.Tensor]


class SyncClientHandle:
    """The process-wide sync client with a given name, passed to tables as ``sync_client``.

    Attributes:
        name: the shared name.
        device: the device of the client's parameter server; empty if unknown.
    """

    def __init__(self, name: str, device: str = "", config: ClientConfig | None = None) -> None:
        self.name = name
        self.device = device
        self.manager = SyncClientManager()
        if config is not None:
            self.manager.try_replace(config.targets, config.targets_extra_info)
        self.touched = TouchedPairs(name)
        self.answers = Answers(ClientConfig(), Layout("", (), ()))
        """The answers of the current round."""
        self._exported: Stamp | None = None  # stamp of the last full export, from which new targets catch up
        self._source = TouchedSource(self)
        self._publisher = Publisher(
            self._source, lambda: self.manager.targets, model="", connect=lambda address: PlainTarget(address, self),
            history=CAPACITY + 1, timeout_s=ROUND_BUDGET_SECS, backlog_rows=1 << 62,
            forgot=lambda ids: emit_counter("touched_key_set_dropped", ids, f"name={self.name}"),
        )  # fmt: skip
        self._publisher.forget(_NEWEST)
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
        """Add a single table; returns the set that collects its trained ids, and its number in that set.

        Raises:
            StatusError: INVALID_ARGUMENT if a multi-table is attached, ALREADY_EXISTS if the name is taken.
        """
        with self._lock:
            if self._multi is not None:
                raise invalid_argument(
                    f"{self.name}: table {name!r} cannot join multi-table {self._multi!r}; give it its own client"
                )
            if name in self._numbers:
                raise StatusError(Code.ALREADY_EXISTS, f"{self.name}: a table named {name!r} is already attached")
            number = self._numbers[name] = len(self._tables)
            self._tables.append(_Attached(name, dim, lookup))
        return self.touched.keys, number

    def attach_multi_table(
        self, name: str, tables: Sequence[tuple[str, int, Callable[[torch.Tensor], torch.Tensor]]]
    ) -> list[tuple[TouchedKeySet, int]] | None:
        """Add the multi-table, given as (sub-table name, dim, lookup) in the order of names.

        Returns, per sub-table, the set that collects its trained ids, and its number in that set.

        Raises:
            StatusError: INVALID_ARGUMENT if single tables are attached, ALREADY_EXISTS for a second multi-table.
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

    # --- catching up ------------------------------------------------------------------------------------------------

    def catch_up(self, enable: bool = True) -> None:
        """Keep the ids touched since the last full export and push them once to each new target.

        A target that was restarted at the same address counts as new.
        """
        with self._round:
            self._exported = self._source.stamp if enable else None
            self._publisher.forget(self._exported or _NEWEST)

    def exported(self) -> None:
        """Report a full export: new replicas only need the changes from now on."""
        with self._round:
            if self.catches_up:
                self._exported = self._source.stamp
                self._publisher.forget(self._exported)

    @property
    def catches_up(self) -> bool:
        """Whether new targets get the ids touched since the last full export."""
        return self._exported is not None

    def newcomers_have(self) -> Stamp:
        """The stamp up to which a new target needs no changes."""
        if self._exported is None:
            return Stamp(self._source.stamp.run, self._source.stamp.step - 1)  # so that it gets this round
        return max(self._exported, self._publisher.floor)

    # --- rounds -----------------------------------------------------------------------------------------------------

    def sync(self, config: ClientConfig) -> PushResult:
        """Run one round: push the current rows of all touched ids to all targets of ``config``.

        While there is no target, ids are kept. Ids that a target did not accept are kept for its next round. Failed
        RPCs are reported in the result, not raised.
        """
        with self._round:
            self.manager.try_replace(config.targets, config.targets_extra_info)
            targets = self.manager.targets
            self._report_departed(targets)
            if not targets:
                self.touched.keys.report_dropped()
                self._publisher.forget_targets()
                return PushResult()
            answers = self.answers = Answers(config, self._layout(config))
            try:
                self._publisher.run()
            except Exception as error:
                raise invalid_argument(f"{self.name}: cannot build the push: {error}") from error
            if answers.failure is not None:
                raise answers.failure
            result = answers.result()
            if result.responses:
                rows = sum(each.update_num for each in result.responses)
                self._log("pushed %d rows to %d targets of %s", 60, rows, len(targets), config.model_name)
                self._log("responses: %s", 600, result)
            else:
                self._log("No updated FIDs!", 600)
            return result

    def _report_departed(self, targets: list[str]) -> None:
        """Count and log the ids that were missed by targets that are no longer in the list."""
        for target in self._publisher.status().targets:
            if target.target not in targets and target.waiting:
                emit_counter(
                    "parameter_sync_forgotten_fids", target.waiting, f"name={self.name}|target={target.target}"
                )
                log.info("%s: %s is no longer a target; the %d ids that it missed are forgotten",
                         self.name, target.target, target.waiting)  # fmt: skip

    def _layout(self, config: ClientConfig) -> Layout:
        """The signature that receives the rows, and its tables in order."""
        tables = [(table.name, table.dim) for table in self._tables]
        if self._multi is not None:
            return Layout(f"{self._multi}/raw_assign", tuple(tables), (), kind="multi")
        return Layout(config.signature_name, tuple(sorted(tables)), (), kind="single")

    def _log(self, text: str, every_secs: float, *args: Any) -> None:
        """Log a line, at most every ``every_secs`` seconds for each text."""
        now = time.monotonic()
        if now - self._logged.get(text, float("-inf")) >= every_secs:
            self._logged[text] = now
            log.info(text, *args)

    @property
    def freshness(self) -> dict[str, float]:
        """Target -> seconds from the oldest gradient in the last push until it was served."""
        return {one.target: one.freshness for one in self._publisher.status().targets if one.freshness is not None}

    def waiting(self) -> dict[str, int]:
        """Target -> number of ids that it missed; "" -> number of ids touched since the last round."""
        missed = {one.target: one.waiting for one in self._publisher.status().targets}
        return {"": len(self.touched), **{target: missed.get(target, 0) for target in self.manager.targets}}

    def close(self) -> None:
        """Close the connections."""
        self._publisher.close()
        self.manager.close()


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
