"""A push as a message: the Predict call that carries it, and its metadata."""

import contextvars
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.observe import audit
from shoal.proto.serving.parameter_sync_pb2 import PushRequest
from shoal.proto.serving.tf_serving_pb2 import PredictRequest
from shoal.serving.predict import encode_request, model_spec
from shoal.serving.status import invalid_argument
from shoal.serving.sync.split import DeltaBatch
from shoal.serving.tensors import tensor_chunks
from shoal.stamps import Stamp

TOUCHED_AT = "shoal-touched-at-ms"
"""Unix milliseconds of the oldest gradient in a push. A replica computes its lag from it."""

READ_AT = "shoal-read-at-ms"
"""Unix milliseconds by which the trainer's rows had been read. Rows of an export that was begun later are newer."""

CODEC = "shoal-codec"
"""The fingerprint of the values' codecs (`shoal.serving.sync.quantize.fingerprint`); absent for plain floats."""

INSTANCE = "shoal-instance"
"""Trailing metadata of an answer to a push: the process that took it."""

SOURCE, RUN, STEP, ROUND = "shoal-source", "shoal-run", "shoal-step", "shoal-round"
"""The push's source, its stamp, and its round; a push is applied when its round is complete."""

VERSION, REPLICA = "shoal-version", "shoal-replica"
"""The model version that a push is for, and the loading of that version, as a replica names them in its answer to a
hello. A replica that has another version or loading by then refuses the push; the trailing metadata has both."""

DELETED = "shoal-deleted"
"""Present if the push deletes its ids; it then has no values."""

HELLO, WEIGHTS, COMMIT = "shoal/hello", "shoal/weights", "shoal/commit"
"""Signatures that publishers call: what a replica has; a piece of the dense weights; the switch to a round."""

_MAX_DIGITS = 16
_RUN_DIGITS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PushInfo:
    """The metadata of one push; times are Unix seconds. Fields that the sender left out are 0 or ""."""

    touched_at: float = 0.0
    read_at: float = 0.0
    codec: str = ""
    source: str = ""
    run: int = 0
    step: int = 0
    round: str = ""
    version: int = 0
    replica: str = ""
    deleted: bool = False
    model: str = ""
    """The model, the caller and its address, as verified by the server, not as claimed by the sender."""
    identity: str = ""
    peer: str = ""

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.run, self.step)

    def record(self, version: int, **what: Any) -> None:
        """Write an audit line for this push, which was applied to a version."""
        audit.record(
            "push", who=self.identity, peer=self.peer, model=self.model, version=version, source=self.source,
            run=self.run or None, step=self.step or None, round=self.round, **what,
        )  # fmt: skip

    def metadata(self) -> list[tuple[str, str]]:
        """As gRPC sends it."""
        said = {
            TOUCHED_AT: math.floor(self.touched_at * 1000),
            READ_AT: math.ceil(self.read_at * 1000),
            CODEC: self.codec,
            SOURCE: self.source,
            RUN: self.run,
            STEP: self.step,
            ROUND: self.round,
            VERSION: self.version,
            REPLICA: self.replica,
            DELETED: int(self.deleted),
        }
        return [(key, str(value)) for key, value in said.items() if value]

    @classmethod
    def of(cls, metadata: Iterable[tuple[str, Any]]) -> "PushInfo":
        """Read a request's metadata; malformed values count as absent."""
        said = {key: value for key, value in metadata if isinstance(value, str)}
        return cls(
            touched_at=_number(said.get(TOUCHED_AT)) / 1000,
            read_at=_number(said.get(READ_AT)) / 1000,
            codec=said.get(CODEC, ""),
            source=said.get(SOURCE, ""),
            run=_number(said.get(RUN), _RUN_DIGITS),
            step=_number(said.get(STEP)),
            round=said.get(ROUND, ""),
            version=_number(said.get(VERSION), _RUN_DIGITS),
            replica=said.get(REPLICA, ""),
            deleted=bool(_number(said.get(DELETED))),
        )


def _number(text: str | None, digits: int = _MAX_DIGITS) -> int:
    return int(text) if text and text.isdecimal() and len(text) <= digits else 0


push_info: contextvars.ContextVar[PushInfo] = contextvars.ContextVar("shoal_push_info", default=PushInfo())  # noqa: B039  (it is frozen)
"""The metadata of the push that is being applied."""


def push_request_to_predict(request: PushRequest) -> tuple[PredictRequest, int]:
    """(the Predict call that carries a push, its number of fids).

    Single tables: inputs ``T_id`` and ``T_value`` for every table T, also for those without fids. Multi-table:
    ``id``, ``id_split`` and ``flat_value``, tables one after another. A table without ``dim_size`` has as many columns
    as each of its fids has values.

    Raises:
        StatusError: invalid argument, when a table's values do not match its fids.
    """
    try:
        batch = DeltaBatch.of(request)
    except ValueError as error:
        raise invalid_argument(f"push to {request.model_name!r}: {error}") from None
    payload, total = encode_push(batch)
    return PredictRequest.FromString(payload), total


def encode_push(batch: DeltaBatch, codecs: dict[str, Any] | None = None) -> tuple[bytes, int]:
    """(serialised PredictRequest, number of fids). ``codecs`` maps an alias to an encoder of its float32 array."""
    inputs: dict[str, Any] = {}
    counts = batch.counts()
    codecs = codecs or {}
    if batch.multi:
        ids = [delta.fids for delta in batch.deltas]
        flat = [np.ascontiguousarray(delta.values).reshape(-1) for delta in batch.deltas]
        encode = codecs.get("flat_value")
        inputs["id"] = tensor_chunks(np.concatenate(ids) if ids else np.empty(0, np.int64))
        inputs["id_split"] = tensor_chunks(np.cumsum([0, *counts], dtype=np.int64))
        if encode is not None:
            inputs["flat_value"] = encode(flat)
        else:
            inputs["flat_value"] = tensor_chunks(np.concatenate(flat) if flat else np.empty(0, np.float32))
    else:
        for delta in batch.deltas:
            encode = codecs.get(f"{delta.unique_id}_value", tensor_chunks)
            inputs[f"{delta.unique_id}_id"] = tensor_chunks(np.ascontiguousarray(delta.fids))
            inputs[f"{delta.unique_id}_value"] = encode(np.ascontiguousarray(delta.values))
    return encode_request(model_spec(batch.model_name, batch.signature_name), inputs), sum(counts)
