"""One push as an RPC: the Predict call it becomes, the client that sends it, the JSON that reports it."""

import contextvars
import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from google.protobuf import json_format

from shoal.errors import DataError
from shoal.observe import audit
from shoal.proto.serving.parameter_sync_pb2 import PushRequest, PushResponse, PushResult
from shoal.proto.serving.tf_serving_pb2 import GetModelMetadataRequest, GetModelMetadataResponse, PredictRequest
from shoal.serving.predict import GET_MODEL_METADATA, PREDICT, decode_response, encode_request, model_spec
from shoal.serving.security import PUSH_MESSAGE_BYTES, ClientSecurity, open_channel
from shoal.serving.status import Code, StatusError, from_rpc_error, invalid_argument
from shoal.serving.sync.quantise import asked_by, encoders, fingerprint
from shoal.serving.sync.split import DeltaBatch
from shoal.serving.tensors import tensor_chunks
from shoal.stamps import Stamp

TOUCHED_AT = "shoal-touched-at-ms"
"""Unix milliseconds of the oldest gradient in a push. A replica computes its lag from it."""

READ_AT = "shoal-read-at-ms"
"""Unix milliseconds by which the trainer's rows had been read. Rows of an export that was begun later are newer."""

CODEC = "shoal-codec"
"""Which codecs the values are encoded with (`shoal.serving.sync.quantise.fingerprint`); absent for plain floats."""

INSTANCE = "shoal-instance"
"""Trailing metadata of an answer to a push: the process that took it."""

SOURCE, RUN, STEP, ROUND = "shoal-source", "shoal-run", "shoal-step", "shoal-round"
"""Who learnt what is pushed, how new it is, and the round that it is a part of: it is applied when that is whole."""

VERSION, REPLICA = "shoal-version", "shoal-replica"
"""The version of the model that a push is for, and the loading of it, which a replica names in its answer to a hello.
Where they are others by now, the push is refused, and the trailing metadata says which."""

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
    """The model, who pushes and from where: as the server knows them, not as the sender says."""
    identity: str = ""
    peer: str = ""

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.run, self.step)

    def record(self, version: int, **what: Any) -> None:
        """An audit line about this push, which was applied to a version."""
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
        """Reads a request's metadata; malformed values count as absent."""
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
"""Of the push that is being applied."""


log = logging.getLogger(__name__)

REFUSALS = (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION)
"""A replica's answer to values in a form that it does not accept."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How a version of a replica's model wants values: alias -> codec, empty for plain floats."""

    codecs: Mapping[str, str] = field(default_factory=dict)
    version: int | None = None


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


class PushClient:
    """Pushes to one target over gRPC; a failed RPC becomes a response, never an exception.

    With ``quantise`` values go in the form that the target stores. It is asked at the first push, and again after it
    has refused one or has answered as another version.
    """

    def __init__(self, target: str, security: ClientSecurity | None = None, quantise: bool = False) -> None:
        self.target = target
        self.instance = ""
        """The process that answered last, if it said so."""
        self._quantise = quantise
        self._forms: dict[tuple[str, str], _Form] = {}
        self._security = security
        self._channel: Any = None
        self._open()
        self._logged = float("-inf")

    def push(
        self, request: PushRequest | DeltaBatch, touched_at: float | None = None, timeout: float | None = None
    ) -> PushResponse:
        """Sends one part. ``touched_at``: Unix seconds of its oldest gradient; ``timeout`` caps the request's own."""
        batch = DeltaBatch.of(request) if isinstance(request, PushRequest) else request
        seconds = batch.timeout_in_ms / 1000
        end = time.monotonic() + (seconds if timeout is None else min(seconds, timeout))
        form = self._form(batch, end)
        total, status = self._send(batch, form, touched_at or 0.0, end)
        if status is not None and form.codecs and status.code in REFUSALS:
            self._forms.clear()
            now = self._form(batch, end)  # a version that stores rows in another form may have taken over
            if now.codecs != form.codecs:
                total, status = self._send(batch, now, touched_at or 0.0, end)
        if status is None:
            return PushResponse(status_code=0, error_message="", update_num=total)
        if time.monotonic() - self._logged > 10:
            self._logged = time.monotonic()
            log.warning("push to %s failed: %d %s", self.target, status.code, status.message)
        return PushResponse(status_code=status.code, error_message=status.message, update_num=0)

    def _send(self, batch: DeltaBatch, form: _Form, touched_at: float, end: float) -> tuple[int, StatusError | None]:
        """(number of fids, what went wrong)."""
        payload, total = encode_push(batch, encoders(form.codecs))
        info = PushInfo(touched_at=touched_at, read_at=batch.read_at, codec=fingerprint(form.codecs))
        again = True
        while True:
            left = max(0.001, end - time.monotonic())
            try:
                answer, call = self._predict.with_call(payload, timeout=left, metadata=info.metadata())
            except grpc.RpcError as error:
                status = from_rpc_error(error)
            else:
                self.instance = dict(call.trailing_metadata() or ()).get(INSTANCE, "")
                self._notice_version(answer, form)
                return total, None
            if status.code != Code.UNAVAILABLE:
                return total, status
            try:
                self._open()  # a channel that failed waits before it connects again; the server may be back
            except Exception as error:
                log.warning("the channel to %s could not be opened again: %s", self.target, error)
                return total, status
            if not again or time.monotonic() >= end:
                return total, status
            again = False

    def _open(self) -> None:
        """Replaces the channel by a new one; keeps the old one if no new one can be opened."""
        former, self._channel = self._channel, open_channel(self.target, PUSH_MESSAGE_BYTES, self._security)
        self._predict = self._channel.unary_unary(PREDICT)
        if former is not None:
            former.close()

    def _notice_version(self, answer: bytes, form: _Form) -> None:
        """Forgets the form of values if another version answered than the one that was asked."""
        if self._forms and decode_response(answer)[0].version.value != form.version:
            self._forms.clear()

    def _form(self, batch: DeltaBatch, end: float) -> _Form:
        """The form in which the replica wants values. Asks if it is unknown; plain floats if there is no answer."""
        key = (batch.model_name, batch.signature_name)
        if self._quantise and key not in self._forms:
            request = GetModelMetadataRequest(metadata_field=["signature_def"])
            request.model_spec.name = batch.model_name
            call = self._channel.unary_unary(
                GET_MODEL_METADATA, GetModelMetadataRequest.SerializeToString, GetModelMetadataResponse.FromString
            )
            try:
                response = call(request, timeout=min(1.0, max(0.001, end - time.monotonic())))
                codecs = asked_by(response, batch.signature_name)
            except (grpc.RpcError, DataError) as error:
                log.info("%s did not say how it wants rows (%r); they go as floats", self.target, error)
                return _Form()
            self._forms[key] = _Form(codecs, response.model_spec.version.value)
        return self._forms.get(key, _Form())

    def close(self) -> None:
        self._channel.close()


def result_json(result: PushResult) -> str:
    """The result as JSON with the fields' proto names; fields that were set are printed even at their default."""
    return json_format.MessageToJson(result, preserving_proto_field_name=True)
