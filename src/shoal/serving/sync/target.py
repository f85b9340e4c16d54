"""A publisher's connection to one replica: what it has, and how a round is sent to it in parts."""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import grpc
import numpy as np
import torch

from shoal.fid import distinct
from shoal.metrics import emit_counter, emit_timer
from shoal.serving.predict import PREDICT, decode_response, encode_request, fetch_signatures, model_spec
from shoal.serving.security import PUSH_MESSAGE_BYTES, ClientSecurity, open_channel
from shoal.serving.status import Code, StatusError, from_rpc_error
from shoal.serving.sync.history import Ids, merge
from shoal.serving.sync.push import COMMIT, HELLO, WEIGHTS, PushInfo, encode_push
from shoal.serving.sync.quantize import encoders, fingerprint, known
from shoal.serving.sync.split import Delta, DeltaBatch, sendable_parts
from shoal.serving.sync.weights import write_weights
from shoal.serving.tensors import decode_tensor, encode_tensor
from shoal.stamps import Stamp

log = logging.getLogger(__name__)

PART_BYTES = 1 << 20
"""Bytes of rows or weights in one message. Small, because a replica reads it on the thread that predicts."""
IN_FLIGHT = 4
STRANGERS = (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION, Code.UNIMPLEMENTED)
"""Status codes of servers that lack a signature."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A signature that takes rows: the (name, dim) of its tables, and alias -> codec of its values."""

    signature: str
    tables: tuple[tuple[str, int], ...]
    codecs: tuple[tuple[str, str], ...]
    slots: tuple[tuple[str, str], ...] = ()
    """(slot, table): other names of tables, by which features look rows up."""
    kind: Literal["single", "multi", ""] = ""
    """Of tables; "" where the signature's name says it."""

    @property
    def multi(self) -> bool:
        """Whether it takes the rows of one multi-table."""
        return self.kind == "multi" if self.kind else not self.signature.endswith("hashtable_assign")


@dataclass(frozen=True, slots=True)
class Session:
    """The state that a replica reports."""

    version: int
    replica: str
    complete: Stamp | None
    """It has all of the source's changes up to this stamp."""
    exported: Stamp | None
    """Its export has all of the source's changes up to this stamp."""
    layouts: tuple[Layout, ...]
    listed: Ids
    """Ids that must be sent again."""
    weights: Mapping[str, tuple[str, tuple[int, ...]]]
    """name -> (dtype, shape) of its net's weights."""
    plain: bool = False
    """Whether it takes only plain pushes: it does not support rounds, deletions or weights."""

    @classmethod
    def of(cls, said: Mapping[str, Any], ids: torch.Tensor) -> "Session":
        sizes = [size for _, size in said["listed"]]
        parts = ids.split(sizes)
        listed = merge(*({name: distinct(part.numpy())} for (name, _), part in zip(said["listed"], parts, strict=True)))
        layouts = tuple(
            Layout(
                name,
                tuple((table, int(dim)) for table, dim in each["tables"]),
                tuple(sorted((alias, codec) for alias, codec in each["codecs"].items() if codec and known(codec))),
                tuple(sorted(said.get("slots", {}).items())),
            )
            for name, each in sorted(said["signatures"].items())
        )
        return cls(
            int(said["version"]),
            str(said["replica"]),
            Stamp(*said["complete"]) if said["complete"] else None,
            Stamp(*said["exported"]) if said["exported"] else None,
            layouts,
            listed,
            {name: (dtype, tuple(shape)) for name, dtype, shape in said["weights"]},
        )


@dataclass(frozen=True, slots=True)
class Sent:
    """The outcome of a round at one replica."""

    ids: int = 0
    digest: str = ""
    """The digest of the weights that the replica has now."""
    left: Ids = field(default_factory=dict)
    """Ids in the source's tables that it did not take."""
    since: Stamp | None = None
    """Up to when it has everything but what is left, if that is not the round's stamp."""


class Wire(Protocol):
    """A publisher's protocol with one replica. Calls raise `StatusError`."""

    @property
    def address(self) -> str: ...

    def hello(self, source: str, run: int, base: Stamp | None, everything: bool, timeout: float) -> Session:
        """What the replica has; with ``everything``, all of its ids are listed, else those that a rollback changed."""
        ...

    def send(
        self, package: "Package", session: Session, digest: str, complete: bool, touched_at: float, timeout: float
    ) -> Sent:
        """Send a round.

        ``digest``: of the weights that it has, which are not sent again. ``complete``: whether the replica then lacks
        nothing up to the round's stamp. ``touched_at``: Unix time of the oldest change; 0 if unknown.
        """
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Package:
    """The content of a round for one or several replicas."""

    model: str
    source: str
    tables: Mapping[str, int]
    """name -> dim of the source's tables"""
    stamp: Stamp
    name: str
    rows: dict[str, tuple[np.ndarray, np.ndarray]]
    """table -> ids and float32 values ``[n, dim]``"""
    gone: Ids
    weights: Mapping[str, torch.Tensor] | None
    read_at: float
    _parts: dict[Any, list[tuple[bytes, str, bool, int]]] = field(default_factory=dict)
    _blobs: dict[Any, tuple[torch.Tensor, str]] = field(default_factory=dict)
    _making: threading.Lock = field(default_factory=threading.Lock)
    """Threads of several replicas ask for the same messages at once; the first one makes them."""

    def parts(self, layouts: tuple[Layout, ...]) -> list[tuple[bytes, str, bool, int]]:
        """(message, fingerprint of its codecs, whether these are deletions, ids) for replicas with these signatures."""
        with self._making:
            if layouts not in self._parts:
                self._parts[layouts] = list(self._make_parts(layouts))
            return self._parts[layouts]

    def _make_parts(self, layouts: tuple[Layout, ...]) -> Iterator[tuple[bytes, str, bool, int]]:
        places = places_of(layouts, self.tables)
        for layout in layouts:
            codecs = dict(layout.codecs)
            encode, mark = encoders(codecs), fingerprint(codecs)
            for gone in (False, True):
                for batch in self._batches(layout, places, gone):
                    payload, total = encode_push(batch, {} if gone else encode)
                    yield payload, "" if gone else mark, gone, total

    def _batches(self, layout: Layout, places: Mapping[str, "Place"], gone: bool) -> Iterator[DeltaBatch]:
        """The rows of a signature's tables, split into messages of about `PART_BYTES`."""
        multi = layout.multi
        empty = {name: (np.empty(0, np.int64), np.empty((0, dim), np.float32)) for name, dim in layout.tables}

        def batch(filled: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> DeltaBatch:
            made = DeltaBatch(self.model, layout.signature, 0, multi)
            made.deltas = [Delta(name, dim, *filled.get(name, empty[name])) for name, dim in layout.tables]
            return made

        current: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        room = PART_BYTES
        for name, dim in layout.tables:
            ids, values = self._of(places.get(name), dim, gone)
            each = 8 if gone else 8 + 4 * dim
            at = 0
            while at < len(ids):
                take = max(1, room // each)
                current[name] = (ids[at : at + take], values[:0] if gone else values[at : at + take])
                room -= len(current[name][0]) * each
                at += take
                if room < each:
                    yield batch(current)
                    current, room = {}, PART_BYTES
        if current:
            yield batch(current)

    def whole(self, layout: Layout, timeout_in_ms: int = 0) -> DeltaBatch:
        """All rows of a signature's tables as one plain push; deleted rows are zeros."""
        places = places_of((layout,), self.tables)
        made = DeltaBatch(
            self.model, layout.signature, timeout_in_ms, layout.multi, read_at=self.read_at
        )  # fmt: skip
        for name, dim in layout.tables:
            ids, values = self._of(places.get(name), dim, False)
            gone, _ = self._of(places.get(name), dim, True)
            if len(gone):
                ids = np.concatenate([ids, gone])
                values = np.concatenate([values, np.zeros((len(gone), dim), np.float32)])
            made.deltas.append(Delta(name, dim, ids, values))
        return made

    def _of(self, place: "Place | None", dim: int, gone: bool) -> tuple[np.ndarray, np.ndarray]:
        """The ids and values that go to a replica's table."""
        ids, values = np.empty(0, np.int64), np.empty((0, dim), np.float32)
        if place is not None:
            table, shard, shards = place
            if gone:
                ids = self.gone.get(table, ids)
            else:
                ids, values = self.rows.get(table, (ids, values))
            if shards > 1:
                own = np.mod(ids, shards) == shard
                ids, values = ids[own], values if gone else values[own]
        return ids, values

    def blob(self, session: Session) -> tuple[torch.Tensor, str] | None:
        """The weights that the replica's net has, in its dtypes, and their digest; None if it gets none."""
        if self.weights is None or not session.weights:
            return None
        key = tuple(sorted(session.weights.items()))
        with self._making:
            if key not in self._blobs:
                self._blobs[key] = write_weights(self._weights_for(session.weights, self.weights))
            return self._blobs[key]

    @staticmethod
    def _weights_for(wanted: Mapping[str, Any], given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, (_, shape) in wanted.items():
            if name not in given or tuple(given[name].shape) != shape:
                have = list(given[name].shape) if name in given else "none"
                raise StatusError(
                    Code.FAILED_PRECONDITION,
                    f"the replica's net has {name!r} of shape {list(shape)}, the source {have}; export the model again",
                )
        return {name: given[name].to(getattr(torch, dtype)) for name, (dtype, _) in wanted.items()}


Place = tuple[str, int, int]
"""(table of the source, shard, how many shards)"""


def places_of(layouts: tuple[Layout, ...], tables: Mapping[str, int]) -> dict[str, Place]:
    """A replica's table -> what of the source goes there: a table of that name, or slot, and dim, or the ids of one
    shard of it, ``<name>_<shard>``, where the export has one table for each parameter server."""
    dims = {name: dim for layout in layouts for name, dim in layout.tables}
    slots = {slot: name for layout in layouts for slot, name in layout.slots}
    found: dict[str, Place] = {}
    for name, dim in tables.items():
        there = name if name in dims else slots.get(name, name)
        if dims.get(there) == dim:
            found[there] = (name, 0, 1)
        elif there not in dims:
            shards = 0
            while dims.get(f"{name}_{shards}") == dim:
                shards += 1
            found |= {f"{name}_{shard}": (name, shard, shards) for shard in range(shards)}
    return found


class Target:
    """A connection to one replica. Calls raise `StatusError`."""

    def __init__(self, address: str, model: str, security: ClientSecurity | None = None) -> None:
        self.address, self._model, self._security = address, model, security
        self._channel: Any = None
        self._told = False
        self._open()

    def _open(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = open_channel(self.address, PUSH_MESSAGE_BYTES, self._security)
        self._predict = self._channel.unary_unary(PREDICT)

    def close(self) -> None:
        self._channel.close()

    def hello(self, source: str, run: int, base: Stamp | None, everything: bool, timeout: float) -> Session:
        """What the replica has; one that does not support rounds is asked for its signatures."""
        try:
            said, ids = self._hello(source, run, {"base": base, "all": everything}, timeout)
        except StatusError as error:
            if error.code not in STRANGERS:
                raise
            session = plain_session(self._channel, self._model, timeout, error)
            if not self._told:
                self._told = True
                log.warning(
                    "%s does not take rounds of pushes (%s): it is sent rows, with zeros for those that are gone, and "
                    "no weights; serve the model with this version of shoal to have all of it",
                    self.address, error.message,
                )  # fmt: skip
            return session
        session = Session.of(said, ids)
        for part in range(1, said["parts"]):
            more = {"base": base, "all": everything, "part": part, "parts": said["parts"]}
            listed = Session.of(*self._hello(source, run, more, timeout)).listed
            session = replace(session, listed=merge(session.listed, listed))
        return session

    def _hello(self, source: str, run: int, message: Mapping[str, Any], timeout: float) -> tuple[Any, torch.Tensor]:
        try:
            answer = self._call(HELLO, {"message": _bytes(message)}, PushInfo(source=source, run=run), timeout)
        except StatusError as error:
            if error.code == Code.UNAVAILABLE:
                self._open()  # a channel that failed waits before it connects again; the replica may be back
            raise
        return json.loads(bytes(answer["answer"].numpy())), answer["id"]

    def send(
        self, package: Package, session: Session, digest: str, complete: bool, touched_at: float, timeout: float
    ) -> Sent:
        """Sends a round and commits it."""
        begin = time.monotonic()
        rounds = self._send_plain if session.plain else self._send_round
        sent = rounds(package, session, digest, complete, touched_at, begin + timeout)
        tags = f"source={package.source}|model_name={self._model}|target={self.address}"
        emit_timer("parameter_sync_latency", (time.monotonic() - begin) * 1e6, tags)
        emit_counter("parameter_sync_fid_count", sent.ids, f"{tags}|status=OK")
        return sent

    def _send_plain(
        self, package: Package, session: Session, digest: str, complete: bool, touched_at: float, end: float
    ) -> Sent:
        calls: deque[Any] = deque()
        ids, info = 0, PushInfo(touched_at=touched_at, read_at=package.read_at)
        for layout in session.layouts:
            for part in sendable_parts(package.whole(layout), PART_BYTES):
                payload, total = encode_push(part)
                ids += total
                calls.append(self._begin(payload, info, end))
                _finish(calls, IN_FLIGHT)
        _finish(calls, 0)
        return Sent(ids)

    def _send_round(
        self, package: Package, session: Session, digest: str, complete: bool, touched_at: float, end: float
    ) -> Sent:
        common = {
            "source": package.source, "run": package.stamp.run, "step": package.stamp.step, "round": package.name,
            "version": session.version, "replica": session.replica, "touched_at": touched_at,
            "read_at": package.read_at,
        }  # fmt: skip
        counts = {False: 0, True: 0}
        calls: deque[Any] = deque()
        for payload, codec, gone, total in package.parts(session.layouts):
            counts[gone] += total
            calls.append(self._begin(payload, PushInfo(codec=codec, deleted=gone, **common), end))
            _finish(calls, IN_FLIGHT)
        blob = package.blob(session)
        fresh = blob is not None and blob[1] != digest
        if fresh:
            assert blob is not None
            size = torch.tensor(len(blob[0]), device="cpu")
            for at in range(0, len(blob[0]), PART_BYTES):
                piece = {
                    "size": size,
                    "offset": torch.tensor(at, device="cpu"),
                    "content": blob[0][at : at + PART_BYTES],
                }
                calls.append(self._begin(self._message(WEIGHTS, piece), PushInfo(**common), end))
                _finish(calls, IN_FLIGHT)
        _finish(calls, 0)
        message = {
            "rows": counts[False], "deleted": counts[True], "complete": complete,
            "weights": blob[1] if fresh and blob is not None else "",
        }  # fmt: skip
        self._call(COMMIT, {"message": _bytes(message)}, PushInfo(**common), max(0.001, end - time.monotonic()))
        return Sent(sum(counts.values()), blob[1] if blob is not None else digest)

    def _message(self, signature: str, inputs: Mapping[str, torch.Tensor]) -> bytes:
        return encode_request(
            model_spec(self._model, signature), {alias: encode_tensor(value) for alias, value in inputs.items()}
        )

    def _begin(self, payload: bytes, info: PushInfo, end: float) -> Any:
        return self._predict.future(payload, timeout=max(0.001, end - time.monotonic()), metadata=info.metadata())

    def _call(self, signature: str, inputs: Mapping[str, torch.Tensor], info: PushInfo, timeout: float) -> Any:
        try:
            answer = self._predict(self._message(signature, inputs), timeout=timeout, metadata=info.metadata())
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return {alias: decode_tensor(data) for alias, data in decode_response(answer)[1].items()}


def plain_session(channel: Any, model: str, timeout: float, refusal: StatusError) -> Session:
    """The session of a server without support for rounds, from its metadata.

    Raises:
        StatusError: it takes no rows, or does not say so; ``refusal`` is how it answered a hello.
    """
    try:
        spec, signatures = fetch_signatures(channel, model_spec(model), timeout)
    except grpc.RpcError:
        raise refusal from None  # it does not have the model, or does not have it yet
    name = "hashtable_assign"
    if name not in signatures:
        raise StatusError(
            refusal.code,
            f"it takes neither rounds of pushes ({refusal.message}) nor rows by a signature hashtable_assign; serve "
            "the model with this version of shoal",
        )
    tables = {
        alias.removesuffix("_value"): info.tensor_shape.dim[1].size
        for alias, info in signatures[name].inputs.items()
        if alias.endswith("_value") and len(info.tensor_shape.dim) == 2
    }
    layout = Layout(name, tuple(sorted(tables.items())), ())
    return Session(spec.version.value, "", None, None, (layout,), {}, {}, plain=True)


def _finish(calls: deque[Any], most: int) -> None:
    """Wait for the oldest calls until at most this many run. If one fails, cancel the others and raise its error."""
    while len(calls) > most:
        try:
            calls.popleft().result()
        except grpc.RpcError as error:
            for each in calls:
                each.cancel()
            raise from_rpc_error(error) from None


def _bytes(message: Mapping[str, Any]) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
