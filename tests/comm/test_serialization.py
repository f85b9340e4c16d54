"""The TPK1 format: the worked example, round trips, damage, forged sizes."""

import struct
import tracemalloc
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm import deserialize_tensors, serialize_tensors
from shoal.comm.ranks.serialization import DTYPES
from shoal.errors import SerializationError


def same(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().reshape(-1).view(torch.uint8).tolist()
        == b.contiguous().reshape(-1).view(torch.uint8).tolist()
    )


def test_the_worked_example_byte_for_byte():
    data = serialize_tensors([torch.tensor([[1.0, -2.0]]), torch.tensor(3.0)])
    assert len(data) == 196
    assert data[:32].hex() == "54504b31020000004000000000000000440000000000000087b0f43c00000000"
    assert struct.unpack_from("<I", data, 32 + 4) == (0xC3872656,)
    assert struct.unpack_from("<I", data, 32 + 40 + 4) == (0xA7E1D189,)
    assert data[96:128] == bytes(32)
    assert data[128:136] == struct.pack("<2f", 1, -2)
    assert data[192:] == struct.pack("<f", 3)


def test_an_empty_list_is_sixty_four_bytes():
    assert len(serialize_tensors([])) == 64
    assert deserialize_tensors(serialize_tensors([])) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype):
    bits = torch.randint(0, 256, (24,), dtype=torch.uint8)
    if dtype == torch.bool:
        bits &= 1
    tensors = [bits.view(dtype).clone(), bits.view(dtype)[:0], bits.view(dtype)[0], bits.view(dtype).reshape(1, -1, 1)]
    back = deserialize_tensors(serialize_tensors(tensors))
    assert all(same(a, b) for a, b in zip(tensors, back, strict=True))


def test_nan_payloads_minus_zero_and_strides_survive():
    odd = torch.tensor([0x7FC00001, -0x80000000, 0x7F800000, 0x7F812345], dtype=torch.int32).view(torch.float32)
    strided = torch.arange(12.0).reshape(3, 4).t()[1:, ::2]
    grad = torch.ones(2, requires_grad=True)
    lone = torch.arange(6.0)[4::2]  # one element with stride 2
    back = deserialize_tensors(memoryview(bytearray(serialize_tensors([odd, strided, grad, lone]))))
    assert same(back[0], odd)
    assert back[3].tolist() == [4.0]
    assert torch.equal(back[1], strided)
    assert torch.equal(back[2], grad.detach())


def test_zero_size_tensors_take_an_aligned_offset_and_no_bytes():
    tensors = [torch.ones(1), torch.empty(0, 5), torch.empty(3, 0, dtype=torch.int8)]
    data = serialize_tensors(tensors)
    assert struct.unpack_from("<Q", data, 16) == (64,)
    back = deserialize_tensors(data)
    assert [t.shape for t in back] == [t.shape for t in tensors]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=8)), max_size=6))
def test_round_trip_of_any_list(specs):
    tensors = [torch.randint(0, 2, shape).to(dtype) for dtype, shape in specs]
    data = serialize_tensors(tensors)
    assert len(data) % 64 == 0 or tensors
    assert all(same(a, b) for a, b in zip(tensors, deserialize_tensors(data), strict=True))


def test_the_result_never_aliases_the_message():
    data = bytearray(serialize_tensors([torch.ones(4)]))
    (back,) = deserialize_tensors(data)
    data[-16:] = bytes(16)
    assert back.tolist() == [1.0] * 4
    back += 1  # and it is writable


def test_every_single_byte_change_is_detected_or_harmless():
    tensors = [torch.tensor([[1.0, -2.0]]), torch.tensor(3.0), torch.tensor([True, False]), torch.empty(0)]
    data = serialize_tensors(tensors)
    for at in range(len(data)):
        for flip in (1, 0x80, 0xFF):
            bad = bytearray(data)
            bad[at] ^= flip
            try:
                back = deserialize_tensors(bad)
            except SerializationError:
                continue
            assert all(same(a, b) for a, b in zip(tensors, back, strict=True)), at


def test_every_truncation_and_extension_is_refused():
    data = serialize_tensors([torch.ones(3), torch.arange(5)])
    for end in range(len(data)):
        with pytest.raises(SerializationError):
            deserialize_tensors(data[:end])
    for tail in (b"\0", bytes(64)):
        with pytest.raises(SerializationError):
            deserialize_tensors(data + tail)


def forge(count, descriptors, payload, payload_bytes=None):
    table = b"".join(descriptors)
    head = struct.pack("<4sIQQ", b"TPK1", count, len(table), len(payload) if payload_bytes is None else payload_bytes)
    head += struct.pack("<II", zlib.crc32(table, zlib.crc32(head)), 0)
    body = head + table
    return body + bytes(-len(body) % 64) + payload


def descriptor(code, dims, offset, nbytes, raw=b""):
    return struct.pack(f"<BBHI{len(dims) + 2}Q", code, len(dims), 0, zlib.crc32(raw), *dims, offset, nbytes)


@pytest.mark.parametrize(
    "message",
    [
        forge(1, [descriptor(0, [1 << 40], 0, 1 << 42)], b"", 1 << 42),
        forge(1, [descriptor(0, [1 << 40], 0, 4)], bytes(4)),
        forge(1, [descriptor(0, [1 << 62, 0], 0, 0)], b""),
        forge(1, [descriptor(0, [1 << 63, 1 << 63, 0], 0, 0)], b""),
        forge(0xFFFFFFFF, [descriptor(0, [1], 0, 4)], bytes(4)),
        forge(1, [descriptor(0, [1], 64, 4)], bytes(68)),
        forge(2, [descriptor(0, [1], 0, 4), descriptor(0, [1], 0, 4)], bytes(4)),
        forge(1, [descriptor(10, [1], 0, 4)], bytes(4)),
        forge(1, [descriptor(0, [1] * 9, 0, 4)], bytes(4)),
        forge(0, [], bytes(64)),
        forge(1, [descriptor(0, [1], 0, 4, bytes(4)), b"x"], bytes(4)),
        forge(1, [descriptor(0, [1], 0, 4, bytes(4))], bytes(8)),
        b"TPK2" + bytes(60),
        b"",
    ],
)
def test_forged_messages_are_refused_before_anything_is_allocated(message):
    tracemalloc.start()
    try:
        with pytest.raises(SerializationError):
            deserialize_tensors(message)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_max_bytes_bounds_the_payload():
    data = serialize_tensors([torch.ones(100)])
    assert len(deserialize_tensors(data, max_bytes=400)) == 1
    with pytest.raises(SerializationError, match="max_bytes"):
        deserialize_tensors(data, max_bytes=399)


@pytest.mark.parametrize(
    "bad", [torch.ones(1, dtype=torch.complex64), torch.ones([1] * 9), torch.ones(2, 2).to_sparse(), [1.0]], ids=str
)
def test_what_has_no_form_is_refused(bad):
    with pytest.raises(SerializationError):
        serialize_tensors([bad])
