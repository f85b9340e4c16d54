"""One push as an RPC: the Predict call it becomes, the client that sends it, the JSON that reports it."""

import logging
import time
from typing import Any

import grpc
import numpy as np
from google.protobuf import json_format

from shoal.errors import DataError
from shoal.proto.serving.parameter_sync_pb2 import PushRequest, PushResponse, PushResult
from shoal.proto.serving.tf_serving_pb2 import GetModelMetadataRequest, GetModelMetadataResponse, PredictRequest
from shoal.serving.predict import GET_MODEL_METADATA, PREDICT, encode_request, model_spec
from shoal.serving.quantise import asked_by
from shoal.serving.security import PUSH_MESSAGE_BYTES, ClientSecurity, open_channel
from shoal.serving.split import DeltaBatch
from shoal.serving.status import Code, from_rpc_error, invalid_argument
from shoal.serving.tensors import tensor_chunks

log = logging.getLogger(__name__)

TOUCHED_AT = "shoal-touched-at-ms"
"""Metadata key: Unix milliseconds of the oldest gradient in a push, from which a replica tells its lag."""


INSTANCE = "shoal-instance"
"""Trailing metadata of an answer to a push: the process that took it."""


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
    """Pushes to one target over gRPC; a failed RPC becomes a response, never an exception."""

    def __init__(self, target: str, security: ClientSecurity | None = None, quantise: bool = False) -> None:
        self.target = target
        self.instance = ""
        """Which process answered last, when it says so."""
        self._quantise = quantise
        self._codecs: dict[tuple[str, str], dict[str, Any]] = {}
        self._security = security
        self._channel: Any = None
        self._reopen()
        self._logged = float("-inf")

    def push(
        self, request: PushRequest | DeltaBatch, touched_at: float | None = None, timeout: float | None = None
    ) -> PushResponse:
        """Sends one part. ``touched_at``: Unix seconds of its oldest gradient; ``timeout`` caps the request's own."""
        batch = DeltaBatch.of(request) if isinstance(request, PushRequest) else request
        payload, total = encode_push(batch, self._asked(batch.model_name, batch.signature_name))
        seconds = batch.timeout_in_ms / 1000
        metadata = [(TOUCHED_AT, str(int(touched_at * 1000)))] if touched_at is not None else None
        end = time.monotonic() + (seconds if timeout is None else min(seconds, timeout))
        for again in (False, True):
            try:
                _, call = self._predict.with_call(
                    payload, timeout=max(0.001, end - time.monotonic()), metadata=metadata
                )
                self.instance = dict(call.trailing_metadata() or ()).get(INSTANCE, "")
                break
            except grpc.RpcError as error:
                status = from_rpc_error(error)
            if status.code == Code.UNAVAILABLE:
                self._reopen()  # a channel that failed waits before it connects again; the server may be back
                if not again and time.monotonic() < end:
                    continue
            if time.monotonic() - self._logged > 10:
                self._logged = time.monotonic()
                log.warning("push to %s failed: %d %s", self.target, status.code, status.message)
            return PushResponse(status_code=status.code, error_message=status.message, update_num=0)
        return PushResponse(status_code=0, error_message="", update_num=total)

    def _reopen(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = open_channel(self.target, PUSH_MESSAGE_BYTES, self._security)
        self._predict = self._channel.unary_unary(PREDICT)

    def _asked(self, model: str, signature: str) -> dict[str, Any]:
        """How the replica wants values, asked once; plain floats where it does not answer."""
        if not self._quantise:
            return {}
        if (model, signature) not in self._codecs:
            request = GetModelMetadataRequest(metadata_field=["signature_def"])
            request.model_spec.name = model
            call = self._channel.unary_unary(
                GET_MODEL_METADATA, GetModelMetadataRequest.SerializeToString, GetModelMetadataResponse.FromString
            )
            try:
                self._codecs[model, signature] = asked_by(call(request, timeout=1.0), signature)
            except (grpc.RpcError, DataError) as error:
                log.info("%s did not say how it wants rows (%r); they go as floats", self.target, error)
                return {}
        return self._codecs[model, signature]

    def close(self) -> None:
        self._channel.close()


def result_json(result: PushResult) -> str:
    """The result as JSON with the fields' proto names; fields that were set are printed even at their default."""
    return json_format.MessageToJson(result, preserving_proto_field_name=True)
