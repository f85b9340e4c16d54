"""Touched rows in another process: a trainer offers them, `shoal sync` fetches and pushes them.

The trainer's model server gets two signatures under one model name: ``touched`` returns the touched ids, ``lookup``
their current rows. A follower acknowledges ids when every replica has their rows; until then they are held, and if the
follower dies, the next one gets them.
"""

import logging
import threading
import time
from typing import Any

import grpc
import torch

from shoal.errors import ConfigError
from shoal.metrics import emit_counter
from shoal.serving.export.manifest import SignatureSpec, TensorSpec
from shoal.serving.predict import PREDICT, decode_response, encode_request, fetch_signatures, model_spec
from shoal.serving.security import ClientSecurity, open_channel
from shoal.serving.server.servable import Servable, Signature, Tensors
from shoal.serving.status import StatusError, from_rpc_error
from shoal.serving.sync.history import History
from shoal.serving.sync.monolith.handle import SyncClientHandle
from shoal.serving.sync.monolith.touched import CAPACITY
from shoal.serving.tensors import decode_tensor, encode_tensor
from shoal.stamps import Stamp

log = logging.getLogger(__name__)

MULTI = "/touched"


class SyncSource:
    """Offers the trained ids of a sync client's tables on a ``ModelServer`` of this process.

    The client must not run its own rounds: ids go to whoever takes them first. At most 2,097,153 ids are held for
    followers that do not acknowledge them; beyond that the oldest are dropped, counted in ``touched_key_set_dropped``.

    Args:
        server: the ``ModelServer``.
        handle: the client that the tables are attached to.
        model_name: the name under which followers find them.
    """

    def __init__(self, server: Any, handle: SyncClientHandle, model_name: str = "trainer") -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._held = History(Stamp(0, 0), CAPACITY + 1)  # unacknowledged ids, by sequence number
        self._sequence = time.time_ns()  # larger than the numbers of earlier runs
        names = handle.table_names
        lookup = SignatureSpec(
            {name: TensorSpec("int64", [None]) for name in names},
            {name: TensorSpec("float", [None, dim]) for name, dim in names.items()},
        )
        touched = SignatureSpec(
            {"ack": TensorSpec("int64", []), "received": TensorSpec("int64", [])},
            {"sequence": TensorSpec("int64", []), **{f"{name}_id": TensorSpec("int64", [None]) for name in names}},
        )
        multi = handle.multi_table_name
        signatures = {
            "lookup": Signature(lookup, self._lookup),
            f"{multi or ''}{MULTI}": Signature(touched, self._touched, push=True),
        }
        server.publish(model_name, Servable(signatures))

    def _lookup(self, inputs: Tensors) -> Tensors:
        return {name: self._handle.lookup(name, ids) for name, ids in inputs.items()}

    def _touched(self, inputs: Tensors) -> Tensors:
        """Free ids up to number ``ack``; return those after ``received``, including those touched since."""
        delivered, received = int(inputs["ack"]), int(inputs["received"])
        with self._lock:
            if delivered <= self._sequence:
                self._held.forget(Stamp(0, delivered))
            fresh, _ = self._handle.touched.steal()
            if fresh:
                self._sequence += 1
                if dropped := self._held.add(Stamp(0, self._sequence), fresh):
                    name = self._handle.name
                    emit_counter("touched_key_set_dropped", dropped, f"name={name}")
                    log.warning("%s: %d unacknowledged ids were dropped because the limit was reached", name, dropped)
            known = Stamp(0, received if received <= self._sequence else 0)
            wanted = self._held.since(max(known, self._held.floor)) or {}
            result: Tensors = {"sequence": torch.tensor(self._sequence, device="cpu")}
        for number, name in enumerate(self._handle.table_order):
            ids = wanted.get(number)
            result[f"{name}_id"] = (
                torch.from_numpy(ids) if ids is not None else torch.empty(0, dtype=torch.int64, device="cpu")
            )
        return result


class SourceFollower:
    """The other side of a :class:`SyncSource`: pulls its touched ids into a client of this process.

    Ids are acknowledged after the client's rounds have brought them to all of its targets.
    """

    def __init__(
        self, address: str, handle: SyncClientHandle, model_name: str, security: ClientSecurity | None
    ) -> None:
        if handle.is_dummy:
            raise ConfigError(f"{handle.name} pushes nothing, so it cannot follow {address}; pass another sync client")
        self.address, self._handle, self._model = address, handle, model_name
        self._channel = open_channel(address, security=security)
        self._predict = self._channel.unary_unary(PREDICT)
        self._ack = self._received = 0
        try:
            self._attach(self._signatures())
        except BaseException:
            self._channel.close()
            raise

    def _attach(self, signatures: Any) -> None:
        """Attach the tables that the source offers to the client."""
        touched = next((name for name in signatures if name.endswith(MULTI)), None)
        if touched is None:
            raise ConfigError(
                f"{self.address} does not offer touched rows as {self._model!r}; start a SyncSource there"
            )
        if "received" not in signatures[touched].inputs:
            raise ConfigError(f"the SyncSource at {self.address} runs an older version of shoal; upgrade the trainer")
        self._touched = touched
        outputs = signatures["lookup"].outputs
        self._dims = {name: info.tensor_shape.dim[1].size for name, info in sorted(outputs.items())}
        multi = touched[: -len(MULTI)]
        readers = [(name, dim, self._reader(name)) for name, dim in self._dims.items()]
        if multi:
            attached = self._handle.attach_multi_table(multi, readers) or []
        else:
            attached = [each for one in readers if (each := self._handle.attach_table(*one)) is not None]
        self._numbers = {name: number for name, (_, number) in zip(self._dims, attached, strict=True)}

    def pull(self) -> int:
        """Fetch the ids touched since the last pull or not acknowledged by any follower; returns their number."""
        outputs = self._ask()
        total = 0
        for name, number in self._numbers.items():
            ids = outputs[f"{name}_id"]
            self._handle.touched.keys.insert(ids, number)
            total += len(ids)
        self._received = int(outputs["sequence"])
        return total

    def _ask(self) -> Tensors:
        if not any(self._handle.waiting().values()):
            self._ack = self._received
        numbers = {"ack": self._ack, "received": self._received}
        return self._call(
            self._touched, {name: torch.tensor(number, device="cpu") for name, number in numbers.items()}, 30.0
        )

    def close(self) -> None:
        """Acknowledge the ids that the last round brought to all targets, and close the connection."""
        try:
            if self._received != self._ack:
                self._ask()  # the source keeps what it returns for the next follower
        except StatusError as error:
            log.warning(
                "could not acknowledge the delivered rows to %s (%s); they will be pushed again", self.address, error
            )
        finally:
            self._channel.close()

    def _reader(self, name: str) -> Any:
        empty = torch.empty(0, dtype=torch.int64, device="cpu")

        def lookup(ids: torch.Tensor) -> torch.Tensor:
            parts = []
            for part in ids.split(262144) if len(ids) else (ids,):
                inputs = {other: part if other == name else empty for other in self._dims}
                parts.append(self._call("lookup", inputs, 30.0)[name])
            return torch.cat(parts) if len(parts) > 1 else parts[0]

        return lookup

    def _call(self, signature: str, inputs: Tensors, timeout: float) -> Tensors:
        payload = encode_request(
            model_spec(self._model, signature), {alias: encode_tensor(value) for alias, value in inputs.items()}
        )
        try:
            answer = self._predict(payload, timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return {alias: decode_tensor(data) for alias, data in decode_response(answer)[1].items()}

    def _signatures(self) -> Any:
        try:
            return fetch_signatures(self._channel, model_spec(self._model), 30.0, wait_for_ready=True)[1]
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


def follow_source(
    address: str, handle: SyncClientHandle, model_name: str = "trainer", security: ClientSecurity | None = None
) -> SourceFollower:
    """Attach the tables that a trainer at ``address`` offers to ``handle``; call ``pull()`` before each round."""
    return SourceFollower(address, handle, model_name, security)
