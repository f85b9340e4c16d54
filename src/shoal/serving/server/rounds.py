"""Rounds of pushes: their parts are held here until the round is complete; a servable then switches to it at once.

A publisher first sends a hello and learns what this replica has. Each part of a round names the version, and the
loading of it, that it is for; any other refuses it. The last call commits the round: rows, deletions and dense weights
become visible to the next batch, while a batch that is already running sees none of them.
"""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from shoal.errors import DataError
from shoal.serving.export.manifest import SignatureSpec, TensorSpec
from shoal.serving.server.hand_over import DROPPED, SUPERSEDED, count_rows, place_of
from shoal.serving.server.moments import Fresh
from shoal.serving.server.push_log import Mark
from shoal.serving.server.servable import Servable, Signature, TableView, Tensors
from shoal.serving.status import Code, StatusError, invalid_argument
from shoal.serving.sync.push import COMMIT, HELLO, REPLICA, VERSION, WEIGHTS, PushInfo, push_info
from shoal.serving.sync.weights import read_weights
from shoal.stamps import Stamp

log = logging.getLogger(__name__)

MAX_SOURCES = 4096
MAX_WEIGHT_BYTES = 1 << 36
MAX_LISTED = 2_000_000  # ids in one answer
MAX_PARTS = 1 << 32
_KINDS = {int: "an integer of 0 or more", str: "a string", bool: "true or false"}

T = TypeVar("T", int, str, bool)

Rows = tuple[TableView, int, torch.Tensor, torch.Tensor | None]
"""(table, sub-table number, distinct ids, their values; None = the rows are deleted)"""


@dataclass(slots=True)
class _Round:
    """The parts of a round received so far."""

    name: str
    rows: list[Rows] = field(default_factory=list)
    blob: torch.Tensor | None = None
    received: int = 0


class Rounds:
    """The incomplete rounds for one servable, one per source."""

    def __init__(self, servable: Servable) -> None:
        self._servable = servable
        self._open: dict[str, _Round] = {}
        self._lock = threading.Lock()
        servable.rounds = self
        self.signatures = self._signatures()
        """Signatures for publishers; the model's metadata does not list them."""

    def _signatures(self) -> dict[str, Signature]:
        size, message = TensorSpec("int64", []), TensorSpec("uint8", [None])
        ids = TensorSpec("int64", [None])
        weights = SignatureSpec({"size": size, "offset": size, "content": message}, {"received": size})
        return {
            name: Signature(spec, run, push=True)
            for name, spec, run in (
                (HELLO, SignatureSpec({"message": message}, {"answer": message, "id": ids}), self._hello),
                (WEIGHTS, weights, self._weights),
                (COMMIT, SignatureSpec({"message": message}, {"answer": message}), self._commit),
            )
        }

    # --- hello --------------------------------------------------------------------------------------------------------

    def _hello(self, inputs: Tensors) -> Tensors:
        """What this replica has from a source, and the ids that a rollback of the source made invalid.

        The message: ``base`` ([run, step] or null), ``all`` (list every id that has a row), ``part`` and ``parts``
        (list ids with ``id mod parts == part``). If there are too many ids for one answer, it lists those of part 0 and
        says how many ``parts`` to ask for.
        """
        info, servable, said = push_info.get(), self._servable, _read(inputs)
        base, everything = _base(said), _field(said, "all", bool, False)
        part, parts = _field(said, "part", int, 0), _field(said, "parts", int, 0)
        if not part < max(parts, 1) <= MAX_PARTS:
            raise invalid_argument(f"part must be less than parts, which is at most {MAX_PARTS}, got {part} of {parts}")
        with servable.push_lock:  # between two commits
            complete = servable.complete.get(info.source)
        listed: list[torch.Tensor] = []
        for view in servable.tables.values():
            for number in range(len(view.sub_tables)):
                if everything:
                    listed.append(view.ids_sub(number))
                else:
                    back = view.push_logs[number].pushed()
                    back = back.where(lambda mark: mark.stamp.run < info.run and (base is None or mark.stamp > base))
                    listed.append(torch.from_numpy(back.ids))
        parts = parts or -(-sum(map(len, listed)) // MAX_LISTED) or 1
        if parts > 1:
            listed = [ids[torch.remainder(ids, parts) == part] for ids in listed]
        exported = servable.stamps.get(info.source)
        answer = {
            "parts": parts,
            "version": servable.version,
            "replica": servable.token,
            "complete": complete,
            "exported": exported,
            "slots": {slot: sub for view in servable.tables.values() for slot, sub in view.slots.items()},
            "signatures": {
                name: {"tables": list(signature.tables), "codecs": dict(signature.hints or {})}
                for name, signature in servable.signatures.items()
                if signature.tables
            },
            "listed": [
                [sub, len(ids)]
                for sub, ids in zip(
                    (sub for view in servable.tables.values() for sub in view.sub_tables), listed, strict=True
                )
            ],
            "weights": [
                [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
                for name, value in (servable.program.weights if servable.program is not None else {}).items()
            ],
        }
        ids = torch.cat(listed) if listed else torch.empty(0, dtype=torch.int64, device="cpu")
        return {"answer": _write(answer), "id": ids}

    # --- parts --------------------------------------------------------------------------------------------------------

    def expect(self, info: PushInfo) -> None:
        """Raise FAILED_PRECONDITION, with the expected values, unless a push is for this servable."""
        servable = self._servable
        if (info.version, info.replica) == (servable.version, servable.token):
            return
        what = "another loading of it" if info.version == servable.version else f"version {info.version}"
        error = StatusError(
            Code.FAILED_PRECONDITION,
            f"the push is for {what}; this replica has version {servable.version} ({servable.token}); send hello again",
        )
        error.metadata = ((VERSION, str(servable.version)), (REPLICA, servable.token))
        raise error

    def stage(self, info: PushInfo, work: Sequence[Rows]) -> None:
        """Keep rows until their round is committed."""
        with self._lock:
            self._round(info).rows.extend(each for each in work if len(each[2]))

    def _round(self, info: PushInfo) -> _Round:
        if not info.source or not info.run:
            raise invalid_argument(f"a round must have a source and a run, got {info.source!r} and {info.run}")
        found = self._open.get(info.source)
        if found is None or found.name != info.round:  # an earlier round's leftovers are never completed
            if len(self._open) >= MAX_SOURCES:
                raise StatusError(
                    Code.RESOURCE_EXHAUSTED, f"{MAX_SOURCES} sources already have open rounds on this replica"
                )
            found = self._open[info.source] = _Round(info.round)
        return found

    def _weights(self, inputs: Tensors) -> Tensors:
        """Receive a piece of the dense weights."""
        info, content = push_info.get(), inputs["content"]
        self.expect(info)
        size, offset = int(inputs["size"]), int(inputs["offset"])
        if not 0 <= offset <= offset + len(content) <= size <= MAX_WEIGHT_BYTES:
            raise invalid_argument(
                f"a piece of weights must end within their {size} bytes, got {len(content)} bytes at {offset}"
            )
        with self._lock:
            mine = self._round(info)
            if mine.blob is None or len(mine.blob) != size:
                mine.blob, mine.received = torch.empty(size, dtype=torch.uint8, device="cpu"), 0
            blob = mine.blob
            mine.received += len(content)
        blob[offset : offset + len(content)] = content
        return {"received": torch.tensor(mine.received, device="cpu")}

    # --- commit -------------------------------------------------------------------------------------------------------

    def _commit(self, inputs: Tensors) -> Tensors:
        """Switch to a round if all of it has been received.

        The message: ``rows`` and ``deleted`` (numbers of ids), ``weights`` (their digest or ""), ``complete`` (whether
        this replica then has everything older from the source).
        """
        info, servable, said = push_info.get(), self._servable, _read(inputs)
        rows, deleted = _field(said, "rows", int), _field(said, "deleted", int)
        digest, complete = _field(said, "weights", str), _field(said, "complete", bool)
        self.expect(info)
        with self._lock:
            mine = self._round(info)
            del self._open[info.source]
        counts = [
            sum(len(ids) for _, _, ids, values in mine.rows if (values is None) == gone) for gone in (False, True)
        ]
        if counts != [rows, deleted]:
            raise StatusError(
                Code.DATA_LOSS,
                f"round {info.round} has {rows} rows and {deleted} deletions, but {counts[0]} and {counts[1]} have "
                "come; send it again",
            )
        weights = self._checked(mine, digest)
        mark = Mark(info.stamp, info.read_at or time.time(), info.source)
        with servable.push_lock:
            applied = apply_round(servable, mine.rows, weights, mark, complete)
            if servable.successor is not None:
                _apply_to_successor(servable.successor, mine.rows, weights, mark, complete)
        touched: dict[str, int] = {}
        for view, _, ids, _ in mine.rows:
            touched[view.name] = touched.get(view.name, 0) + len(ids)
        for name, count in touched.items():
            servable.tables[name].count_push(count, info.touched_at)
        info.record(servable.version, rows=rows, deleted=deleted, applied=applied, weights=bool(weights))
        return {"answer": _write({"applied": applied})}

    def _checked(self, mine: _Round, digest: str) -> dict[str, torch.Tensor] | None:
        if not digest:
            return None
        have = hashlib.sha256(mine.blob.numpy().data).hexdigest() if mine.blob is not None else "none"
        if have != digest:
            raise StatusError(
                Code.DATA_LOSS, f"the weights of round {mine.name} have digest {have}, not {digest}; send them again"
            )
        assert mine.blob is not None
        return read_weights(mine.blob)


def apply_round(
    servable: Servable, rows: Sequence[Rows], weights: dict[str, torch.Tensor] | None, mark: Mark, complete: bool
) -> int:
    """Make a round visible to the next batch, except for rows that are newer here; returns the number of rows.

    Call it under the push lock. If it raises for weights that do not fit, nothing has changed.
    """
    if servable.is_newer(mark) is False:
        for view, _, ids, _ in rows:
            count_rows(view.name, SUPERSEDED, len(ids))
        return 0
    net = None
    if weights is not None and (servable.weights is None or mark.stamp >= servable.weights.stamp):
        try:
            net = servable.program.bound(weights) if servable.program is not None else None
        except DataError as error:
            raise StatusError(Code.FAILED_PRECONDITION, f"version {servable.version}: {error}") from None
    kept = [each for each in (_newest(*each, mark) for each in rows) if len(each[2])]
    moments = servable.program.moments if servable.program is not None else None
    if moments is not None and (kept or net is not None):
        moments.switch(net, _over(kept))
    if net is not None:
        servable.weights = mark
    for view, number, ids, values in kept:
        if values is None:
            view.erase_sub(number, ids, mark)
        else:
            view.assign_sub(number, ids, values, mark)
    if moments is not None and kept:
        moments.switch(None, {})
    servable.refreshed(mark.read_at)
    if complete:
        servable.complete[mark.source] = max(mark.stamp, servable.complete.get(mark.source, mark.stamp))
    return sum(len(ids) for _, _, ids, _ in kept)


def _newest(view: TableView, number: int, ids: torch.Tensor, values: torch.Tensor | None, mark: Mark) -> Rows:
    """Drop the rows that were already pushed with a newer mark."""
    mask = view.push_logs[number].older(ids, mark)
    if mask is None:
        return view, number, ids, values
    count_rows(view.name, SUPERSEDED, int((~mask).sum()))
    return view, number, ids[mask], None if values is None else values[mask]


def _over(rows: Sequence[Rows]) -> dict[tuple[str, int], Fresh]:
    """The rows of a round as an overlay, used while they are written to the tables."""
    parts: dict[tuple[str, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for view, number, ids, values in rows:
        given = torch.zeros(len(ids), view.dims[number], device="cpu") if values is None else values
        parts.setdefault((view.name, number), []).append((ids, given))
    return {
        place: Fresh(torch.cat([ids for ids, _ in each]), torch.cat([values for _, values in each]))
        for place, each in parts.items()
    }


def _apply_to_successor(
    servable: Servable, rows: Sequence[Rows], weights: dict[str, torch.Tensor] | None, mark: Mark, complete: bool
) -> None:
    """Apply a round to the version about to take over; rows that do not fit it are counted as dropped."""
    placed: list[Rows] = []
    for view, number, ids, values in rows:
        where, into = place_of(servable, view, number)
        if into is None:
            count_rows(view.name, DROPPED, len(ids))
        else:
            placed.append((into, where, ids, values))
    try:
        apply_round(servable, placed, weights, mark, complete)
    except StatusError as error:
        log.info("the next version keeps its export's weights: %s", error)
        apply_round(servable, placed, None, mark, complete)


def _read(inputs: Tensors) -> dict[str, Any]:
    try:
        said = json.loads(bytes(inputs["message"].numpy()))
        if not isinstance(said, dict):
            raise ValueError(f"it must be an object, got {type(said).__name__}")
        return said
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"the message is not JSON: {error}") from None


def _field(said: dict[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """A field of a message; one without a default must be there."""
    value = said.get(name, default)
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise invalid_argument(f"{name} in the message must be {_KINDS[kind]}, got {json.dumps(value)[:80]}")
    return value


def _base(said: dict[str, Any]) -> Stamp | None:
    base = said.get("base")
    if base is None:
        return None
    if not isinstance(base, list) or [type(number) for number in base] != [int, int]:
        raise invalid_argument(f"base in the message must be [run, step] or null, got {json.dumps(base)[:80]}")
    return Stamp(*base)


def _write(answer: dict[str, Any]) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(answer).encode()), dtype=torch.uint8)
