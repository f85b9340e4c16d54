"""The sub-graphs that an entry calls; one prediction uses the same version of all of them."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from shoal.serving.client.addresses import address_table, route
from shoal.serving.client.remote import ONE_VERSION, RemotePredict, VersionMissing, rows_are_pushed
from shoal.serving.predict import fetch_signatures, model_spec
from shoal.serving.security import open_channel
from shoal.serving.status import unavailable

log = logging.getLogger(__name__)

ASK_SECS = 2.0


class SubGraphs:
    """Calls to the sub-graphs of one exported version.

    A server whose rows are updated by pushes, not by exports (live tables, ``latest_once``, no polling), is accepted
    with any version; every other server must have the version.

    Args:
        model_name: the model's name.
        versions: sub-graph -> the version to call; None = any version that is served.
        deadline_millis: the deadline of one call.
    """

    def __init__(self, model_name: str, versions: Mapping[str, int | None], deadline_millis: float) -> None:
        self.model_name, self._versions, self.deadline_millis = model_name, dict(versions), deadline_millis
        self._warned: set[str] = set()
        self._routed: tuple[Any, list[tuple[bytes, list[str]]]] | None = None

    def call(
        self, name: str, signature: str, inputs: Mapping[str, Any], outputs: Sequence[str], types: Sequence[Any]
    ) -> list[Any]:
        """The outputs of a signature of a sub-graph, in order."""
        return self.call_all({name: inputs}, signature, outputs, types)[name]

    def call_all(
        self, asked: Mapping[str, Mapping[str, Any]], signature: str, outputs: Sequence[str], types: Sequence[Any]
    ) -> dict[str, list[Any]]:
        """Like `call` for several sub-graphs concurrently, with one deadline: name -> outputs."""
        calls = {}
        try:
            for name, inputs in asked.items():
                version = self._versions.get(name)
                calls[name] = self._predict(name, signature, inputs, outputs, types, -1 if version is None else version)
                if len(asked) > 1:
                    calls[name].start()
            return {name: self._result(name, calls[name], signature, asked[name], outputs, types) for name in asked}
        except BaseException:
            for call in calls.values():  # nobody waits for the other calls now
                call.cancel()
            raise

    def _result(
        self, name: str, call: RemotePredict, signature: str, inputs: Mapping[str, Any], outputs: Sequence[str],
        types: Sequence[Any],
    ) -> list[Any]:  # fmt: skip
        version = self._versions.get(name)
        try:
            return call.result()[2]
        except VersionMissing as error:
            if not error.rows_are_pushed:
                raise unavailable(
                    f"{name} does not have version {version}, which this prediction uses: {error}"
                ) from None
        if name not in self._warned:
            self._warned.add(name)
            log.warning(
                "model %s: %s does not have version %s; using its current rows, because they are updated by pushes",
                self.model_name, name, version,
            )  # fmt: skip
        return self._predict(name, signature, inputs, outputs, types, -1).result()[2]

    def _predict(
        self, name: str, signature: str, inputs: Mapping[str, Any], outputs: Sequence[str], types: Any, version: int
    ) -> RemotePredict:
        return RemotePredict(
            list(inputs), list(inputs.values()), outputs,
            model_name=f"{self.model_name}:{name}", task=_task(name), old_model_name=name, model_version=version,
            max_rpc_deadline_millis=self.deadline_millis, signature_name=signature, output_types=types,
            one_version=version >= 0,
        )  # fmt: skip

    def routes(self, names: Sequence[str], signature: str) -> list[tuple[bytes, list[str]]] | None:
        """(serialised model spec, addresses) of sub-graphs; None if one was found without the required version."""
        if self._warned:
            return None
        table = address_table()
        addresses = table.addresses
        if self._routed is None or self._routed[0] is not addresses:
            made = []
            for name in names:
                sent, key = route(table, f"{self.model_name}:{name}", _task(name), name)
                spec = model_spec(sent, signature, self._versions.get(name))
                made.append((spec.SerializeToString(), list(addresses.get(key) or ())))
            self._routed = addresses, made
        return self._routed[1]

    def metadata(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """The metadata of calls to these sub-graphs."""
        return [(ONE_VERSION, "1")] if all(self._versions.get(name) is not None for name in names) else []

    def missing(self) -> str:
        """Why this version cannot predict yet; "" if every replica that answers has its sub-graph."""
        table = address_table()
        for name, version in self._versions.items():
            if version is None:
                continue
            sent, key = route(table, f"{self.model_name}:{name}", _task(name), name)
            answers = {address: _has(address, sent, version) for address in table.addresses.get(key) or ()}
            if without := sorted(address for address, answer in answers.items() if answer is False):
                return f"{name} at {', '.join(without)} does not have version {version}"
            if not any(answers.values()):
                return f"no replica of {name} answers"
        return ""


def _task(name: str) -> int:
    return int(name.rpartition("_")[2])


def _has(address: str, model: str, version: int) -> bool | None:
    """Whether a server has a version of a model, or does not need it because its rows are pushed; None = no answer."""
    with open_channel(address) as channel:
        try:
            fetch_signatures(channel, model_spec(model, "", version), ASK_SECS, metadata=((ONE_VERSION, "1"),))
        except grpc.RpcError as error:
            not_found = error.code() == grpc.StatusCode.NOT_FOUND  # pyrefly: ignore
            return rows_are_pushed(error) if not_found else None
    return True
