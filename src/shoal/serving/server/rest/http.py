"""TF-Serving's REST API, metrics, health and the status page, over plain HTTP or TLS."""

import json
import re
import zlib
from collections.abc import Callable
from typing import Any

from google.protobuf import json_format

from shoal.metrics import emit_counter
from shoal.observe.endpoint import JSON, Answer, HttpError, HttpPort, PageHandler
from shoal.observe.pool import MAX_CONNECTIONS, THREADS
from shoal.proto.serving.tf_serving_pb2 import ModelSpec
from shoal.serving.predict import Asked
from shoal.serving.server.admission import Overloaded
from shoal.serving.server.noting import Request
from shoal.serving.server.rest.json import columns_of, plain, raw_columns, tensors_of
from shoal.serving.server.rest.status_page import ShownServer
from shoal.serving.server.trained import FeatureSignature
from shoal.serving.status import Code, StatusError, invalid_argument, not_found
from shoal.serving.sync.push import PushInfo, push_info

_HTTP = {
    Code.INVALID_ARGUMENT: 400,
    Code.NOT_FOUND: 404,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 413,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
    Code.UNIMPLEMENTED: 501,
}
_PATH = re.compile(
    r"/v1/models/(?P<name>[^/]+?)(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?(?P<what>/metadata|:predict|:classify|:regress)?"
)


class RestServer(HttpPort):
    """The HTTP port of a ``ModelServer``."""

    def __init__(self, server: Any, address: str) -> None:
        super().__init__(
            address, ShownServer(server), server.security, _Handler, threads=THREADS, max_connections=MAX_CONNECTIONS,
            owner=server,
        )  # fmt: skip


class _Handler(PageHandler):
    owner: Any

    def do_POST(self) -> None:
        self.answer(self._post)

    def error_of(self, error: Exception) -> tuple[int, str, str]:
        if isinstance(error, StatusError):
            status = 429 if isinstance(error, Overloaded) else _HTTP.get(Code(error.code), 500)
            return status, JSON, error.message
        return super().error_of(error)

    def _body(self) -> bytes:
        limit = self.owner.max_message_bytes
        lengths = set(self.headers.get_all("Content-Length", ()))
        length = lengths.pop() if len(lengths) == 1 and "Transfer-Encoding" not in self.headers else ""
        if not (length.isascii() and length.isdecimal()):
            raise invalid_argument("the request must have one Content-Length, and no Transfer-Encoding")
        if int(length) > limit:
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"the body must have at most {limit} bytes, got {length}")
        data = self.rfile.read(int(length))
        self.reading_since = None
        encoding = self.headers.get("Content-Encoding", "identity").lower()
        if encoding == "identity":
            return data
        if encoding not in ("gzip", "deflate"):
            raise invalid_argument(f"Content-Encoding must be gzip, deflate or absent, got {encoding!r}")
        unpacker = zlib.decompressobj(wbits=47)
        try:
            data = unpacker.decompress(data, limit)
        except zlib.error as error:
            raise invalid_argument(f"the body is not valid {encoding}: {error}") from None
        if unpacker.unconsumed_tail:
            raise StatusError(
                Code.RESOURCE_EXHAUSTED, f"the decompressed body must have at most {limit} bytes, got more"
            )
        return data

    # --- routes -----------------------------------------------------------------------------------------------------

    def get(self, path: str, identity: str) -> Answer:
        spec, what = self._parse(path)
        if what == "/metadata":
            resolved, signatures = self.owner.metadata(spec)
            content = {
                "model_spec": json_format.MessageToDict(resolved, preserving_proto_field_name=True),
                "metadata": {"signature_def": json_format.MessageToDict(signatures, preserving_proto_field_name=True)},
            }
            return JSON, json.dumps(content).encode()
        if what:
            raise not_found(f"there is no route GET {path}; use POST")
        status = self.owner.status(spec)
        rows = [
            {
                "version": str(each.version),
                "state": each.DESCRIPTOR.enum_types_by_name["State"].values_by_number[each.state].name,
                "status": {"error_code": Code(each.status.error_code).name, "error_message": each.status.error_message},
            }
            for each in status.model_version_status
        ]
        return JSON, json.dumps({"model_version_status": rows}).encode()

    def identify(self) -> str:
        try:
            identity = super().identify()
        except HttpError as error:
            if error.status == 401:
                emit_counter("shoal_serving_unauthenticated", 1)
                self.owner.admit(None, self._peer())
            raise
        self.owner.admit(identity, self._peer())
        return identity

    def _peer(self) -> str:
        host, port = self.client_address[:2]
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def _post(self) -> Answer:
        headers = [(key.lower(), value) for key, value in self.headers.items()]
        with self.owner.noting.request("Predict", headers, self._peer(), system="http") as seen:
            try:
                return self._predict(seen)
            except StatusError as error:
                seen.failed(error.code, error.message)
                raise
            except HttpError as error:
                seen.failed(Code.UNAUTHENTICATED if error.status == 401 else Code.PERMISSION_DENIED, error.text)
                raise

    def _predict(self, seen: Request) -> Answer:
        identity = seen.identity = self.identify()
        spec, what = self._parse(self.path.partition("?")[0])
        if what != ":predict":
            raise not_found(f"there is no route POST {self.path}; use /v1/models/NAME:predict")
        body = self._body()
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise invalid_argument(f"the body is not JSON: {error}") from None
        if not isinstance(request, dict) or ("instances" in request) == ("inputs" in request):
            raise invalid_argument("the body must be an object with either instances (rows) or inputs (columns)")
        signature = request.get("signature_name") or ""
        if not isinstance(signature, str):
            raise invalid_argument(f"signature_name must be a string, got {signature!r}")
        spec.signature_name = signature
        seen.model, seen.signature = spec.name, spec.signature_name or "serving_default"
        push_info.set(PushInfo(model=spec.name, identity=identity, peer=seen.peer))
        with self.owner.use(spec) as version:
            servable = version.servable
            wanted = servable.signatures.get(spec.signature_name or "serving_default") if servable else None
        specs = wanted.spec.inputs if wanted is not None else {}
        rows = "instances" in request
        raw = isinstance(wanted, FeatureSignature)
        columns = columns_of(request["instances"], fill=raw) if rows else request["inputs"]
        if not isinstance(columns, dict):  # the only input need not be named
            columns = {next(iter(specs), ""): columns} if len(specs) == 1 else {"": columns}

        def read(check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
            tensors = raw_columns(columns) if raw else tensors_of(columns, specs, self.owner.max_message_bytes)
            check(tensors)
            return tensors

        _, outputs = self.owner.predict(Asked(spec, read, [], identity))
        values = {alias: plain(value) for alias, value in outputs.items()}
        only = len(values) == 1
        if not rows:
            return JSON, json.dumps({"outputs": next(iter(values.values())) if only else values}).encode()
        if only:
            return JSON, json.dumps({"predictions": next(iter(values.values()))}).encode()
        lengths = {len(each) if isinstance(each, list) else None for each in values.values()}
        if len(lengths) != 1 or None in lengths:
            raise invalid_argument(
                f"outputs {sorted(values)} do not have one row per instance; send inputs (columns) instead of instances"
            )
        joined = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        return JSON, json.dumps({"predictions": joined}).encode()

    def _parse(self, path: str) -> tuple[ModelSpec, str]:
        from urllib.parse import unquote

        found = _PATH.fullmatch(unquote(path))
        if found is None:
            raise not_found(
                f"there is no route {path}; routes are /, /metrics, /healthz, /readyz and /v1/models/NAME[/versions/N]"
            )
        spec = ModelSpec(name=found["name"])
        if found["version"]:
            if len(found["version"]) > 19 or int(found["version"]) >= 2**63:
                raise invalid_argument(f"a version must be below 2**63, got {found['version'][:40]}")
            spec.version.value = int(found["version"])
        elif found["label"]:
            spec.version_label = found["label"]
        return spec, found["what"] or ""
