"""Every reader of external bytes, with valid input to damage."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tempfile
import tomllib
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal import Adagrad, _core
from shoal.comm.ranks.serialization import deserialize_tensors, serialize_tensors
from shoal.data import Feature, Number, Schema
from shoal.data.formats import make_format
from shoal.data.raw import InputMaker
from shoal.durable.manifest import Saved, read_saved, write_saved
from shoal.errors import ConfigError, DataError, ShoalError
from shoal.gather import GradientSpec, PayloadRejected, QuantSpec, compress, dump_payload, validate_payload
from shoal.gather.payload.container import load_payload
from shoal.plan.config import load_plan
from shoal.serving.cluster.agent_config import read_config_file
from shoal.serving.export.features import LENGTHS
from shoal.serving.export.manifest import Manifest
from shoal.serving.predict import (
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    join_calls,
    model_spec,
)
from shoal.serving.server.rest.json import columns_of, raw_columns, tensors_of
from shoal.serving.server.trained import request_reader
from shoal.serving.status import StatusError
from shoal.serving.tensors import encode_tensor
from shoal.sharded.ps.protocol import Op, Reply, Request, Status, parse_reply, parse_request
from shoal.sharded.ps.server.log import HEAD_BYTES, Log, replay
from shoal.sharded.ps.server.table_spec import parse_spec
from shoal.table import EmbeddingHashTableConfig, HashTable
from shoal.testing.fuzz import Target
from shoal.train.loop.toml import load_config
from tests.fuzz.newer_targets import newer_targets
from tests.fuzz.serving_targets import http2, net_plan

SCHEMA = Schema(
    label="click",
    dense=("price", "age"),
    sparse=("user", "tags", "bucket", "word", "both"),
    definitions={
        "price": Number(log=True),
        "tags": Feature(list=True, separator="|", max_length=3),
        "bucket": Feature(kind="bucket", boundaries=(1.0, 10.0), column="age"),
        "word": Feature(kind="vocabulary", words=("a", "b"), unknown="hash", default="a"),
        "both": Feature(kind="cross", of=("user", "word")),
    },
)
PLAIN = Schema(label="click", dense=("price",), sparse=("user", "item"), time="time")


def _predict() -> Target:
    values = {
        "user": np.array([b"u1", b"u2"], dtype=object),
        "tags": np.array([[b"a", b"b"], [b"", b""]], dtype=object),
        "age": torch.tensor([3.0, 30.0]),
        "price": torch.tensor([1, 2]),
    }
    seeds = [
        encode_request(
            model_spec("ctr", "raw", 3), {name: encode_tensor(one) for name, one in values.items()}, ["logit"]
        ),
        encode_request(model_spec("ctr"), {"ids": encode_tensor(torch.arange(12).view(3, 4))}),
        encode_request(
            model_spec("m"), {"x": encode_tensor(torch.randn(2, 3).half()), "y": encode_tensor(torch.ones(2) > 0)}
        ),
    ]
    maker = InputMaker(SCHEMA)
    reader = request_reader(maker, [*maker.names])

    def read(data: bytes) -> None:
        made = reader.read([seeds[0], data])
        assert made.rows[0] == 2, made.rows
        dense = torch.empty(made.total, 2, device="cpu")
        ids = torch.empty(made.ids, dtype=torch.int64, device="cpu")
        offsets = torch.empty(made.lengths + 1, dtype=torch.int64, device="cpu")
        made.copy(dense.data_ptr(), ids.data_ptr(), offsets.data_ptr())
        call = decode_request(data)
        join_calls([call, call])
        call.tensors(lambda heads: None, 1 << 24)

    assert maker.columns["tags"] + LENGTHS not in maker.names
    return Target("predict", seeds, read)


def _predict_response() -> Target:
    seeds = [encode_response(model_spec("ctr", "raw", 3), {"logit": torch.randn(5), "top": torch.ones(2, 3).long()})]

    def read(data: bytes) -> None:
        from shoal.serving.tensors import decode_tensor

        for value in decode_response(data)[1].values():
            decode_tensor(value, 1 << 24)

    return Target("predict_response", seeds, read, (ShoalError, ValueError))


def _rest() -> Target:
    from shoal.serving.export.manifest import TensorSpec

    specs = {
        "ids": TensorSpec("int64", [-1, -1], padding=0),
        "x": TensorSpec("float", [-1]),
        "s": TensorSpec("string", [-1]),
    }
    seeds = [
        json.dumps(
            {"instances": [{"ids": [1, 2], "x": 0.5, "s": "a"}, {"ids": [3], "x": 1.5, "s": {"b64": "aGk="}}]}
        ).encode(),
        json.dumps(
            {"inputs": {"user": ["u1", None], "tags": [["a", {"b64": "aGk="}], []], "age": [33, 1e30]}}
        ).encode(),
    ]
    maker = InputMaker(SCHEMA)

    def read(data: bytes) -> None:
        try:
            request = json.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(request, dict):
            return
        rows = request.get("instances")
        columns = request.get("inputs") if rows is None else columns_of(rows, fill=True)
        if not isinstance(columns, dict) or specs.keys() & columns.keys():
            columns = columns if rows is None else columns_of(rows)
            tensors_of(columns if isinstance(columns, dict) else {"ids": columns}, specs, 1 << 20)
        else:
            maker(raw_columns(columns))

    return Target("rest", seeds, read, (DataError, StatusError, ConfigError))


def _ps_request() -> Target:
    seeds = []
    for request in (
        Request(Op.APPLY, 3, bytes(16), 7, 6, 0, 5, 1700000000, 0, 100, (2, 1), (0.1, 0.2), ("user", "item"),
                torch.arange(3), torch.randn(12)),
        Request(Op.LOOKUP, counts=(2,), names=("user",), ids=torch.arange(2)),
    ):  # fmt: skip
        seeds.append(_frames([bytes(memoryview(f).cast("B")) for f in request.frames()]))

    def read(data: bytes) -> None:
        frames = _split_frames(data)
        request = parse_request(*frames[:3])
        request.ids_tensor(), request.values_tensor(), request.time

    return Target("ps_request", seeds, read)


def _ps_reply() -> Target:
    seeds = [_frames([bytes(f) for f in Reply(Status.OK, 4, 9, [b"abcd", b"ef"]).frames()])]
    return Target("ps_reply", seeds, lambda data: parse_reply(_split_frames(data)).text())


def _ps_create() -> Target:
    options = json.dumps({"name": "user", "extra_restore_names": ["u"], "saver_parallel": 2}).encode()
    table = HashTable(4, optimizer=Adagrad(lr=0.1))
    config = table.config.proto().SerializeToString() if hasattr(table.config, "proto") else b""
    seeds = [_frames([config or EmbeddingHashTableConfig().SerializeToString(), options])]
    return Target("ps_create", seeds, lambda data: parse_spec(*(*_split_frames(data), b"", b"")[:2]))


def _ps_log(folder: Path) -> Target:
    log = Log(folder / "log")
    for number in range(3):
        log.append([b"header %d" % number, bytes(8 * number), bytes(16)])
        log.sync()
    log.close()
    (path,) = (folder / "log").glob("*.shlog")

    def mend(data: bytes) -> bytes:
        """Records whose CRC is right."""
        out, at = bytearray(data), 16
        while at + HEAD_BYTES <= len(out):
            header, _, ids, values = struct.unpack_from("<IIQQ", out, at + 8)
            end = at + HEAD_BYTES + header + ids + values
            if end > len(out):
                break
            out[at + 4 : at + 8] = struct.pack("<I", zlib.crc32(out[at + 8 : end]))
            at = end
        return bytes(out)

    seed = path.read_bytes()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        for _ in replay(folder / "log", 0):
            pass

    return Target("ps_log", [seed], read, mend=mend)


def _text(folder: Path, name: str, seeds: list[bytes], schema: Schema, **options: Any) -> Target:
    return Target(f"data_{name}", seeds, _read_file(folder / f"data.{name}", make_format(name, schema, **options)))


def _read_file(path: Path, form: Any) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        path.write_bytes(data)
        bad: list[Any] = []
        for unit in form.units(str(path)):
            with closing(form.open(unit, None, bad.append)) as cursor:
                while cursor.read(7) is not None:
                    cursor.state()
        for one in bad:
            str(one)

    return read


def _record(payload: bytes) -> bytes:
    def masked(data: bytes) -> bytes:
        crc = _core.crc32c(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    head = struct.pack("<Q", len(payload))
    return head + masked(head) + payload + masked(payload)


def _mend_records(data: bytes) -> bytes:
    out, at = [], 0
    while at + 16 <= len(data):
        (n,) = struct.unpack_from("<Q", data, at)
        if at + 16 + n > len(data):
            break
        out.append(_record(data[at + 12 : at + 12 + n]))
        at += 16 + n
    return b"".join(out) + data[at:]


def _tf_example() -> bytes:
    def field(number: int, payload: bytes) -> bytes:
        return bytes([number << 3 | 2, len(payload)]) + payload

    def feature(name: str, kind: int, payload: bytes) -> bytes:
        return field(1, field(1, name.encode()) + field(2, field(kind, payload)))

    inner = feature("click", 3, field(1, b"\x01")) + feature("price", 2, field(1, struct.pack("<f", 1.5)))
    inner += feature("user", 1, field(1, b"u17") + field(1, b"u18")) + feature("item", 3, field(1, b"\x05\x06"))
    inner += feature("time", 3, field(1, b"\x88\x08"))
    return field(1, inner)


def _records(folder: Path) -> list[Target]:
    seed = _record(_tf_example()) * 3
    form = make_format("tfrecord", PLAIN)
    return [Target("data_tfrecord", [seed], _read_file(folder / "data.tfrecord", form), mend=_mend_records)]


def _parquet(folder: Path) -> list[Target]:
    pyarrow = __import__("pyarrow.parquet")
    table = pyarrow.table({"click": [0, 1, 1], "price": [1.0, None, 3.0], "user": ["a", None, "c"], "item": [1, 2, 3],
                           "time": [1, 2, 3]})  # fmt: skip
    out = io.BytesIO()
    pyarrow.parquet.write_table(table, out)
    read = _read_file(folder / "data.parquet", make_format("parquet", PLAIN))
    return [Target("data_parquet", [out.getvalue()], read)]


def _checkpoint(folder: Path) -> Target:
    table = HashTable(4, optimizer=Adagrad(lr=0.1), name="t")
    table.assign(torch.arange(40), torch.randn(40, 4))
    before = table.lookup(torch.arange(40))
    (folder / "ckpt").mkdir()
    base = folder / "ckpt" / "t"
    table.save(str(base))
    for manifest in (folder / "ckpt").glob("*.manifest"):
        manifest.unlink()  # with it, all damage would be detected at once
    path = max((folder / "ckpt").iterdir(), key=lambda one: one.stat().st_size)
    seed = path.read_bytes()
    ids = torch.arange(40)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        try:
            table.restore(str(base))
        except ShoalError:
            assert torch.equal(table.lookup(ids), before), "a restore that was refused changed the table"
            raise
        path.write_bytes(seed)
        table.restore(str(base))

    return Target("checkpoint", [seed], read, mend=_mend_records)


def _manifest(folder: Path) -> Target:
    path = folder / "manifest.json"
    write_saved(path, {"kind": "x", "step": 3}, {"a": (3, 7), "b/c": (5, 9)}, {"a": "a.tmp"})

    def mend(data: bytes) -> bytes:
        """The digest of what it says."""
        try:
            whole = json.loads(data)
            sealed = {key: value for key, value in whole.items() if key != "digest"}
            canonical = json.dumps(sealed, sort_keys=True, separators=(",", ":")).encode()
        except (ValueError, AttributeError, RecursionError):
            return data
        return json.dumps({**sealed, "digest": "sha256:" + hashlib.sha256(canonical).hexdigest()}).encode()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_saved(path, unsealed=True).missing()

    return Target("manifest", [path.read_bytes()], read, mend=mend)


def _export_manifest() -> Target:
    spec = {"dtype": "int64", "shape": [-1], "padding": None}
    content = {
        "format": 1, "model_name": "ctr", "sub_graph": "entry", "version": 3, "global_step": 7, "tags": ["serve"],
        "signatures": {"serving_default": {"inputs": {"ids": spec}, "outputs": {"y": spec}, "row_wise": True}},
        "tables": [], "program": {"file": "net.pt2", "net_inputs": ["a", "b"]}, "rows_read_at": 1.5,
        "stamps": {"trainer": [1, 2]},
    }  # fmt: skip

    def read(data: bytes) -> None:
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):
            return
        Manifest.of(Saved("manifest.json", fields if isinstance(fields, dict) else {"format": fields}, {}))

    return Target("export_manifest", [json.dumps(content).encode()], read)


def _payloads() -> list[Target]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(12, 5), torch.nn.Linear(5, 1))
    spec = GradientSpec.from_model(model, target_chunk=4, topk=2, quant=QuantSpec(4, 6))
    made = compress({p.name: torch.randn(p.shape) for p in spec.params}, spec, global_step=3, window=7)

    def read(data: bytes) -> None:
        validate_payload(load_payload(data, spec, max_bytes=1 << 20), spec, window=7)

    return [
        Target(f"payload_{form}", [dump_payload(made, format=form)], read, (PayloadRejected,))
        for form in ("safetensors", "pt")
    ]


def _tensors() -> Target:
    seeds = [
        serialize_tensors([torch.randn(3, 2), torch.tensor(3), torch.zeros(0, 4), torch.ones(5, dtype=torch.bool)])
    ]

    def mend(data: bytes) -> bytes:
        if len(data) < 32:
            return data
        table_bytes = struct.unpack_from("<Q", data, 8)[0]
        crc = zlib.crc32(data[32 : 32 + table_bytes] if table_bytes < 1 << 20 else b"", zlib.crc32(data[:24]))
        return data[:24] + struct.pack("<I", crc) + data[28:]

    return Target("tensors", seeds, lambda data: deserialize_tensors(data, max_bytes=1 << 20), mend=mend)


def _toml(folder: Path) -> list[Target]:
    train = b"""
[data]
format = "csv"
train = ["a.csv"]
label = "click"
sparse = ["user", "tags"]
dense = ["age"]
[features.tags]
separator = "|"
max_length = 3
[features.age]
kind = "number"
log = true
[table]
dim = 8
optimizer = "adagrad"
lr = 0.05
expire_after = "30d"
[table.features.user]
dim = 4
[model]
name = "deepfm"
hidden = [16, 8]
[train]
epochs = 2
batch_size = 64
[serve]
dir = "exports"
every_s = 5.0
[out]
dir = "run"
"""
    plan = b"""
[[table]]
name = "user"
dim = 16
ids_per_sample = 1
ids_per_day = 3e6
expire_days = 60
unique_share = 0.95
[model]
batch = 4096
dense_parameters = 3e6
"""
    paths = [folder / name for name in ("train.toml", "plan.toml", "agent.conf")]

    def reading(path: Path, load: Callable[[Path], Any]) -> Callable[[bytes], None]:
        def read(data: bytes) -> None:
            path.write_bytes(data)
            load(path)

        return read

    tomllib.loads(train.decode())
    agent = b"bzid = test\nbase_name = model\nnum_ps 4 # comment\nbase_path=/models\nport\t8500\n"
    return [
        Target("toml_train", [train], reading(paths[0], load_config)),
        Target("toml_plan", [plan], reading(paths[1], load_plan)),
        Target("agent_conf", [agent], reading(paths[2], read_config_file)),
    ]


def _frames(frames: list[bytes]) -> bytes:
    """Frames of a message as one input, as the fuzzer damages it."""
    return b"".join(struct.pack("<H", len(one)) + one for one in frames)


def _split_frames(data: bytes) -> list[bytes]:
    frames, at = [], 0
    while at + 2 <= len(data) and len(frames) < 4:
        (n,) = struct.unpack_from("<H", data, at)
        frames.append(data[at + 2 : at + 2 + n])
        at += 2 + n
    return frames or [b""]


def all_targets(folder: Path | None = None) -> list[Target]:
    """All of them; files that they read are made in ``folder``."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-fuzz-")) if folder is None else folder
    csv = b'click,price,user,item,time\n1,2.5,u1,"i,5",100\n0,,u2,i6,200\r\n1,1e3,,i7,300\n'
    tagged = b"click,price,age,user,tags,word\n1,2.5,30,u1,a|b|c,a\n0,,,u2,,zz\n"
    criteo = b"\t".join([b"1", *[b"%d" % n for n in range(13)], *[b"%08x" % n for n in range(26)]]) + b"\n"
    from shoal.data import CRITEO

    return [
        _predict(), _predict_response(), _rest(), _ps_request(), _ps_reply(), _ps_create(), _ps_log(folder),
        _text(folder, "csv", [csv], PLAIN, quote='"'),
        Target("data_features", [tagged], _read_file(folder / "tagged.csv", make_format("csv", SCHEMA))),
        _text(folder, "criteo", [criteo * 3], CRITEO),
        *_records(folder), *_parquet(folder), _checkpoint(folder), _manifest(folder), _export_manifest(),
        *_payloads(), _tensors(), *_toml(folder), net_plan(), *([http2()] if _core.front_available() else []),
        *newer_targets(folder, PLAIN, _record(_tf_example()) * 3),
    ]  # fmt: skip
