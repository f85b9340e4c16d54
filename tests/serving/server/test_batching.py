"""Micro-batching: which requests are batched, how they are read and answered, and what happens to broken ones."""

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shoal.serving.predict import (
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    join_calls,
    model_spec,
    split_answers,
)
from shoal.serving.server import batching
from shoal.serving.server.batching import PROBE, Batcher, Pace
from shoal.serving.tensors import decode_tensor, encode_content, encode_tensor


def call_of(**inputs):
    return decode_request(encode_request(model_spec("m"), {a: encode_tensor(v) for a, v in inputs.items()}))


async def ask(batcher, inputs):
    return await batcher.submit(lambda: inputs, lambda outputs: outputs)


def test_a_lone_request_runs_at_once_and_those_that_come_meanwhile_run_together():
    gate, inside, sizes = threading.Event(), threading.Event(), []

    def run(inputs):
        sizes.append(len(inputs["x"]))
        inside.set()
        assert gate.wait(60)
        return {"y": inputs["x"] * 2}

    async def main():
        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(run, max_rows=6, pool=pool)
            tasks = [asyncio.create_task(ask(batcher, {"x": torch.full((1,), 1)}))]
            assert await asyncio.to_thread(inside.wait, 60)
            tasks += [asyncio.create_task(ask(batcher, {"x": torch.full((n,), n)})) for n in (2, 3, 4)]
            await asyncio.sleep(0.05)
            gate.set()
            return batcher, await asyncio.wait_for(asyncio.gather(*tasks), 60)

    batcher, results = asyncio.run(main())
    assert [result["y"].tolist() for result in results] == [[2 * n] * n for n in (1, 2, 3, 4)]
    assert sizes == [1, 5, 4]
    assert (batcher.batches, batcher.requests) == (3, 4)


def test_requests_of_other_kinds_and_filters_do_not_keep_the_others_apart():
    sizes = []

    def run(inputs):
        sizes.append(len(inputs["x"]))
        return {"y": inputs["x"] * 2, "z": inputs["x"] * 3}

    def join(calls):
        joined = join_calls([call for call in calls if call.data != broken.data])
        assert joined is not None
        rows = iter(joined[1])
        return joined[0], [-1 if call.data == broken.data else next(rows) for call in calls]

    def filtered(number, *names):
        inputs = {"x": encode_tensor(torch.tensor([number]))}
        return decode_request(encode_request(model_spec("m"), inputs, names))

    async def ask_encoded(batcher, call):
        def finish(outputs):
            return encode_response(b"", {name: outputs[name] for name in call.output_filter or outputs})

        answer = await batcher.submit(lambda: {"x": call.tensor("x")}, finish, call, b"")
        return {name: decode_tensor(value).tolist() for name, value in decode_response(answer)[1].items()}

    async def main():
        batcher = Batcher(run, join)
        encoded = [filtered(1), filtered(2, "z"), broken, filtered(4), filtered(5, "z"), filtered(6)]
        asked = [ask_encoded(batcher, call) for call in encoded]
        return await asyncio.gather(*asked, ask(batcher, {"x": torch.tensor([7])}))

    broken = filtered(3)
    *encoded, plain = asyncio.run(main())
    assert encoded == [{"z": [3 * n]} if n in (2, 5) else {"y": [2 * n], "z": [3 * n]} for n in range(1, 7)]
    assert plain["y"].tolist() == [14]
    assert sorted(sizes) == [2, 2, 3]  # with one filter, read separately, and without a filter


@pytest.mark.parametrize("encoded", [False, True])
def test_a_request_that_the_model_cannot_run_does_not_fail_its_neighbours(encoded):
    def run(inputs):
        if (inputs["x"] < 0).any():
            raise ValueError("negative")
        return {"y": inputs["x"] * 2}

    async def ask_encoded(batcher, inputs):
        call = call_of(**inputs)
        return await batcher.submit(
            lambda: {alias: call.tensor(alias) for alias in call.inputs}, partial(encode_response, b""), call, b""
        )

    async def main():
        batcher = Batcher(run)
        asked = [(ask_encoded if encoded else ask)(batcher, {"x": torch.tensor([n])}) for n in (1, -1, 3)]
        return batcher, await asyncio.gather(*asked, return_exceptions=True)

    batcher, results = asyncio.run(main())
    assert batcher.batches == 4  # all together, then one by one
    assert str(results[1]) == "negative"
    got = [decode_tensor(decode_response(each)[1]["y"]) if encoded else each["y"] for each in (results[0], results[2])]
    assert [each.tolist() for each in got] == [[2], [6]]


def test_a_caller_that_goes_away_does_not_disturb_its_batch():
    async def main():
        batcher = Batcher(lambda inputs: {"y": inputs["x"]})
        gone = asyncio.create_task(ask(batcher, {"x": torch.tensor([7])}))
        stays = asyncio.create_task(ask(batcher, {"x": torch.tensor([8])}))
        await asyncio.sleep(0)
        gone.cancel()
        return await asyncio.wait_for(stays, 60)

    assert asyncio.run(main())["y"].tolist() == [8]


def test_requests_that_come_fast_are_gathered_and_a_slow_stream_is_not():
    async def stream(clients, pause):
        batcher = Batcher(lambda inputs: {"y": inputs["x"]})

        async def client():
            for _ in range(300 // clients * 4):
                await ask(batcher, {"x": torch.tensor([1])})
                await asyncio.sleep(pause)

        await asyncio.gather(*(client() for _ in range(clients)))
        return batcher

    crowd = asyncio.run(stream(20, 0.0))
    assert crowd.requests / crowd.batches > 4
    alone = asyncio.run(stream(4, 0.004))
    assert alone.batches >= alone.requests / 4  # batched only by chance


def test_one_caller_in_a_loop_is_hardly_ever_made_to_wait(monkeypatch):
    waits = []
    begin = Batcher._begin
    monkeypatch.setattr(Batcher, "_begin", lambda self, loop, waited: waits.append(waited) or begin(self, loop, waited))

    async def main():
        batcher = Batcher(lambda inputs: {"y": inputs["x"]})
        for _ in range(2000):
            await ask(batcher, {"x": torch.tensor([1])})

    asyncio.run(main())
    assert len(waits) == 2000
    assert sum(waits) <= 2000 // PROBE + 1


@pytest.mark.parametrize("rows", [[1], [1, 1, 1], [3, 0, 5, 1]])
def test_joined_messages_are_read_as_they_are_one_by_one(rows):
    torch.manual_seed(len(rows))
    given = [
        {
            "ids": torch.randint(-(2**62), 2**62, (n, 3)),
            "dense": torch.randn(n, 2, 2),
            "wide": torch.randn(n, dtype=torch.float64),
            "small": torch.randint(-9, 9, (n, 1), dtype=torch.int32),
            "flag": torch.rand(n, 4) > 0.5,
        }
        for n in rows
    ]
    joined, counts = join_calls([call_of(**each) for each in given])
    assert counts == rows
    for alias in given[0]:
        want = torch.cat([each[alias] for each in given])
        assert joined[alias].dtype == want.dtype
        assert torch.equal(joined[alias], want)


def test_tensor_content_is_joined_too():
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    encoded = encode_content("float", (2, 3), values.tobytes())
    call = decode_request(encode_request(model_spec("m"), {"x": encoded}))
    joined, rows = join_calls([call, call_of(x=torch.ones(1, 3))])
    assert rows == [2, 1]
    assert joined["x"].tolist() == [*values.tolist(), [1, 1, 1]]


def test_requests_that_do_not_ask_alike_are_left_to_the_reader_that_can_say_why():
    plain = call_of(x=torch.ones(1, 3))
    assert join_calls([plain, call_of(x=torch.ones(1, 4))]) is None
    assert join_calls([plain, call_of(x=torch.ones(1, 3, dtype=torch.float64))]) is None
    assert join_calls([plain, call_of(y=torch.ones(1, 3))]) is None
    assert join_calls([call_of(x=torch.ones(1, 3), y=torch.ones(2))]) is None
    assert join_calls([call_of(x=torch.tensor(1.0))]) is None
    assert join_calls([call_of(x=torch.ones(1, dtype=torch.float16))]) is None
    assert join_calls([call_of()]) is None
    short = encode_content("float", (2, 3), b"\0" * 8)
    assert join_calls([decode_request(encode_request(model_spec("m"), {"x": short}))]) is None
    repeated = b"\x08\x01\x12\x08\x12\x02\x08\x01\x12\x02\x08\x03\x2a\x04\0\0\x80\x3f"  # one value, shape of three
    call = decode_request(encode_request(model_spec("m"), {"x": repeated}))
    assert join_calls([call]) is None
    assert decode_tensor(repeated).tolist() == [[1, 1, 1]]


def test_answers_have_the_bytes_that_the_python_encoder_writes():
    torch.manual_seed(3)
    rows = [1, 0, 4, 200]
    total = sum(rows)
    outputs = {
        "score": torch.randn(total),
        "vector": torch.randn(3, total).T,  # not contiguous
        "empty": torch.randn(total, 0),
        "ids": torch.randint(-(2**62), 2**62, (total, 2)),
        "count": torch.randint(-5, 5, (total,), dtype=torch.int32),
        "flag": torch.rand(total) > 0.5,
        "exact": torch.randn(total, 1, 2, dtype=torch.float64),
    }
    spec = model_spec("m", "serving_default", 7).SerializeToString()
    begin = 0
    for count, answer in zip(rows, split_answers(spec, outputs, rows), strict=True):
        own = {alias: value[begin : begin + count] for alias, value in outputs.items()}
        assert answer == encode_response(spec, own)
        begin += count


def test_outputs_that_are_not_plain_rows_are_left_to_the_python_encoder():
    assert split_answers(b"", {"x": torch.tensor(1.0)}, [1]) is None
    assert split_answers(b"", {"x": torch.ones(3)}, [1, 1]) is None
    assert split_answers(b"", {"x": torch.ones(2, dtype=torch.float16)}, [1, 1]) is None
    assert split_answers(b"", {"x": np.array([b"a"], object)}, [1]) is None


def test_broken_messages_never_join_and_never_crash():
    rng = random.Random(5)
    good = encode_tensor(torch.randint(-(2**40), 2**40, (3, 5)))
    for round_ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            if rng.random() < 0.3:
                del data[rng.randrange(len(data)) :]
            if not data:
                break
            data[rng.randrange(len(data))] = rng.randrange(256)
        call = decode_request(encode_request(model_spec("m"), {"x": bytes(data)}))
        joined = join_calls([call])
        if joined is None:
            continue
        alone = decode_tensor(bytes(data))  # a joined tensor must equal what the careful reader reads
        assert torch.equal(joined[0]["x"], alone), (round_, bytes(data).hex())


def test_short_calls_may_run_on_the_loop_and_long_ones_may_not(monkeypatch):
    spent = [0.0]
    monkeypatch.setattr(batching, "time", SimpleNamespace(thread_time=lambda: spent[0]))

    def take(seconds):
        spent[0] += seconds
        return seconds

    pace = Pace()
    assert not pace.short  # not known yet
    assert pace.timed(lambda: take(0.001)) == 0.001
    assert pace.short
    pace.timed(lambda: take(0.003))
    assert not pace.short
    for _ in range(12):
        pace.timed(lambda: take(0.001))
    assert pace.short
    with pytest.raises(ZeroDivisionError):
        pace.timed(lambda: take(0.003) / 0)
    assert not pace.short
    waiting = Pace(may_inline=False)
    waiting.timed(lambda: None)
    assert not waiting.short


def test_waiting_for_a_processor_is_no_work():
    pace = Pace()
    pace.timed(lambda: time.sleep(0.05))
    assert pace._seconds < 0.05
