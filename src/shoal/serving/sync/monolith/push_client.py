"""`PushClient`: sends pushes to one target as plain Predict calls."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import json_format

from shoal.proto.serving.parameter_sync_pb2 import PushRequest, PushResponse, PushResult
from shoal.serving.predict import PREDICT, decode_response, fetch_signatures, model_spec
from shoal.serving.security import PUSH_MESSAGE_BYTES, ClientSecurity, open_channel
from shoal.serving.status import Code, StatusError, from_rpc_error
from shoal.serving.sync.push import INSTANCE, PushInfo, encode_push
from shoal.serving.sync.quantize import asked_by, encoders, fingerprint
from shoal.serving.sync.split import DeltaBatch

log = logging.getLogger(__name__)

REFUSALS = (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION)
"""A replica's answer to values in a form that it does not accept."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How a version of a replica's model wants values: alias -> codec, empty for plain floats."""

    codecs: Mapping[str, str] = field(default_factory=dict)
    version: int | None = None


class PushClient:
    """Pushes to one target over gRPC; a failed RPC becomes a response, never an exception.

    With ``quantize``, values are sent in the form that the target stores. The target is asked for it at the first push,
    and again after it refused a push or answered with another version.
    """

    def __init__(self, target: str, security: ClientSecurity | None = None, quantize: bool = False) -> None:
        self.target = target
        self.instance = ""
        """The process that answered last, if it said so."""
        self._quantize = quantize
        self._forms: dict[tuple[str, str], _Form] = {}
        self._security = security
        self._channel: Any = None
        self._open()
        self._logged = float("-inf")

    def push(
        self, request: PushRequest | DeltaBatch, touched_at: float | None = None, timeout: float | None = None
    ) -> PushResponse:
        """Send one part. ``touched_at``: Unix seconds of its oldest gradient; ``timeout`` caps the request's own."""
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
        """(number of fids, the error or None)."""
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
                log.warning("could not reopen the channel to %s: %s", self.target, error)
                return total, status
            if not again or time.monotonic() >= end:
                return total, status
            again = False

    def _open(self) -> None:
        """Replace the channel with a new one; keep the old one if no new one can be opened."""
        former, self._channel = self._channel, open_channel(self.target, PUSH_MESSAGE_BYTES, self._security)
        self._predict = self._channel.unary_unary(PREDICT)
        if former is not None:
            former.close()

    def _notice_version(self, answer: bytes, form: _Form) -> None:
        """Forget the form of values if another version answered than the one that was asked."""
        if self._forms and decode_response(answer)[0].version.value != form.version:
            self._forms.clear()

    def _form(self, batch: DeltaBatch, end: float) -> _Form:
        """The form in which the replica wants values. Asks if it is unknown; plain floats if there is no answer."""
        key = (batch.model_name, batch.signature_name)
        if self._quantize and key not in self._forms:
            left = min(1.0, max(0.001, end - time.monotonic()))
            try:
                spec, signatures = fetch_signatures(self._channel, model_spec(batch.model_name), left)
            except grpc.RpcError as error:
                log.info("%s did not report its codecs (%r); sending rows as floats", self.target, error)
                return _Form()
            self._forms[key] = _Form(asked_by(signatures[batch.signature_name]), spec.version.value)
        return self._forms.get(key, _Form())

    def close(self) -> None:
        self._channel.close()


def result_json(result: PushResult) -> str:
    """The result as JSON with the fields' proto names; fields that were set are printed even at their default."""
    return json_format.MessageToJson(result, preserving_proto_field_name=True)
