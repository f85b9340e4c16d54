"""Containers of untrusted peers: what is read, corrupt or unsafe, and how much memory that takes."""

import contextlib
import gc
import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from shoal.gather import (
    GatherConfig,
    GatherPlan,
    MemoryObject,
    MemoryStore,
    PayloadRejected,
    dump_payload,
    gather,
    load_payload,
)
from shoal.gather import validate_payload as validate
from tests.gather.helpers import QUICK, WINDOW, payload, small_spec


def reason_of(data, spec=None, **kwargs):
    with pytest.raises(PayloadRejected) as caught:
        load_payload(data, spec or small_spec(), **kwargs)
    return caught.value.reason


def safetensors_of(header, body=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def tensor(begin, end, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("format", ["safetensors", "pt"])
@pytest.mark.parametrize("where", ["memory", "file"])
def test_both_containers_give_the_same_payload(format, where, tmp_path):
    spec = small_spec()
    made = payload(spec, 3)
    data = dump_payload(made, format=format)
    path = tmp_path / "odd name"
    path.write_bytes(data)
    loaded = load_payload(data if where == "memory" else path, spec)
    assert validate(loaded, spec, window=WINDOW).digest == validate(made, spec).digest
    assert loaded["global_step"] == 103


def test_our_safetensors_are_everybodys(tmp_path):
    from safetensors import safe_open

    path = tmp_path / "a.safetensors"
    made = payload(small_spec(), 3)
    path.write_bytes(dump_payload(made))
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("p0idxs"), made["state_dict"]["p0idxs"])
        shift, scale, offset, dtype = file.metadata()["p0quant_params"].split()
        assert (float(shift), float(scale), int(offset), dtype) == (
            *made["state_dict"]["p0quant_params"][:3],
            "float32",
        )
        assert file.metadata()["global_step"] == "103"
        assert file.metadata()["window"] == str(WINDOW)


def test_unaligned_tensors_are_read():
    body = b"\x07" + struct.pack("<f", 1.5)
    data = safetensors_of({"a": tensor(0, 1), "b": tensor(1, 5, "F32", [1])}, body)
    assert load_payload(data, small_spec())["state_dict"]["b"].tolist() == [1.5]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "corrupt_container"),
        (b"abc", "corrupt_container"),
        (safetensors_of(b"{", length=1), "corrupt_container"),
        (safetensors_of(b"[]"), "corrupt_container"),
        (safetensors_of(b"[" * 200_000), "corrupt_container"),
        (safetensors_of({}, length=10**6), "corrupt_container"),
        (struct.pack("<Q", 2**63) + b"x" * 20, "corrupt_container"),
        (safetensors_of({"a": tensor(0, 100)}, b"x" * 50), "corrupt_container"),
        (safetensors_of({"a": tensor(0, 4, shape=[2**40, 2**40])}, b"x" * 4), "corrupt_container"),
        (safetensors_of({"a": tensor(0, 0, shape=[0, 2**70])}), "corrupt_container"),
        (safetensors_of({"a": tensor(0, 0, shape=[0, 2**63 - 1, 2])}), "corrupt_container"),
        (safetensors_of({"a": tensor(-4, 4)}, b"x" * 8), "corrupt_container"),
        (safetensors_of({"a": tensor(0, 4, "Q9")}, b"x" * 4), "corrupt_container"),
        (safetensors_of({"a": {"dtype": "U8"}}, b"x" * 4), "corrupt_container"),
        (safetensors_of({"a": tensor(0, 4), "b": tensor(3, 8)}, b"x" * 8), "unsafe_container"),
        (safetensors_of(b"{}" + b" " * (16 << 20)), "unsafe_container"),
        (safetensors_of({}), "empty_payload"),
        (pickle.dumps({"a": 1}), "corrupt_container"),
        (b"PK\x03\x04" + b"\0" * 100, "corrupt_container"),
    ],
)
def test_broken_containers_have_their_reason(data, reason):
    assert reason_of(data) == reason


def test_truncated_archives_are_corrupt():
    data = dump_payload(payload(small_spec(), 1), format="pt")
    for cut in (5, len(data) // 2, len(data) - 30):
        assert reason_of(data[:cut]) == "corrupt_container"


def archive(members, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return buffer.getvalue()


class Evil:
    def __reduce__(self):
        return (os.system, ("echo evil",))


class Hungry:
    def __reduce__(self):
        return (bytearray, (1 << 40,))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (archive({"a/data.pkl": pickle.dumps({}), "a/x": b"0" * 5000}, zipfile.ZIP_DEFLATED), "unsafe_container"),
        (archive({"../data.pkl": pickle.dumps({})}), "unsafe_container"),
        (archive({"/etc/data.pkl": pickle.dumps({})}), "unsafe_container"),
        (archive({f"a/{i}": b"" for i in range(41)}), "unsafe_container"),
        (archive({"a/other": b"x"}), "corrupt_container"),
        (archive({"a/data.pkl": b"garbage"}), "corrupt_container"),
        (archive({"a/data.pkl": pickle.dumps({"state_dict": Evil()}, 2), "a/version": b"3"}), "unsafe_container"),
        (archive({"a/data.pkl": pickle.dumps({"state_dict": Evil()}, 4), "a/version": b"3"}), "unsafe_container"),
        (archive({"a/data.pkl": pickle.dumps({"state_dict": Hungry()}, 2), "a/version": b"3"}), "unsafe_container"),
        (archive({"a/data.pkl": pickle.dumps([1, 2], 2), "a/version": b"3"}), "not_a_mapping"),
        (archive({"a/data.pkl": pickle.dumps({"state_dict": [1]}, 2), "a/version": b"3"}), "not_a_mapping"),
        (archive({"a/data.pkl": pickle.dumps({"state_dict": {}}, 2), "a/version": b"3"}), "empty_payload"),
    ],
)
@pytest.mark.parametrize("where", ["memory", "file"])
def test_broken_archives_have_their_reason(data, reason, where, tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    assert reason_of(data if where == "memory" else path) == reason


def test_a_directory_that_lies_about_sizes_is_unsafe():
    data = bytearray(archive({"a/data.pkl": pickle.dumps({}), "a/x": b"0" * 100}))
    at = data.rindex(b"PK\x01\x02")
    data[at + 20 : at + 28] = struct.pack("<II", 1 << 30, 1 << 30)
    assert reason_of(bytes(data)) == "unsafe_container"


def test_views_of_a_small_storage_are_no_bomb():
    spec = small_spec()
    made = payload(spec, 2)
    made["state_dict"]["p0vals"] = torch.zeros(1, dtype=torch.uint8).expand(1 << 20, 1 << 20)
    with pytest.raises(PayloadRejected) as caught:
        validate(load_payload(dump_payload(made, format="pt"), spec), spec)
    assert caught.value.reason == "bad_value_shape"


def test_every_flipped_byte_of_an_archives_end_has_a_reason():
    data = bytearray(dump_payload(payload(small_spec(), 3), format="pt"))
    for at in range(len(data) - 98, len(data)):  # the end of the directory, which is read first
        kept, data[at] = data[at], data[at] ^ 0xFF
        with contextlib.suppress(PayloadRejected):
            validate(load_payload(bytes(data), small_spec()), small_spec())
        data[at] = kept


def strided(made):
    turned = made["state_dict"]["p0vals"].transpose(0, 2).contiguous().transpose(0, 2)
    assert not turned.is_contiguous()
    made["state_dict"]["p0vals"] = turned
    return made


def test_payloads_with_strides_are_accepted_from_disk(tmp_path):
    spec = small_spec()
    store = MemoryStore({(WINDOW, 2): MemoryObject(dump_payload(strided(payload(spec, 2)), format="pt"))})
    config = GatherConfig(spill="disk", spill_dir=tmp_path)
    result = gather(GatherPlan(WINDOW, [2]), spec, store, config=config)
    assert result.uids == [2]
    assert result.digests[2] == validate(payload(spec, 2), spec).digest
    result.payloads[2].verify()
    again = gather(GatherPlan(WINDOW, [2]), spec, store, config=config)
    assert store.stream_calls[2] == 1
    assert again.global_steps == result.global_steps == [102]


def test_what_else_a_peer_sent_never_reaches_the_spill_file():
    made = strided(payload(small_spec(quant=None), 2))
    made["state_dict"] |= {
        "p0quant_params": ("of", "float values"),
        "odd": torch.zeros(2, dtype=torch.complex64),
        "wide": torch.zeros(1).expand(1 << 20, 1 << 20),
    }
    store = MemoryStore({(WINDOW, 2): MemoryObject(dump_payload(made, format="pt"))})
    result = gather(GatherPlan(WINDOW, [2]), small_spec(quant=None), store, config=GatherConfig(spill="disk"))
    assert result.skip_reasons == {}


def anonymous_kib():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1])
    raise AssertionError


def test_bombs_are_skipped_with_their_reason_and_cost_little_memory():
    spec = small_spec()
    bomb = io.BytesIO()
    with (
        zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file,
        file.open("a/data.pkl", "w", force_zip64=True) as member,
    ):
        for _ in range(1024):
            member.write(bytes(1 << 20))
    good = dump_payload(payload(spec, 1))
    objects = {
        1: MemoryObject(bomb.getvalue()),
        2: MemoryObject(good * 10, size=len(good)),
        3: MemoryObject(safetensors_of({"p0idxs": tensor(0, 1 << 40)}, b"x" * 64)),
        4: MemoryObject(archive({"a/data.pkl": pickle.dumps({"state_dict": Evil()}, 2), "a/version": b"3"})),
        5: MemoryObject(b"x", size=1 << 40),
    }
    store = MemoryStore({(WINDOW, uid): obj for uid, obj in objects.items()})
    gather(GatherPlan(WINDOW, [9], timeout_s=0.05), spec, store, config=QUICK)  # warm
    gc.collect()
    before = anonymous_kib()
    from shoal.gather import GatherConfig

    result = gather(GatherPlan(WINDOW, [1, 2, 3, 4, 5]), spec, store, config=GatherConfig(max_payload_bytes=4 << 20))
    assert result.skip_reasons == {
        1: "unsafe_container", 2: "oversize", 3: "corrupt_container", 4: "unsafe_container", 5: "oversize"
    }  # fmt: skip
    assert store.stream_calls[5] == 0
    assert anonymous_kib() - before < 64 << 10


def test_payloads_over_the_limit_are_oversize():
    data = dump_payload(payload(small_spec(), 1))
    assert reason_of(data, max_bytes=len(data) - 1) == "oversize"
