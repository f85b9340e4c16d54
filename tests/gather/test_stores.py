"""One conformance suite for every store, and the tests of each: files on disk, S3 over HTTP with faults (moto)."""

import asyncio
import os
import threading

import pytest

from shoal.errors import ConfigError
from shoal.gather import (
    ArtifactReader,
    BucketRef,
    GatherConfig,
    GatherPlan,
    LocalDirStore,
    MemoryStore,
    ObjectChanged,
    S3Store,
    StoreError,
    dump_payload,
    gather,
    run_window,
    write_artifact,
)
from tests.gather.helpers import QUICK, WINDOW, model_of, payload, sgd, small_plan, small_spec, small_store

SPEC = small_spec()
DATA = {uid: dump_payload(payload(SPEC, uid)) for uid in (1, 2, 3)}
SECRET = "very-secret-key"


def await_(coroutine):
    return asyncio.run(coroutine)


def put(store, window, uid, data, **kwargs):
    done = store.put(window, uid, data, **kwargs)
    if asyncio.iscoroutine(done):
        await_(done)


async def read(store, window, uid, info, offset=0, **kwargs):
    return b"".join([block async for block in store.stream(window, uid, info, offset, **kwargs)])


# ---- a real S3 API on loopback


class Faults:
    """A WSGI layer in front of the server that breaks what the test asks for."""

    def __init__(self, app):
        self.app = app
        self.rule = None
        self.requests = []
        self.lock = threading.Lock()

    def __call__(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self.lock:  # requests are concurrent
            earlier = self.requests.count((method, path))
            self.requests.append((method, path))
        fault = self.rule(method, path, earlier) if self.rule else None
        if isinstance(fault, int):
            start_response(f"{fault} Fault", [("Content-Length", "0")])
            return [b""]
        if isinstance(fault, threading.Event):
            fault.wait(100)
        if fault == "truncate":
            body = b"".join(self.app(environ, start_response))
            return [body[: len(body) // 2]]  # the announced length stays; the connection ends early
        return self.app(environ, start_response)


@pytest.fixture(scope="module")
def s3():
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("obstore")
    boto3 = pytest.importorskip("boto3")
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *args, **kwargs):
            pass

    faults = Faults(server_module.DomainDispatcherApplication(server_module.create_backend_app))
    server = make_server("127.0.0.1", 0, faults, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="id", aws_secret_access_key=SECRET, region_name="us-east-1"
    )
    for bucket in ("artifacts", *(f"peer-{uid}" for uid in range(1, 7))):
        client.create_bucket(Bucket=bucket)
    yield endpoint, faults, client
    client.close()
    server.shutdown()
    server.server_close()
    thread.join(60)


def s3_store(endpoint, timeout_s=100, **kwargs):
    def ref(bucket):
        return BucketRef(bucket, endpoint, access_key_id="id", secret_access_key=SECRET)

    return S3Store({uid: ref(f"peer-{uid}") for uid in range(1, 8)}, ref("artifacts"), timeout_s=timeout_s, **kwargs)


@pytest.fixture(params=["memory", "local", "s3"])
def store(request, tmp_path):
    if request.param == "memory":
        return MemoryStore()
    if request.param == "local":
        return LocalDirStore(tmp_path / "root")
    endpoint, faults, _ = request.getfixturevalue("s3")
    faults.rule = None
    return s3_store(endpoint)


# ---- conformance


def test_absent_objects_are_none(store):
    assert await_(store.head(99, 1)) is None
    assert await_(store.open_artifact(99, "0")) is None


def test_what_was_put_is_read_from_any_offset(store):
    put(store, 1, 1, DATA[1])

    async def main():
        info = await store.head(1, 1)
        assert info.size == len(DATA[1])
        return await read(store, 1, 1, info), await read(store, 1, 1, info, 100)

    assert await_(main()) == (DATA[1], DATA[1][100:])


def test_a_replaced_object_is_not_read_for_the_old_one(store):
    put(store, 2, 1, DATA[1])

    async def main():
        info = await store.head(2, 1)
        await asyncio.to_thread(put, store, 2, 1, DATA[2])
        with pytest.raises(ObjectChanged):
            await read(store, 2, 1, info)
        fresh = await store.head(2, 1)
        assert fresh.etag != info.etag
        return await read(store, 2, 1, fresh)

    assert await_(main()) == DATA[2]


def test_artifacts_are_written_once(store, tmp_path):
    result = gather(small_plan(), SPEC, small_store(), config=QUICK)
    path, other = tmp_path / "a.pga", tmp_path / "b.pga"
    write_artifact(result, path, spec=SPEC)
    other.write_bytes(path.read_bytes() + b"x")
    window = 1000 + abs(hash(type(store).__name__)) % 1000

    async def main():
        await store.put_artifact(window, "1.0", path)
        await store.put_artifact(window, "1.0", path)
        with pytest.raises(StoreError) as caught:
            await store.put_artifact(window, "1.0", other)
        assert caught.value.permanent
        return await store.open_artifact(window, "1.0")

    reader = await_(main())
    assert isinstance(reader, ArtifactReader)
    assert reader.uids == result.uids


@pytest.mark.parametrize(
    "kwargs", [{"version": "../x"}, {"version": "a/b"}, {"key": "a b"}, {"key": ""}, {"uid": -1}, {"window": -1}]
)
def test_names_that_could_leave_their_place_are_refused(store, kwargs):
    names = {k: v for k, v in kwargs.items() if k in ("version", "key")}
    with pytest.raises(ConfigError):
        await_(store.head(kwargs.get("window", 1), kwargs.get("uid", 1), **names))


def test_a_gather_from_it(store):
    for uid in (1, 2, 3):
        put(store, WINDOW, uid, DATA[uid])
    config = GatherConfig(retry_interval_s=0.02, not_found_limit=2)
    result = gather(GatherPlan(WINDOW, [1, 2, 3, 4], timeout_s=50.0), SPEC, store, config=config)
    assert result.uids == [1, 2, 3]
    assert result.skip_reasons == {4: "not_found"}


# ---- a directory


def test_files_lie_where_the_format_says(tmp_path):
    store = LocalDirStore(tmp_path)
    store.put(5, 3, DATA[3], version="1.2", key="delta")
    path = tmp_path / "3" / "5" / "delta-5-3-v1.2.safetensors"
    assert path.read_bytes() == DATA[3]
    assert list(path.parent.iterdir()) == [path]
    os.utime(path, ns=(1_234_567_000, 1_234_567_000))
    assert await_(store.head(5, 3, version="1.2", key="delta")).mtime_us == 1_234_567
    (tmp_path / "4" / "5").mkdir(parents=True)
    (tmp_path / "4" / "5" / "gradient-5-4-v0.pt").write_bytes(dump_payload(payload(SPEC, 4), format="pt"))
    assert gather(GatherPlan(5, [4]), SPEC, store).skip_reasons == {4: "window_mismatch"}
    report = run_window(
        model_of(), sgd(model_of()), GatherPlan(9, [1]), spec=SPEC, store=_filled(tmp_path), config=QUICK
    )
    assert report.upload.wait(100)
    assert (tmp_path / "aggregator-9-v0.pga").exists()


def _filled(root):
    store = LocalDirStore(root)
    store.put(9, 1, dump_payload(payload(SPEC, 1, window=9)))
    return store


def test_an_upload_that_fails_is_counted_and_changes_nothing():
    class Broken(MemoryStore):
        async def put_artifact(self, window, version, path):
            raise StoreError("503")

    model = model_of()
    report = run_window(model, sgd(model), small_plan(), spec=SPEC, store=Broken(small_store().objects), config=QUICK)
    assert report.decision == "APPLY"
    assert report.upload.wait(100) is False
    assert report.upload.failures == 3
    assert report.artifact_sha256


# ---- S3 under faults


def test_s3_errors_are_told_apart(s3):
    endpoint, faults, _ = s3
    store = s3_store(endpoint)
    put(store, WINDOW, 5, DATA[1])

    def rule(method, path, n):
        if "peer-5/" in path:
            return 503 if n < 2 else None
        if "peer-6/" in path:
            return 403
        return None

    faults.rule = rule
    try:
        result = gather(GatherPlan(WINDOW, [5, 6, 7], timeout_s=100), SPEC, store, config=QUICK)
    finally:
        faults.rule = None
    assert result.uids == [5]
    assert result.skip_reasons == {6: "store_error", 7: "store_error"}  # no permission; no bucket peer-7
    assert result.record["retries"] >= 2


def test_s3_stalls_and_truncations_are_retried(s3):
    endpoint, faults, _ = s3
    for uid in (1, 2):
        put(s3_store(endpoint), WINDOW, uid, DATA[uid])
    over = threading.Event()

    def rule(method, path, n):
        if method != "GET" or f"/{WINDOW}/" not in path or n:
            return None
        return over if "peer-1/" in path else "truncate"

    faults.rule, faults.requests = rule, []
    try:
        store = s3_store(endpoint, timeout_s=2)
        result = gather(GatherPlan(WINDOW, [1, 2], timeout_s=100), SPEC, store, config=QUICK)
    finally:
        over.set()
        faults.rule = None
    assert result.uids == [1, 2]
    assert all(sum(m == "GET" and f"peer-{uid}/" in path for m, path in faults.requests) > 1 for uid in (1, 2))


def test_s3_reads_in_parts_and_notices_a_replacement_between_them(s3, monkeypatch):
    from shoal.gather.stores import s3 as module

    endpoint, faults, client = s3
    monkeypatch.setattr(module, "PART_BYTES", 300)
    store = s3_store(endpoint, max_parallel_parts=2)
    put(store, 11, 3, DATA[3])
    faults.rule, faults.requests = None, []
    info = await_(store.head(11, 3))
    assert await_(read(store, 11, 3, info)) == DATA[3]
    gets = [r for r in faults.requests if r[0] == "GET"]
    assert len(gets) == -(-len(DATA[3]) // 300)

    def rule(method, path, n):
        if method == "GET" and n == 2:
            faults.rule = None
            client.put_object(Bucket="peer-3", Key=info.location, Body=DATA[2])
        return

    faults.rule, faults.requests = rule, []
    with pytest.raises(ObjectChanged):
        await_(read(store, 11, 3, info))


def test_secrets_are_never_shown(s3, caplog):
    endpoint, faults, _ = s3
    store = s3_store(endpoint)
    faults.rule = lambda method, path, n: 403
    try:
        with caplog.at_level("DEBUG"):
            result = gather(GatherPlan(WINDOW, [1]), SPEC, store, config=GatherConfig())
    finally:
        faults.rule = None
    assert result.skip_reasons == {1: "store_error"}
    assert SECRET not in caplog.text + repr(store.peers) + str(result.record)
