"""Requests with raw values and ids that are read together natively give the same as each read alone, in every form."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from shoal.errors import DataError
from shoal.serving.predict import PREDICT, decode_request, decode_response, encode_request, model_spec
from shoal.serving.server.loader import load_servable
from shoal.serving.server.trained import BATCH, MadeInputs
from shoal.serving.status import StatusError
from shoal.serving.tensors import decode_tensor, encode_content, encode_tensor
from shoal.serving.wire import field, varint
from shoal.train.loop.trainer import trainer
from shoal.trainer import load_config
from tests.train.loop.helpers import Told
from tests.train.loop.test_export import serving, write_data

USERS = [b"u1", b"u2", b"nobody", "Zürich".encode(), b"", b"\xff\xfe\x80", b"a\0b", b"x" * 300]
WORDS = [b"a", b"b", b"c", b"zz", b"", b"a|b", b"|", b"\xc3"]
LISTS = ("tags", "seen")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with trainer(load_config(write_data(folder)), reporter=Told()) as one:
        one.run()
        return one.export(str(folder / "exports/ctr"))


@pytest.fixture(scope="module")
def signatures(exported):
    return load_servable(Path(exported), Path(exported).parent).signatures


def texts(values, shape):
    return encode_tensor(np.array(values, object).reshape(shape))


def pick(draw, values, n):
    return [draw.choice(values) for _ in range(n)]


def real(draw, values, n, shape=None):
    kind = draw.choice([torch.float32, torch.float64])
    return encode_tensor(torch.tensor(pick(draw, values, n), dtype=kind).reshape(shape or (n,)))


def whole(draw, values, n, shape=None):
    kind = draw.choice([torch.int64, torch.int32])
    tensor = torch.tensor(pick(draw, values, n), dtype=kind).reshape(shape or (n,))
    if draw.random() < 0.2:
        return encode_content(
            {torch.int64: "int64", torch.int32: "int32"}[kind], tuple(tensor.shape), bytes(tensor.numpy())
        )
    return encode_tensor(tensor)


def listed(draw, name, n, values, made):
    """Adds a list in one of its forms."""
    width = draw.choice([0, 1, 2, 5])
    form = draw.choice(["one", "padded", "lengths"])
    if form == "one":
        made[name] = values(n, draw.choice([(n,), (n, 1)]))
        return
    made[name] = values(n * width, (n, width))
    if form == "lengths":
        made[f"{name}/lengths"] = whole(draw, range(width + 1), n)


def raw_request(draw, n):
    """Inputs of ``n`` rows, every one in a form that is taken, or left out; ids always have one."""
    one = [(n,), (n, 1)]
    numeric = [0.0, 17.0, 33.5, -4.0, 1e9, float("nan")]
    made = {
        "user": texts(pick(draw, USERS, n), draw.choice(one)) if draw.random() < 0.8 else whole(draw, [1, -7], n),
        "postcode": texts(pick(draw, [b"8001", b"", b"-3"], n), (n,)) if draw.random() < 0.3
        else whole(draw, [8001, 99, -1], n, draw.choice(one)),
        "age": texts(pick(draw, [b"33", b"17.5", b""], n), (n,)) if draw.random() < 0.2
        else draw.choice([real, whole])(draw, [0, 17, 30], n) if draw.random() < 0.3 else real(draw, numeric, n),
        "visits": real(draw, numeric, n, draw.choice(one)),
        "country": texts(pick(draw, [b"ch", b"xx", b""], n), (n,)),
        "color": texts(pick(draw, [b"red", b"blue", b"", b"\xff"], n), (n,)),
        "price": real(draw, numeric, n, draw.choice(one)),
        "grams": whole(draw, [0, 5, 50], n) if draw.random() < 0.5 else real(draw, numeric, n),
    }  # fmt: skip
    for name in LISTS:
        listed(draw, name, n, lambda count, shape: texts(pick(draw, WORDS, count), shape), made)
    return thinned(draw, made)


def ids_request(draw, n):
    ids = [0, 1, -1, 2**62, -(2**63)]

    def wide(count, shape):
        return encode_tensor(torch.tensor(pick(draw, ids, count), dtype=torch.int64).reshape(shape))

    made = {name: wide(n, (n,)) for name in ("user", "zip", "age", "visits", "country", "color")}
    made |= {name: real(draw, [0.0, 3.5, float("nan")], n) for name in ("price", "grams")}
    for name in LISTS:
        listed(draw, name, n, wide, made)
    return thinned(draw, made)


def thinned(draw, made):
    """Without some of its inputs, in any order."""
    kept = [name for name in made if draw.random() < 0.8 or name in ("user", "postcode", "zip")]
    draw.shuffle(kept)
    return {name: made[name] for name in kept if not name.endswith("/lengths") or name.removesuffix("/lengths") in kept}


def tensor_of(kind, sizes, values=b""):
    """A tensor as bytes, of a shape that need not fit its values."""
    dims = b"".join(field(2, b"\x08" + varint(size)) for size in sizes)
    return b"\x08" + bytes([kind]) + field(2, dims) + values


BROKEN = {
    "unknown": lambda n: {"usr": texts([b"u"] * n, (n,))},
    "bad id": lambda n: {"postcode": texts([b"8001"] * (n - 1) + [b"x"], (n,))},
    "infinite": lambda n: {"price": encode_tensor(torch.full((n,), float("inf")))},
    "infinite age": lambda n: {"age": encode_tensor(torch.full((n,), float("inf")))},
    "other rows": lambda n: {"country": texts([b"ch"] * (n + 1), (n + 1,))},
    "a text for a number": lambda n: {"price": texts([b"1"] * n, (n,))},
    "bool": lambda n: {"user": encode_tensor(torch.ones(n, dtype=torch.bool))},
    "two users": lambda n: {"user": texts([b"u"] * 2 * n, (n, 2))},
    "real text": lambda n: {"user": encode_tensor(torch.full((n,), 1.5))},
    "long lengths": lambda n: {
        "tags": texts([b"a"] * 2 * n, (n, 2)), "tags/lengths": encode_tensor(torch.full((n,), 3))
    },
    "negative lengths": lambda n: {
        "tags": texts([b"a"] * 2 * n, (n, 2)), "tags/lengths": encode_tensor(torch.full((n,), -1))
    },
    "lengths of one": lambda n: {"tags": texts([b"a"] * n, (n,)), "tags/lengths": encode_tensor(torch.ones(n).long())},
    "scalar": lambda n: {"user": encode_tensor(torch.tensor(3))},
    "cut off": lambda n: {"user": texts([b"u"] * n, (n,))[:-1]},
    "too many texts": lambda n: {"user": texts([b"u"] * n, (n,)) + b"\x42\x01u"},
    "lengths alone": lambda n: {"tags/lengths": encode_tensor(torch.ones(n).long())},
    "negative width": lambda n: {"tags": tensor_of(7, [n, -1], b"\x42\x01a" * n)},
    "negative rows": lambda n: {"tags": tensor_of(7, [-n])},
    "two ages": lambda n: {"age": encode_tensor(torch.ones(n, 2))},
}  # fmt: skip
UNUSUAL = {
    "few texts": lambda n: {"user": tensor_of(7, [n])},
    "uint8": lambda n: {"grams": encode_tensor(torch.full((n,), 3, dtype=torch.uint8))},
    "lone numbers": lambda n: {"price": tensor_of(1, [n], b"\x2d\0\0\x80\x3f" * n)},
}  # fmt: skip


def call_of(made, signature=""):
    return decode_request(encode_request(model_spec("ctr", signature), made))


def alone(signature, call):
    """Inputs of one request as they are made by the reader that says what is wrong; None where it is refused."""
    try:
        return signature.convert(call.tensors(lambda heads: signature.check("here", heads)))[BATCH].made
    except (StatusError, DataError):
        return None


def assert_equal(batch, begin, rows, wanted):
    got = batch[begin : begin + rows].made
    torch.testing.assert_close(got.dense, wanted.dense, rtol=0, atol=0)
    assert torch.equal(got.ids, wanted.ids)
    assert torch.equal(got.offsets, wanted.offsets)


@pytest.mark.parametrize("name", ["serving_default", "ids"])
def test_joined_requests_are_made_into_what_each_alone_is(signatures, name):
    signature = signatures[name]
    draw = random.Random(5)
    make = ids_request if name == "ids" else raw_request
    for _ in range(150):
        calls = [call_of(make(draw, draw.choice([0, 1, 1, 2, 3, 17])), name) for _ in range(draw.randint(1, 6))]
        joined, rows = signature.join("here", calls)
        begin = 0
        for call, own in zip(calls, rows, strict=True):
            wanted = alone(signature, call)
            assert (own >= 0) == (wanted is not None), call.inputs.keys()
            if wanted is not None:
                assert_equal(joined[BATCH], begin, own, wanted)
                begin += own
        assert len(joined[BATCH]) == begin


@pytest.mark.parametrize("name", ["serving_default", "ids"])
def test_inputs_that_were_read_alone_are_joined_by_rows(signatures, name):
    signature, draw = signatures[name], random.Random(4)
    make = ids_request if name == "ids" else raw_request
    calls = [call_of(make(draw, n), name) for n in (3, 0, 1, 5)]
    parts = [MadeInputs(one) for call in calls if (one := alone(signature, call)) is not None]
    joined, begin = MadeInputs.cat(parts), 0
    for part in parts:
        assert_equal(joined, begin, len(part), part.made)
        begin += len(part)
    assert len(joined) == begin > 0


def test_most_requests_are_read_together(signatures):
    """What the reader of the test above is compared with must not be what it leaves its requests to."""
    draw = random.Random(6)
    for name, make in (("serving_default", raw_request), ("ids", ids_request)):
        calls = [call_of(make(draw, 3), name) for _ in range(200)]
        rows = signatures[name].join("here", calls)[1]
        assert rows.count(3) > 150


@pytest.mark.parametrize("kind", [*BROKEN, *UNUSUAL])
def test_a_broken_or_unusual_request_is_left_out_of_the_batch(signatures, kind):
    signature, draw = signatures["serving_default"], random.Random(7)
    good = {"user": texts(USERS, (8,)), "postcode": whole(draw, [1, 2], 8)}
    odd = {**good, **(BROKEN | UNUSUAL)[kind](8)}
    calls = [call_of(one) for one in (good, odd, good)]
    joined, rows = signature.join("here", calls)
    assert rows == [8, -1, 8]
    wanted = alone(signature, calls[0])
    for begin in (0, 8):
        assert_equal(joined[BATCH], begin, 8, wanted)
    assert (alone(signature, calls[1]) is None) == (kind in BROKEN)


def test_damaged_bytes_are_never_read_otherwise_than_alone(signatures):
    draw = random.Random(8)
    for name, make in (("serving_default", raw_request), ("ids", ids_request)):
        signature, read = signatures[name], 0
        for _ in range(400):
            data = bytearray(call_of(make(draw, 4), name).data)
            for _ in range(draw.randint(1, 3)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            try:
                call = decode_request(bytes(data))
            except DataError:
                continue
            joined, (rows,) = signature.join("here", [call])
            if rows >= 0:
                read += 1
                wanted = alone(signature, call)
                assert wanted is not None
                assert_equal(joined[BATCH], 0, rows, wanted)
        assert read > 20


@pytest.mark.parametrize("name", ["serving_default", "ids"])
@pytest.mark.parametrize("width", [0, 1, None])
def test_a_shape_that_claims_rows_without_values_takes_no_memory(signatures, name, width):
    sizes = [2**27] if width is None else [2**27, width]
    call = call_of({"tags": tensor_of(9 if name == "ids" else 7, sizes)}, name)
    assert signatures[name].join("here", [call])[1] == [-1]
    with pytest.raises(StatusError, match=r"a request must have at most .* rows, got 134217728"):
        call.tensors(lambda heads: signatures[name].check("here", heads))


def test_clients_at_once_get_what_each_gets_alone_and_only_broken_requests_fail(exported, signatures):
    draw = random.Random(9)
    asked = []
    for place in range(120):
        name, make = draw.choice([("", raw_request), ("ids", ids_request)])
        made = make(draw, draw.choice([1, 2, 5, 64]))
        if place % 10 == 0:
            made, name = {"user": texts([b"u"], (1,)), **BROKEN[draw.choice(list(BROKEN))](1)}, ""
        call = call_of(made, name)
        inputs = alone(signatures[name or "serving_default"], call)
        asked.append((call.data, inputs))
    answers = {}
    start = threading.Barrier(16)

    def client(own):
        with grpc.insecure_channel(server.address) as channel:
            call = channel.unary_unary(PREDICT)
            start.wait(60)
            for round_ in range(5):
                for place in own:
                    try:
                        answer = decode_response(call(asked[place][0], timeout=60))[1]
                        answers[round_, place] = {alias: decode_tensor(one) for alias, one in answer.items()}
                    except grpc.RpcError as error:
                        answers[round_, place] = error.code()

    with serving(os.path.dirname(exported)) as server, ThreadPoolExecutor(16) as pool:
        list(pool.map(client, [range(each, len(asked), 16) for each in range(16)], timeout=120))
    run = signatures["ids"].run
    assert len(answers) == 5 * len(asked)
    for (_, place), got in answers.items():
        inputs = asked[place][1]
        if inputs is None:
            assert got == grpc.StatusCode.INVALID_ARGUMENT
            continue
        wanted = run({BATCH: MadeInputs(inputs)})
        for alias, value in wanted.items():
            torch.testing.assert_close(got[alias], value, rtol=1e-5, atol=1e-6)
