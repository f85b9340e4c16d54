"""`remote_predict`: one sub-graph calls another over TF-Serving's Predict, with deadline and failover."""

import contextlib
import contextvars
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import torch

from shoal.errors import DataError
from shoal.metrics import emit_counter, emit_timer
from shoal.observe import tracing
from shoal.serving.client.addresses import address_table, route
from shoal.serving.client.channels import Channels
from shoal.serving.client.native_calls import NativeChannels, can_call
from shoal.serving.predict import PREDICT, decode_response, encode_request, model_spec
from shoal.serving.security import client_security
from shoal.serving.status import Code, StatusError, from_rpc_error, invalid_argument, unavailable
from shoal.serving.tensors import decode_tensor, encode_tensor
from shoal.switches import env_int

ONE_VERSION = "shoal-one-version"
"""Metadata key of calls that are part of a prediction and must be answered by the version that they name."""
ROWS_PUSHED = "shoal-rows-pushed"
"""Trailing metadata of NOT_FOUND: this model's rows are updated by pushes, not by exports."""

_deadline: contextvars.ContextVar[float | None] = contextvars.ContextVar("shoal_request_deadline", default=None)


def set_request_deadline(seconds_left: float | None) -> contextvars.Token:
    """Set the deadline of remote calls for the rest of the current context; see :func:`request_deadline`."""
    return _deadline.set(None if seconds_left is None else time.monotonic() + seconds_left)


@contextlib.contextmanager
def request_deadline(seconds_left: float | None) -> Iterator[None]:
    """Context in which remote calls take no longer than the time left for the request being served. None = unknown."""
    token = set_request_deadline(seconds_left)
    try:
        yield
    finally:
        _deadline.reset(token)


class VersionMissing(StatusError):
    """No replica has the version that the call requires."""

    rows_are_pushed = False
    """Whether the rows of the replicas are updated by pushes."""


def rows_are_pushed(error: Any) -> bool:
    """Whether the failed call's server reports that its rows are updated by pushes."""
    return any(key == ROWS_PUSHED for key, _ in error.trailing_metadata() or ())


class _TableChannels:
    """The channels to the addresses in a table; channels to removed addresses are closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table: Any = None
        self._security: Any = None
        self._channels: Channels | NativeChannels | None = None

    def call(self, address: str, table: Any) -> Any:
        with self._lock:
            return self._current(table).call(address, PREDICT)

    def native(self, table: Any) -> NativeChannels | None:
        """The native client, or None if calls are made by gRPC."""
        with self._lock:
            channels = self._current(table)
            return channels if isinstance(channels, NativeChannels) else None

    def _current(self, table: Any) -> Channels | NativeChannels:
        if self._channels is None or client_security() is not self._security:  # the credentials have changed
            if self._channels is not None:
                self._channels.close()
            self._security = client_security()
            self._channels = NativeChannels(self._security) if can_call(self._security) else Channels()
        if table.addresses is not self._table:
            self._table = table.addresses
            self._channels.keep({each for group in self._table.values() for each in group})
        return self._channels


_channels = _TableChannels()


def native_caller() -> NativeChannels | None:
    """The native client for this process's remote calls; None if gRPC makes them."""
    return _channels.native(address_table())


def time_left(most: float) -> float:
    """Seconds that a remote call may take: ``most``, or the time left for the request being served if that is less."""
    limit = _deadline.get()
    return most if limit is None else max(0.0, min(most, limit - time.monotonic()))


def remote_predict(
    input_tensor_alias: Sequence[str],
    input_tensors: Sequence[Any],
    output_tensor_alias: Sequence[str],
    model_name: str,
    task: int,
    old_model_name: str | None,
    model_version: int = -1,
    fail_op_on_rpc_error: bool = True,
    max_rpc_deadline_millis: float = 30,
    output_types: Sequence[Any] | None = None,
    name: str | None = None,
    signature_name: str = "serving_default",
    *,
    retries: int = 2,
    one_version: bool = False,
) -> list[Any]:
    """Run a signature of a model on another server and return its outputs in the order of ``output_tensor_alias``.

    One address is picked at random from the process's table (``set_address_table``); if it is UNAVAILABLE, another is
    tried, at most ``retries`` times, all within one deadline: the smaller of ``max_rpc_deadline_millis`` and the time
    left for the request being served.

    Args:
        input_tensors: values that ``tensor_to_proto`` accepts, parallel to ``input_tensor_alias``.
        model_version: -1 means the newest available.
        fail_op_on_rpc_error: if False, a failed call returns a scalar zero per output.
        output_types: torch dtypes (``bytes`` for strings); None accepts whatever the server returns.
        one_version: the call is part of a prediction of ``model_version``: servers keep that version loaded while it is
            requested, and servers without it are skipped.

    Raises:
        StatusError: with the gRPC code of a failed call; UNAVAILABLE (14) when the table has no address.
    """
    return RemotePredict(
        input_tensor_alias, input_tensors, output_tensor_alias, model_name, task, old_model_name, model_version,
        fail_op_on_rpc_error, max_rpc_deadline_millis, output_types, name, signature_name, retries=retries,
        one_version=one_version,
    ).result()[2]  # fmt: skip


def remote_predict_with_status(
    input_tensor_alias: Sequence[str],
    input_tensors: Sequence[Any],
    output_tensor_alias: Sequence[str],
    model_name: str,
    task: int,
    old_model_name: str | None,
    model_version: int = -1,
    fail_op_on_rpc_error: bool = True,
    max_rpc_deadline_millis: float = 30,
    output_types: Sequence[Any] | None = None,
    name: str | None = None,
    signature_name: str = "serving_default",
    *,
    retries: int = 2,
    one_version: bool = False,
) -> tuple[int, str, list[Any]]:
    """Like :func:`remote_predict`, but returns ``(status_code, status_message, outputs)``."""
    return RemotePredict(
        input_tensor_alias, input_tensors, output_tensor_alias, model_name, task, old_model_name, model_version,
        fail_op_on_rpc_error, max_rpc_deadline_millis, output_types, name, signature_name, retries=retries,
        one_version=one_version,
    ).result()  # fmt: skip


class RemotePredict:
    """A call with the arguments of :func:`remote_predict`, which :meth:`start` sends and :meth:`result` waits for.

    Started calls run concurrently; the deadline of each counts from its construction.
    """

    def __init__(
        self,
        input_tensor_alias: Sequence[str],
        input_tensors: Sequence[Any],
        output_tensor_alias: Sequence[str],
        model_name: str,
        task: int,
        old_model_name: str | None,
        model_version: int = -1,
        fail_op_on_rpc_error: bool = True,
        max_rpc_deadline_millis: float = 30,
        output_types: Sequence[Any] | None = None,
        name: str | None = None,
        signature_name: str = "serving_default",
        *,
        retries: int = 2,
        one_version: bool = False,
    ) -> None:
        self._begin = time.monotonic()
        if model_name is None:
            raise ValueError("remote_predict: model_name must be specified (the empty string is allowed)")
        if len(input_tensor_alias) != len(input_tensors):
            raise invalid_argument(
                f"remote_predict: got {len(input_tensor_alias)} input aliases for {len(input_tensors)} input tensors"
            )
        if output_types is not None and len(output_tensor_alias) != len(output_types):
            raise invalid_argument(
                f"remote_predict: got {len(output_tensor_alias)} output aliases for {len(output_types)} output types"
            )
        self._aliases, self._types, self._fails = list(output_tensor_alias), output_types, fail_op_on_rpc_error
        self._signature = signature_name
        self._tags = f"model_name={model_name}|signature_name={signature_name}"
        table = address_table()
        self._sent, key = route(table, model_name, task, old_model_name)
        what = f"model {self._sent!r}, signature {signature_name!r}"
        if self._sent != model_name:
            what = f"model {self._sent!r} ({model_name!r}), signature {signature_name!r}"
        spec = model_spec(self._sent, signature_name, model_version if model_version >= 0 else None)
        inputs = {alias: encode_tensor(value) for alias, value in zip(input_tensor_alias, input_tensors, strict=True)}
        payload = encode_request(spec, inputs, output_tensor_alias)
        end = self._begin + max_rpc_deadline_millis / 1000
        if (limit := _deadline.get()) is not None:
            end = min(end, limit)
        self._attempts = _Attempts(table, key, what, payload, end, retries, self._tags, one_version)

    def start(self) -> "RemotePredict":
        """Send the request and return at once; :meth:`result` raises any error."""
        self._attempts.start()
        return self

    def cancel(self) -> None:
        """Cancel a call that was started but not waited for."""
        self._attempts.cancel()

    def result(self) -> tuple[int, str, list[Any]]:
        """``(status_code, status_message, outputs)``; raises as :func:`remote_predict` does."""
        try:
            try:
                answer = self._attempts.result()
            except StatusError as error:
                if self._fails:
                    raise
                kinds = self._types if self._types is not None else [torch.float32] * len(self._aliases)
                return error.code, error.message, [_zero(kind) for kind in kinds]
            return int(Code.OK), "", _outputs(answer, self._aliases, self._types, self._sent, self._signature)
        finally:
            emit_timer("remote_predict_op_latency", time.monotonic() - self._begin, self._tags)
            emit_counter("remote_predict_op_throughput", 1, self._tags)


_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def remote_predict_async(*args: Any, **kwargs: Any) -> Future:
    """:func:`remote_predict` in the completion pool; ``MONOLITH_GRPC_REMOTE_CALLBACK_THREADS`` (10) is its size."""
    global _pool
    with _pool_lock:
        if _pool is None:
            size = env_int("MONOLITH_GRPC_REMOTE_CALLBACK_THREADS", 10)
            _pool = ThreadPoolExecutor(max(1, size), "shoal-remote-predict")
    return _pool.submit(contextvars.copy_context().run, remote_predict, *args, **kwargs)


class _Attempts:
    """One request, sent to a key's addresses in turn within one deadline."""

    def __init__(
        self, table: Any, key: str, what: str, payload: bytes, end: float, retries: int, tags: str, one_version: bool
    ) -> None:
        self._table, self._key, self._what, self._payload, self._end, self._tags = table, key, what, payload, end, tags
        self._one_version = one_version
        self._span = tracing.begin(what, "CLIENT", tracing.current())
        self._metadata = (*(((ONE_VERSION, "1"),) if one_version else ()), *self._span.headers) or None
        self._tries = 1 + max(0, retries)
        self._addresses = list(table.addresses.get(key) or ())
        random.shuffle(self._addresses)
        self._first: Any = None  # the call to the first address, if start() sent it

    def start(self) -> None:
        left = self._end - time.monotonic()
        if not self._addresses or left <= 0:
            return
        try:
            call = _channels.call(self._addresses[0], self._table)
            self._first = call.future(self._payload, timeout=left, metadata=self._metadata)
        except ValueError:  # the channel was closed meanwhile: open it again
            self._first = None

    def cancel(self) -> None:
        if self._first is not None:
            self._first.cancel()
        self._span.finish(Code.CANCELLED, "cancelled")

    def result(self) -> bytes:
        try:
            answer = self._result()
        except StatusError as error:
            self._span.finish(error.code, error.message)
            raise
        self._span.finish()
        return answer

    def _result(self) -> bytes:
        if not self._addresses:
            known = ", ".join(sorted(self._table.addresses)) or "none"
            raise unavailable(f"no address serves {self._key!r} ({self._what}); keys of the address table: {known}")
        failure: StatusError | None = None
        for address in self._addresses:
            if not self._tries:
                break
            started, self._first = self._first, None
            left = self._end - time.monotonic()
            if left <= 0 and started is None:
                failure = failure or StatusError(
                    Code.DEADLINE_EXCEEDED, f"{self._what}: no time left to call {address}"
                )
                break
            start = time.monotonic()
            where = f"{self._what} at {address}"
            try:
                if started is not None:
                    return started.result()  # ends by its deadline
                call = _channels.call(address, self._table)
                return call(self._payload, timeout=left, metadata=self._metadata)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                text = f"{where}: {failure.message}"
                if self._one_version and failure.code == Code.NOT_FOUND:  # another replica may have it
                    failure = VersionMissing(failure.code, text)
                    failure.rows_are_pushed = rows_are_pushed(error)  # pyrefly: ignore
                    continue
                failure = StatusError(failure.code, text)
                if failure.code != Code.UNAVAILABLE:
                    break
                self._tries -= 1
            except (ValueError, grpc.FutureCancelledError) as error:  # the channel was closed because the table changed
                failure = unavailable(f"{where}: {error or 'the channel was closed'}")
                self._tries -= 1
            finally:
                emit_timer("serving_latency", time.monotonic() - start, self._tags)
        assert failure is not None
        raise failure


def _outputs(
    answer: bytes, aliases: Sequence[str], types: Sequence[Any] | None, sent: str, signature: str
) -> list[Any]:
    where = f"model {sent!r}, signature {signature!r}"
    try:
        _, outputs = decode_response(answer)
        results = []
        for index, alias in enumerate(aliases):
            if alias not in outputs:
                raise StatusError(
                    Code.INTERNAL, f"{where}: the response has no output {alias!r}; it has {sorted(outputs)}"
                )
            value = decode_tensor(outputs[alias])
            want = None if types is None else types[index]
            got = bytes if isinstance(value, np.ndarray) else value.dtype
            if want is not None and got != (bytes if want is str else want):
                raise StatusError(Code.INTERNAL, f"{where}: output {alias!r} is {got}, declared as {want}")
            results.append(value)
        return results
    except DataError as error:
        raise StatusError(Code.INTERNAL, f"{where}: {error}") from None


def _zero(kind: Any) -> Any:
    if kind in (bytes, str):
        scalar = np.empty((), object)
        scalar[()] = b""
        return scalar
    return torch.zeros((), dtype=kind, device="cpu")
