"""TF-Serving's REST form, metrics, health and the status page, over plain HTTP or TLS."""

import json
import logging
import re
import ssl
import threading
import zlib
from collections.abc import Callable
from typing import Any

from google.protobuf import json_format

from shoal.errors import ConfigError
from shoal.proto.serving.tf_serving_pb2 import ModelSpec
from shoal.serving.net_utils import split_address
from shoal.serving.predict import Asked
from shoal.serving.server.admission import Overloaded
from shoal.serving.server.rest.json import columns_of, plain, raw_columns, tensors_of
from shoal.serving.server.rest.pool import PooledHandler, PooledHttpServer
from shoal.serving.server.rest.status_page import PAGE, metrics_text, snapshot
from shoal.serving.server.trained import FeatureSignature
from shoal.serving.status import Code, StatusError, invalid_argument, not_found, unavailable

log = logging.getLogger(__name__)

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


class RestServer:
    """The HTTP side of a ``ModelServer``."""

    def __init__(self, server: Any, address: str) -> None:
        server.security.check_bind(address)
        host, port = split_address(address)
        handler = type("Handler", (_Handler,), {"owner": server})
        context = None
        if server.security.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(server.security.certificate, server.security.key)
            if server.security.client_ca is not None:
                context.load_verify_locations(server.security.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        try:
            self._http = PooledHttpServer((host, port), handler, context)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from None
        self.port = self._http.port
        self._thread = threading.Thread(target=self._http.serve_forever, name="shoal-rest", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._http.stop()
            self._thread.join(timeout=10)
        self._http.close()


class _Handler(PooledHandler):
    owner: Any
    protocol_version = "HTTP/1.1"
    server_version = "shoal"
    sys_version = ""

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    # --- the frame --------------------------------------------------------------------------------------------------

    def _answer(self, make: Any) -> None:
        try:
            status, kind, body = 200, *make()
        except StatusError as error:
            status, kind = _HTTP.get(Code(error.code), 500), "application/json"
            status = 429 if isinstance(error, Overloaded) else status
            body = json.dumps({"error": error.message}).encode()
        except Exception as error:
            log.exception("%s failed", self.path)
            status, kind, body = 500, "application/json", json.dumps({"error": str(error)}).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        if kind.startswith("text/html"):
            self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline'")
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if status == 429:
            self.send_header("Retry-After", "1")
        if status >= 400:  # what is left of the body was not read
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.refused = status >= 400 and self.command == "POST"

    def _identify(self) -> str:
        bearer = self.headers.get("Authorization", "")
        bearer = bearer[len("Bearer ") :] if bearer.startswith("Bearer ") else ""
        name = ""
        if isinstance(self.connection, ssl.SSLSocket) and (certificate := self.connection.getpeercert()):
            subject = dict(pair for group in certificate.get("subject", ()) for pair in group)  # pyrefly: ignore
            name = subject.get("commonName", "")
        identity = self.owner.security.identify(bearer, name)
        if identity is None:
            raise StatusError(Code.UNAUTHENTICATED, "no known token; send Authorization: Bearer …")
        return identity

    def _body(self) -> bytes:
        limit = self.owner.max_message_bytes
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise invalid_argument("the request must have a Content-Length")
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
            raise invalid_argument(f"the body is not {encoding}: {error}") from None
        if unpacker.unconsumed_tail:
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"the unpacked body must have at most {limit} bytes, got more")
        return data

    # --- routes -----------------------------------------------------------------------------------------------------

    def _get(self) -> tuple[str, bytes]:
        self.reading_since = None
        path = self.path.partition("?")[0]
        if path == "/healthz":
            if self.owner.stopping:
                raise unavailable("this server is stopping")
            return "text/plain", b"ok\n"
        if path == "/readyz":
            if why := self.owner.not_ready():
                raise unavailable(why)
            return "text/plain", b"ready\n"
        self._identify()
        if path == "/":
            return "text/html; charset=utf-8", PAGE
        if path == "/status.json":
            return "application/json", json.dumps(snapshot(self.owner)).encode()
        if path == "/metrics":
            import prometheus_client

            text = prometheus_client.generate_latest() + metrics_text(self.owner).encode()
            return prometheus_client.CONTENT_TYPE_LATEST, text
        spec, what = self._parse(path)
        if what == "/metadata":
            resolved, signatures = self.owner.metadata(spec)
            content = {
                "model_spec": json_format.MessageToDict(resolved, preserving_proto_field_name=True),
                "metadata": {"signature_def": json_format.MessageToDict(signatures, preserving_proto_field_name=True)},
            }
            return "application/json", json.dumps(content).encode()
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
        return "application/json", json.dumps({"model_version_status": rows}).encode()

    def _post(self) -> tuple[str, bytes]:
        identity = self._identify()
        spec, what = self._parse(self.path.partition("?")[0])
        if what != ":predict":
            raise not_found(f"there is no route POST {self.path}; use /v1/models/NAME:predict")
        try:
            request = json.loads(self._body())
        except (ValueError, RecursionError) as error:
            raise invalid_argument(f"the body is not JSON: {error}") from None
        if not isinstance(request, dict) or ("instances" in request) == ("inputs" in request):
            raise invalid_argument("the body must be an object with either instances (rows) or inputs (columns)")
        spec.signature_name = str(request.get("signature_name", ""))
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
            return "application/json", json.dumps({"outputs": next(iter(values.values())) if only else values}).encode()
        if only:
            return "application/json", json.dumps({"predictions": next(iter(values.values()))}).encode()
        lengths = {len(each) if isinstance(each, list) else None for each in values.values()}
        if len(lengths) != 1 or None in lengths:
            raise invalid_argument(
                f"outputs {sorted(values)} do not have one row per instance; send inputs (columns) instead of instances"
            )
        joined = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        return "application/json", json.dumps({"predictions": joined}).encode()

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
