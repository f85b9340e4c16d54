"""`Client`: predictions from a served model, whichever of its replicas answers."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from shoal.errors import ConfigError, DataError
from shoal.metrics import emit_counter, emit_timer
from shoal.observe import tracing
from shoal.observe.security import split_address
from shoal.proto.serving.tf_serving_pb2 import GetModelMetadataRequest, GetModelMetadataResponse, SignatureDefMap
from shoal.serving.client.caller import Caller
from shoal.serving.client.channels import Channels
from shoal.serving.client.columns import Column, Forms, columns_of, forms_of
from shoal.serving.client.joining import Joiner
from shoal.serving.client.replicas import RegistryWatch, ReplicaSet
from shoal.serving.cluster.registry import is_registry_address
from shoal.serving.loop import client_loop
from shoal.serving.predict import GET_MODEL_METADATA, PREDICT, decode_response, encode_request, model_spec
from shoal.serving.security import ClientSecurity, client_security
from shoal.serving.status import Code, StatusError, invalid_argument
from shoal.serving.tensors import decode_tensor, encode_tensor

MAX_CALL_BYTES = 16 * 1024 * 1024
"""A larger call is cut into parts; servers accept 32 MiB by default."""
SLACK_SECS = 5.0
"""How long a blocking call waits past its deadline for the event loop, which enforces deadlines."""


_CLOSED = "closed"


class _Target(NamedTuple):
    signature: str
    outputs: tuple[str, ...]


class Client:
    """Gets predictions from the replicas of one model. Safe to call concurrently from any thread and any event loop.

    ::

        with shoal.serving.Client("127.0.0.1:8500", model="ctr") as client:
            client.predict({"user": ["u17"], "age": [33]})["score"]    # a tensor with one row
            await client.predict_async({"user": ["u17"], "age": [33]})

    While ``max_in_flight`` calls per replica are in progress, further requests are joined into one call, and large ones
    are split, provided the server reports that each output row depends only on its own input row. Calls go to the
    replica with the fewest in progress. A failing or busy replica is skipped and tried again later, within the
    deadline: predictions only read, so they can be repeated. An invalid request fails at once and is not retried.
    Counters: ``shoal_client_requests``, ``shoal_client_retries``, ``shoal_client_errors``; timer:
    ``shoal_client_latency_seconds``.

    Args:
        servers: ``host:port`` of a gRPC port, a list of them, or a registry, whose current replicas are used:
            ``dir:///path``, ``zk://host:port,…``, the path of a folder, or a ``Registry``.
        model: the name under which the model is served.
        signature: the signature to call.
        version: the version to require; None = the newest that the replica has.
        deadline: time limit for one prediction including all attempts; a ``timedelta`` or seconds. Raise it when
            predictions fail with DEADLINE_EXCEEDED while replicas restart.
        retries: further attempts after the first; None = as many as the deadline allows.
        max_batch_rows: maximum rows per call; 1 disables joining and splitting.
        max_in_flight: calls in progress per replica before requests are joined.
        security: certificates and token to present; None = the process's ``set_client_security``.
        bzid: the business id in the registry.

    Raises:
        ConfigError: an argument is invalid, or the registry cannot be reached.
    """

    def __init__(
        self,
        servers: Any,
        *,
        model: str,
        signature: str = "serving_default",
        version: int | None = None,
        deadline: timedelta | float = timedelta(seconds=10),
        retries: int | None = None,
        max_batch_rows: int = 1024,
        max_in_flight: int = 4,
        security: ClientSecurity | None = None,
        bzid: str = "shoal",
    ) -> None:
        if not isinstance(model, str) or not model:
            raise ConfigError(f"Client: model must be the name under which the model is served, got {model!r}")
        if max_batch_rows < 1 or max_in_flight < 1 or (retries is not None and retries < 0):
            raise ConfigError(
                "Client: max_batch_rows and max_in_flight must be >= 1 and retries >= 0, got "
                f"{max_batch_rows}, {max_in_flight} and {retries}"
            )
        if version is not None and (type(version) is not int or not 0 <= version < 2**63):
            raise ConfigError(f"Client: version must be a whole number from 0 to 2**63 - 1, or None, got {version!r}")
        self.model, self.signature, self.version = model, signature, version
        self.deadline_s = _seconds(deadline)
        security = security or client_security()
        addresses, registry = _servers(servers, security)
        self._loop = client_loop()
        self._channels = Channels(security)
        self._replicas = ReplicaSet(addresses)
        self._caller = Caller(f"model {model!r}", self._channels, self._replicas, retries, self._why_none)
        self._joiner = Joiner(
            self._send, lambda: max_in_flight * max(1, len(self._replicas)), max_batch_rows, MAX_CALL_BYTES
        )
        self._forms: dict[str, Forms] = {}
        self._asking: set[asyncio.Task] = set()
        self._closed = False
        self._watch: RegistryWatch | None = None
        self._where = "the registry"
        if registry is not None:
            self._where = f"registry {registry}" if isinstance(registry, str) else "the registry"
            try:
                self._watch = RegistryWatch(registry, bzid, model, self._replicas_listed)
            except (OSError, TimeoutError) as error:
                raise ConfigError(f"Client: cannot reach {self._where}: {error}") from None
            except Exception as error:
                if type(error).__module__.startswith("kazoo"):
                    raise ConfigError(f"Client: cannot reach {self._where}: {error}") from None
                raise

    # --- predictions ------------------------------------------------------------------------------------------------

    def predict(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] = (),
        signature: str | None = None,
        deadline: timedelta | float | None = None,
    ) -> dict[str, Any]:
        """Return the model's outputs for some rows.

        Args:
            inputs: input name -> one value per row: lists, arrays or tensors of numbers, texts (sent as DT_STRING), or
                a list of values for each row. A single value is one row.
            outputs: the names of the outputs to return; by default all.

        Returns:
            Output name -> tensor, or an object array of bytes for strings.

        Raises:
            StatusError: with ``code`` and ``message``. For an invalid input (INVALID_ARGUMENT) it is also a ValueError.
        """
        seconds = self.deadline_s if deadline is None else _seconds(deadline)
        try:
            work = self._predict(inputs, tuple(outputs), signature or self.signature, seconds)
            return self._loop.call(work, seconds + SLACK_SECS)
        except TimeoutError:
            late = (
                f"model {self.model!r}: the client's event loop is not responding; is a fork or debugger blocking it?"
            )
            raise StatusError(Code.DEADLINE_EXCEEDED, late) from None

    async def predict_async(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] = (),
        signature: str | None = None,
        deadline: timedelta | float | None = None,
    ) -> dict[str, Any]:
        """:meth:`predict` for asyncio: never blocks, and cancelling the task cancels the request."""
        seconds = self.deadline_s if deadline is None else _seconds(deadline)
        work = self._predict(inputs, tuple(outputs), signature or self.signature, seconds)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop.loop))

    def replicas(self) -> dict[str, dict[str, Any]]:
        """address -> calls in flight, answers so far, failures since the last answer, and whether it is avoided now."""
        now = time.monotonic()
        return {
            each.address: {
                "in_flight": each.in_flight,
                "answers": each.answers,
                "failures": each.failures,
                "rests": each.rests_until > now,
            }
            for each in self._replicas
        }

    def close(self) -> None:
        """Cancel calls in progress (CANCELLED) and close the channels."""
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.stop()
        self._loop.loop.call_soon_threadsafe(self._end_calls)

    def _end_calls(self) -> None:
        for task in self._asking:
            task.cancel(_CLOSED)
        self._joiner.close()
        self._channels.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # --- on the loop ------------------------------------------------------------------------------------------------

    async def _predict(
        self, inputs: Mapping[str, Any], outputs: tuple[str, ...], signature: str, seconds: float
    ) -> dict[str, Any]:
        begin, code = time.monotonic(), 0
        named = {"shoal.model": self.model, "shoal.signature": signature}
        span = tracing.begin(f"predict {self.model}", "CLIENT", tracing.current(), attributes=named)
        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        try:
            if self._closed:
                raise asyncio.CancelledError(_CLOSED)
            async with asyncio.timeout(seconds):
                with tracing.inside(span):
                    return await self._answer(inputs, _Target(signature, outputs), begin + seconds)
        except asyncio.CancelledError as cancelled:
            if cancelled.args != (_CLOSED,):
                raise  # the caller has given up
            code = int(Code.CANCELLED)
            raise StatusError(code, f"the client of model {self.model!r} is closed") from None
        except TimeoutError:
            error = self._caller.too_late(seconds)
            code = error.code
            raise error from None
        except DataError as error:
            code = int(Code.INVALID_ARGUMENT)
            raise invalid_argument(f"model {self.model!r}: {error}") from None
        except StatusError as error:
            code = error.code
            raise StatusError(error.code, error.message) from None  # each caller gets a separate exception
        finally:
            self._asking.discard(task)
            span.finish(code)
            tags = f"model_name={self.model}"
            emit_counter("shoal_client_requests", 1, tags)
            emit_timer("shoal_client_latency_seconds", time.monotonic() - begin, tags)
            if code:
                emit_counter("shoal_client_errors", 1, f"{tags}|code={code}")

    async def _answer(self, inputs: Mapping[str, Any], target: _Target, end: float) -> dict[str, Any]:
        forms = self._forms.get(target.signature)
        if forms is None:
            forms = await self._ask_forms(target.signature, end)
        try:
            return await self._ask(target, inputs, forms, end)
        except StatusError as error:
            if error.code != Code.INVALID_ARGUMENT:
                raise
            fresh = await self._ask_forms(target.signature, end)
            if fresh == forms:
                raise  # the request is invalid
            return await self._ask(target, inputs, fresh, end)  # the model has changed

    async def _ask(self, target: _Target, inputs: Mapping[str, Any], forms: Forms, end: float) -> dict[str, Any]:
        return await self._joiner.ask(target, columns_of(inputs, forms.inputs), end, by_row=forms.by_row)

    async def _ask_forms(self, signature: str, end: float) -> Forms:
        """Fetch the signature's description: at the first request, and again when the model may have changed."""
        spec = model_spec(self.model, "", self.version)
        request = GetModelMetadataRequest(model_spec=spec, metadata_field=["signature_def"])
        answer, address = await self._caller.call(GET_MODEL_METADATA, request.SerializeToString(), end)
        signatures = SignatureDefMap()
        GetModelMetadataResponse.FromString(answer).metadata["signature_def"].Unpack(signatures)
        if signature not in signatures.signature_def:
            raise invalid_argument(
                f"model {self.model!r} at {address} has no signature {signature!r}; it has "
                f"{sorted(signatures.signature_def)}"
            )
        self._forms[signature] = forms_of(signatures.signature_def[signature])
        return self._forms[signature]

    async def _send(self, target: _Target, columns: dict[str, Column], end: float) -> dict[str, Column]:
        spec = model_spec(self.model, target.signature, self.version)
        payload = encode_request(
            spec, {alias: encode_tensor(column) for alias, column in columns.items()}, target.outputs
        )
        answer, address = await self._caller.call(PREDICT, payload, end)
        try:
            found = {alias: decode_tensor(data) for alias, data in decode_response(answer)[1].items()}
        except DataError as error:
            raise StatusError(Code.INTERNAL, f"model {self.model!r} at {address}: {error}") from None
        return {alias: each.clone() if isinstance(each, torch.Tensor) else each for alias, each in found.items()}

    # --- replicas ---------------------------------------------------------------------------------------------------

    def _replicas_listed(self, addresses: list[str]) -> None:
        self._loop.loop.call_soon_threadsafe(self._follow, addresses)

    def _follow(self, addresses: list[str]) -> None:
        busy = {each.address for each in self._replicas if each.in_flight}
        if self._replicas.replace(addresses):
            self._channels.keep({*addresses, *busy})  # calls in progress to a removed replica may finish
            self._caller.replicas_changed()

    def _why_none(self) -> str:
        models = ", ".join(self._watch.models) if self._watch is not None else ""
        return f"{self._where} lists no replica of this model; models with replicas: {models or 'none'}"


def _seconds(duration: timedelta | float) -> float:
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    if not 0 < seconds < 1e6:
        raise ConfigError(f"deadline must be a timedelta or seconds, above 0 and below 1,000,000 s, got {duration!r}")
    return seconds


def _servers(servers: Any, security: ClientSecurity | None) -> tuple[list[str], Any]:
    """(addresses, None) or ([], registry)."""
    if isinstance(servers, str) and not is_registry_address(servers):
        servers = [each.strip() for each in servers.split(",")]
    if isinstance(servers, str) or hasattr(servers, "watch_children") or hasattr(servers, "ChildrenWatch"):
        return [], servers
    addresses = list(dict.fromkeys(servers))
    if not addresses:
        raise ConfigError("Client: servers must be at least one host:port or a registry, got none")
    for address in addresses:
        if not isinstance(address, str):
            raise ConfigError(f"Client: a server must be 'host:port', got {address!r}")
        if "://" in address:
            raise ConfigError(
                f"Client: servers must be host:port of gRPC ports, or one registry (dir:///path, "
                f"zk://host:port), got {address!r}"
            )
        if not address.startswith("unix:"):
            split_address(address)
        if security is not None:
            security.check_token(address)
    return addresses, None
