"""`Client`: columns, batching and splitting, errors, asyncio, deadlines; then servers that are killed and restarted."""

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch

import shoal
from shoal.errors import ConfigError, DataError
from shoal.serving import (
    Client,
    ClientSecurity,
    Feature,
    ModelExporter,
    ModelServer,
    ModelServerConfig,
    ServerSecurity,
    StatusError,
    gen_model_config,
    publish,
)
from shoal.serving.client.caller import may_retry
from shoal.serving.client.columns import Form, Forms, columns_of, cut, joined, kind_of, rows_of
from shoal.serving.client.joining import Joiner
from shoal.serving.client.replicas import ReplicaSet
from shoal.serving.status import Code
from shoal.table import test_hash_table
from shoal.testing.commands import Command
from tests.serving.client.test_remote_predict import Recorder
from tests.serving.helpers import Net, eventually, free_port
from tests.serving.server.test_security import certificates  # noqa: F401  (the fixture)

WAIT = 60

# --- columns ----------------------------------------------------------------------------------------------------------


def test_values_become_columns_of_the_form_that_the_signature_takes():
    forms = {"age": Form(torch.float32, 1), "ids": Form(torch.int64, 2), "user": Form(torch.int64, 2)}
    got = columns_of({"age": [33, 40], "ids": np.array([1, 2], np.int32), "user": ["u17", b"u18"]}, forms)
    assert got["age"].dtype == torch.float32
    assert got["ids"].dtype == torch.int64
    assert got["ids"].tolist() == [[1], [2]]
    assert got["user"].tolist() == [["u17"], [b"u18"]]
    assert rows_of(got) == 2


def test_a_single_value_is_one_row_and_texts_of_different_lengths_are_filled_up():
    got = columns_of({"user": "u17", "age": 33, "tags": [["a", "b"]], "x": torch.tensor(1.5)}, {})
    assert {alias: tuple(each.shape) for alias, each in got.items()} == {
        "user": (1,), "age": (1,), "tags": (1, 2), "x": (1,)
    }  # fmt: skip
    assert columns_of({"t": [["a", "b"], [], ["c"]]}, {})["t"].tolist() == [["a", "b"], ["", ""], ["c", ""]]


def test_what_is_missing_may_be_none_in_columns_of_any_kind():
    forms = {"user": Form(None, 1), "age": Form(torch.float32, 1), "tags": Form(None, 2)}
    got = columns_of({"user": [None, None], "age": [None, None], "tags": [["a", "b"], None]}, forms)
    assert got["user"].tolist() == ["", ""]
    assert got["age"].isnan().all()
    assert got["tags"].tolist() == [["a", "b"], ["", ""]]
    assert columns_of({"tags": [None, []]}, forms)["tags"].shape == (2, 0)


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([1 << 40, 5], torch.int32),
        ([-1], torch.uint8),
        ([1 << 63], torch.int64),
        (np.array([300], np.int16), torch.int8),
    ],
)
def test_integers_that_do_not_fit_the_signature_are_sent_as_they_are(values, want):
    got = columns_of({"x": values}, {"x": Form(want, 1)})["x"]  # the server refuses their dtype
    assert got.dtype != want
    assert got.tolist() == list(values)


def test_integers_up_to_the_limits_of_the_signature_are_converted():
    for want in (torch.int32, torch.int64, torch.uint8):
        limits = torch.iinfo(want)
        got = columns_of({"x": [limits.min, limits.max]}, {"x": Form(want, 1)})["x"]
        assert (got.dtype, got.tolist()) == (want, [limits.min, limits.max])


def test_empty_lists_become_columns_of_the_dtype_that_the_signature_takes():
    forms = {"ids": Form(torch.int64, 2), "slot": Form(torch.int64, 1)}
    got = columns_of({"ids": [[], []], "slot": []}, forms)
    assert (got["ids"].dtype, got["ids"].shape) == (torch.int64, (2, 0))
    assert (got["slot"].dtype, got["slot"].shape) == (torch.int64, (0,))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([["a"], "b"], "every row must be a list"),
        ([[1], 2], "every row must be a list"),
        ([[1, 2], None], "equal lengths, got 0 to 2 values; pad them, or pass texts"),
        (["a", 3], "must hold texts only"),
        ([[1, 2], [3]], "1 to 2 values"),
        ([object()], "object"),
        ([{}], "dict"),
        ([1 << 70], "at most 64 bits, got 1180591620717411303424"),
        ([1, 1 << 70], "at most 64 bits, got 1180591620717411303424"),
        ([1, {}], "numbers or texts, got dict"),
        ([[1, None]], "numbers or texts, got NoneType"),
        (np.array([1, 2], object), "must have a number dtype, got object"),
        ([1 + 2j], "complex"),
    ],
)
def test_values_without_a_tensor_form_are_refused_by_name(value, text):
    with pytest.raises(DataError, match=f"'x'.*{text}"):
        columns_of({"x": value}, {})


def test_columns_are_joined_and_cut_back():
    parts = [columns_of({"u": ["a"], "x": [1.0]}, {}), columns_of({"u": ["b", "c"], "x": [2.0, 3.0]}, {})]
    whole = joined(parts)
    assert kind_of(whole) == kind_of(parts[0])
    assert whole["u"].tolist() == ["a", "b", "c"]
    back = cut(whole, [1, 2])
    assert [each["x"].tolist() for each in back] == [[1.0], [2.0, 3.0]]
    assert cut(whole, [1, 1]) is None
    assert rows_of({"a": torch.zeros(2), "b": torch.zeros(3)}) is None
    assert rows_of({"a": torch.zeros(0)}) is None


# --- which replica ----------------------------------------------------------------------------------------------------


def test_the_replica_with_the_least_to_do_is_next_and_one_that_failed_rests():
    replicas = ReplicaSet(["a", "b", "c"])
    a, b, c = replicas
    a.in_flight, b.in_flight = 1, 2
    assert replicas.pick(0.0).address == "c"
    c.failed(0.0, "gone")
    assert replicas.pick(0.0).address == "a"
    assert replicas.pick(100.0).address == "c"
    assert replicas.pick(0.0, {"a", "b"}).address == "c"
    assert replicas.pick(0.0, {"a", "b", "c"}) is None
    assert replicas.replace(["b", "d"])
    assert not replicas.replace(["b", "d"])
    assert next(each for each in replicas if each.address == "b").in_flight == 2


@pytest.mark.parametrize(
    ("code", "message", "again"),
    [
        (Code.UNAVAILABLE, "connection refused", True),
        (Code.INVALID_ARGUMENT, "wrong", False),
        (Code.PERMISSION_DENIED, "no", False),
        (Code.INTERNAL, "Received RST_STREAM with error code 2", True),
        (Code.INTERNAL, "division by zero", False),
        (Code.RESOURCE_EXHAUSTED, "Received message larger than max (5 vs. 4)", False),
    ],
)
def test_only_what_may_succeed_elsewhere_is_tried_again(code, message, again):
    assert may_retry(StatusError(code, message)) is again


def test_a_status_error_can_be_caught_where_grpc_is_not_installed():
    code = "from shoal.serving import StatusError; import sys; print(StatusError(3, 'x'), 'grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT, check=True)
    assert done.stdout == "x False\n"


# --- batching ---------------------------------------------------------------------------------------------------------


def ask_all(asked, send, room=1, max_rows=8, max_bytes=1 << 20):
    async def main():
        joiner = Joiner(send, lambda: room, max_rows, max_bytes)
        end = time.monotonic() + WAIT
        work = (joiner.ask("m", columns_of(each, {}), end) for each in asked)
        return joiner, await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), WAIT)

    return asyncio.run(main())


def doubling(sizes):
    async def send(target, columns, end):
        sizes.append(len(columns["x"]))
        await asyncio.sleep(0)
        if (columns["x"] < 0).any():
            raise StatusError(Code.INVALID_ARGUMENT, "negative")
        return {"y": columns["x"] * 2}

    return send


def test_requests_that_come_together_travel_together_and_large_ones_in_parts():
    sizes = []
    _, answers = ask_all([{"x": [1.0]}, {"x": [2.0, 3.0]}, {"x": list(map(float, range(20)))}], doubling(sizes))
    assert [each["y"].tolist() for each in answers] == [[2.0], [4.0, 6.0], [2.0 * n for n in range(20)]]
    assert max(sizes) <= 8
    assert sum(sizes) == 23
    assert len(sizes) < 1 + 1 + 3 + 1


def test_a_wrong_request_does_not_fail_those_that_travel_with_it():
    _, answers = ask_all([{"x": [1.0]}, {"x": [-1.0]}, {"x": [3.0]}], doubling([]))
    assert answers[0]["y"].tolist() == [2.0]
    assert isinstance(answers[1], StatusError)
    assert answers[2]["y"].tolist() == [6.0]


def test_a_call_that_is_too_large_for_the_server_is_halved():
    sizes = []

    async def send(target, columns, end):
        sizes.append(len(columns["x"]))
        if len(columns["x"]) > 3:
            raise StatusError(Code.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 3)")
        return {"y": columns["x"] + 1}

    _, (answer, alone) = ask_all([{"x": [1.0] * 8}, {"x": [5.0]}], send)
    assert answer["y"].tolist() == [2.0] * 8
    assert alone["y"].tolist() == [6.0]


# --- against a server in this process ---------------------------------------------------------------------------------


def export(folder, version=7):
    torch.manual_seed(0)
    net = Net()
    table = test_hash_table(4, name_suffix=f"user{folder.name}{version}")
    table.assign(torch.arange(10), torch.arange(40).float().reshape(10, 4))
    tool = ModelExporter(
        folder, model_name="m", net=net, features={"user": Feature(slot="u")}, dense={"price": torch.zeros(2, 2)}
    )
    tool.export([{"u": table}], global_step=version, timestamp=version)
    return net


@pytest.fixture
def serve(tmp_path):
    made = []

    def start(**fields):
        if not (tmp_path / "exported_models").exists():
            export(tmp_path)
        config = ModelServerConfig()
        config.model_config_list.config.append(gen_model_config("m", str(tmp_path / "exported_models")))
        server = ModelServer(config=config, poll_wait_seconds=0, **fields).start()
        made.append(server)
        return server

    yield start
    for server in made:
        server.stop(0)


def scores(users, prices):
    torch.manual_seed(0)
    rows = torch.arange(40).float().reshape(10, 4)
    return Net()(user=rows[torch.tensor(users)], price=torch.tensor(prices))["score"].detach()


def test_predictions_are_what_the_net_says_however_they_are_asked(serve):
    server = serve()
    users, prices = [n % 10 for n in range(50)], [[0.1 * n, 1.0] for n in range(50)]
    want = scores(users, prices)
    with Client(server.address, model="m") as client:
        assert torch.allclose(client.predict({"user": users, "price": prices})["score"], want, atol=1e-6)
        one = client.predict({"user": 3, "price": [[1, 2]]}, outputs=["score"])
        assert torch.allclose(one["score"], scores([3], [[1.0, 2.0]]), atol=1e-6)
        one["score"].add_(1)  # the caller owns this tensor

        async def together():
            rows = zip(users, prices, strict=True)
            return await asyncio.gather(*(client.predict_async({"user": [u], "price": [p]}) for u, p in rows))

        answers = asyncio.run(asyncio.wait_for(together(), WAIT))
        assert torch.allclose(torch.cat([each["score"] for each in answers]), want, atol=1e-6)
        assert client.replicas()[server.address]["answers"] < 40  # fewer calls than requests
        with ThreadPoolExecutor(8) as pool:
            rows = [{"user": [u], "price": [p]} for u, p in zip(users, prices, strict=True)]
            found = list(pool.map(client.predict, rows, timeout=WAIT))
        assert torch.allclose(torch.cat([each["score"] for each in found]), want, atol=1e-6)
    with Client(server.address, model="m", max_batch_rows=7) as client:  # in parts
        assert torch.allclose(client.predict({"user": users, "price": prices})["score"], want, atol=1e-6)


class Ranked(torch.nn.Module):
    """Shares of a batch: each row depends on all of them."""

    def forward(self, user):
        return {"share": torch.softmax(user.sum(-1), 0)}


def test_a_model_whose_rows_depend_on_each_other_is_asked_whole(tmp_path):
    table = test_hash_table(4, name_suffix="ranked")
    table.assign(torch.arange(10), torch.rand(10, 4))
    tool = ModelExporter(tmp_path, model_name="m", net=Ranked(), features={"user": Feature(slot="u")})
    tool.export([{"u": table}], global_step=1, timestamp=1)
    config = ModelServerConfig()
    config.model_config_list.config.append(gen_model_config("m", str(tmp_path / "exported_models")))
    server = ModelServer(config=config, poll_wait_seconds=0).start()
    try:
        with Client(server.address, model="m", max_batch_rows=4) as client:
            assert client.predict({"user": list(range(10))})["share"].sum().item() == pytest.approx(1)

            async def together():
                return await asyncio.gather(*(client.predict_async({"user": [1, 2]}) for _ in range(20)))

            for answer in asyncio.run(asyncio.wait_for(together(), WAIT)):
                assert answer["share"].sum().item() == pytest.approx(1)
    finally:
        server.stop(0)


def test_a_large_batch_is_cut_to_what_servers_take(serve):
    server = serve(max_message_bytes=100_000)
    count = 20_000
    users, prices = torch.arange(count) % 10, torch.rand(count, 2)
    with Client(server.address, model="m", max_batch_rows=count) as client:
        got = client.predict({"user": users, "price": prices})["score"]
    assert torch.allclose(got, scores(users.tolist(), prices.tolist()), atol=1e-6)


def test_what_is_wrong_is_told_at_once_and_not_repeated(serve, metrics):
    server = serve()
    good = {"user": [1], "price": [[0.0, 1.0]]}

    def fails(code, text, ask):
        begin = time.monotonic()
        with pytest.raises(StatusError, match=text) as failure:
            ask()
        assert failure.value.code == code
        assert time.monotonic() - begin < WAIT / 2
        return failure.value

    with Client(server.address, model="m", deadline=timedelta(seconds=WAIT)) as client:
        fails(Code.INVALID_ARGUMENT, "unexpected \\['usr'\\]", lambda: client.predict({"usr": [1], "price": [[0, 1]]}))
        error = fails(Code.INVALID_ARGUMENT, "'price'", lambda: client.predict({**good, "price": [[0.0, 1.0, 2.0]]}))
        assert isinstance(error, ValueError)
        fails(Code.INVALID_ARGUMENT, "one row per sample", lambda: client.predict({**good, "user": [1, 2]}))
        fails(Code.INVALID_ARGUMENT, "no signature 'no'", lambda: client.predict(good, signature="no"))
        fails(Code.INVALID_ARGUMENT, "no output", lambda: client.predict(good, outputs=["no"]))
        fails(Code.INVALID_ARGUMENT, "must be a dict", lambda: client.predict([1]))
        assert client.predict(good)["score"].shape == (1,)
    with Client([server.address, server.address], model="no", deadline=timedelta(seconds=WAIT)) as client:
        fails(Code.NOT_FOUND, "no model 'no'.*'m'", lambda: client.predict(good))
    with Client(server.address, model="m", version=3, deadline=WAIT) as client:
        fails(Code.NOT_FOUND, "no available version 3", lambda: client.predict(good))
    assert not [name for name, *_ in metrics.counters if name == "shoal_client_retries"]
    with pytest.raises(StatusError, match="closed"):
        client.predict(good)


def test_arguments_are_checked_when_the_client_is_made(tmp_path):
    for servers, text in [
        ("nowhere", "host:port"), ([], "at least one"), ("http://h:1", "gRPC port"), ([3], "'host:port'"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=text):
            Client(servers, model="m")
    with pytest.raises(ConfigError, match="model"):
        Client("h:1", model="")
    with pytest.raises(ConfigError, match="deadline"):
        Client("h:1", model="m", deadline=0)
    with pytest.raises(ConfigError, match="max_in_flight"):
        Client("h:1", model="m", max_in_flight=0)
    with pytest.raises(ConfigError, match="without TLS"):
        Client("10.1.2.3:1", model="m", security=ClientSecurity(token="secret"))


def test_a_token_is_shown_and_a_wrong_one_is_refused_at_once(serve):
    server = serve(security=ServerSecurity(tokens={"me": "secret"}))
    good = {"user": [1], "price": [[0.0, 1.0]]}
    with Client(server.address, model="m", security=ClientSecurity(token="secret")) as client:
        assert client.predict(good)["score"].shape == (1,)
    with Client(server.address, model="m", security=ClientSecurity(token="no"), deadline=WAIT) as client:
        with pytest.raises(StatusError) as failure:
            client.predict(good)
        assert failure.value.code == Code.UNAUTHENTICATED


def test_texts_travel_as_string_tensors():
    echo = Recorder()
    with Client(echo.address, model="m", deadline=WAIT) as client:
        client._forms["serving_default"] = Forms({})  # as if the server had sent no metadata
        got = client.predict({"user": ["u17", "ü"], "tags": [["a", "b"], ["c"]]})
    assert got["user"].tolist() == [b"u17", "ü".encode()]
    assert got["tags"].tolist() == [[b"a", b"b"], [b"c", b""]]
    assert {alias: each.dtype for alias, each in echo.requests[0].inputs.items()} == {"user": 7, "tags": 7}


# --- replicas that are unreachable, slow or hang ----------------------------------------------------------------------


def test_an_address_that_refuses_is_passed_over(serve, refused, metrics):
    server = serve()
    with Client([refused(), server.address], model="m", deadline=WAIT) as client:
        for _ in range(10):
            assert client.predict({"user": [1], "price": [[0.0, 1.0]]})["score"].shape == (1,)


def test_nobody_there_is_told_at_the_deadline_or_after_the_retries(refused):
    address = refused()
    with Client(address, model="m", deadline=2.0) as client:
        begin = time.monotonic()
        with pytest.raises(StatusError, match=address) as failure:
            client.predict({"user": [1]})
        assert failure.value.code == Code.UNAVAILABLE
        assert time.monotonic() - begin >= 2.0
    with Client(address, model="m", deadline=WAIT, retries=1) as client, pytest.raises(StatusError, match=address):
        client.predict({"user": [1]})


def test_a_server_that_hangs_costs_part_of_the_deadline_and_another_one_answers(serve):
    hangs, server = Recorder(waits=True), serve()
    try:
        with Client([hangs.address, server.address], model="m", deadline=12.0) as client:
            client._forms["serving_default"] = Forms({})
            inputs = {"user": torch.tensor([[1]]), "price": torch.tensor([[0.0, 1.0]])}
            for _ in range(6):
                assert client.predict(inputs)["score"].shape == (1,)
        with Client(hangs.address, model="m", deadline=0.3) as client:
            client._forms["serving_default"] = Forms({})
            with pytest.raises(StatusError, match=r"within 0\.3 s"):
                client.predict(inputs)

            async def given_up():
                task = asyncio.create_task(client.predict_async(inputs, deadline=WAIT))
                await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

            asyncio.run(asyncio.wait_for(given_up(), WAIT))
    finally:
        hangs.goes_on.set()


def test_closing_ends_what_is_under_way():
    hangs = Recorder(waits=True)
    client = Client(hangs.address, model="m", deadline=WAIT)
    client._forms["serving_default"] = Forms({})
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.predict, {"x": [1.0]})
        eventually(lambda: hangs.requests, WAIT)
        client.close()
        with pytest.raises(StatusError) as failure:
            future.result(WAIT)
        assert failure.value.code == Code.CANCELLED
    hangs.goes_on.set()


def test_predictions_and_publishing_speak_tls_with_certificates(serve, certificates):  # noqa: F811
    own = {"ca": certificates / "ca.pem"}
    mutual = ServerSecurity(
        certificate=certificates / "server.pem", key=certificates / "server.key", client_ca=certificates / "ca.pem",
        tokens={"trainer": "secret"},
    )  # fmt: skip
    server = serve(security=mutual)
    good = {"user": [1], "price": [[0.0, 1.0]]}
    known = ClientSecurity(
        certificate=certificates / "trainer.pem", key=certificates / "trainer.key", token="secret", **own
    )
    with Client(server.address, model="m", security=known) as client:
        before = client.predict(good)["score"].item()
        assert asyncio.run(client.predict_async(good))["score"].shape == (1,)
    for wrong in (ClientSecurity(**own), None):  # without a certificate; without TLS
        with Client(server.address, model="m", security=wrong, deadline=1.0) as client:
            with pytest.raises(StatusError) as failure:
                client.predict(good)
            assert failure.value.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.UNAUTHENTICATED)
    (name,) = server.model("m").current().servable.tables
    table = shoal.HashTable(4, initializer="zeros")
    with publish({name: table}, targets=[server.address], model="m", security=known, every=None) as publication:
        table.assign(torch.tensor([1]), torch.full((1, 4), 3.0))
        publication.flush(WAIT)
    with Client(server.address, model="m", security=known) as client:
        assert client.predict({"user": [1], "price": [[0.0, 1.0]]})["score"].item() != pytest.approx(before)


# --- processes that are killed ----------------------------------------------------------------------------------------


class Served:
    """`shoal serve` in a process of its own."""

    def __init__(self, folder, *flags, port=0):
        self.folder, self.flags, self.port = folder, flags, port or free_port()
        self.process = None

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def start(self):
        command = ["serve", self.folder, "--port", self.port, "--json", "--threads", 1, "--poll-seconds", 0]
        self.process = Command(*command, *self.flags, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        lines = queue.Queue()
        threading.Thread(target=lambda out: lines.put(out.readline()), args=(self.process.stdout,), daemon=True).start()
        assert json.loads(lines.get(timeout=120))["grpc"] == self.address
        self.process.stdout.close()
        return self

    def kill(self):
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(WAIT)


class Load:
    """Threads that ask all the time until they are stopped."""

    def __init__(self, client, threads=4):
        self.client, self.failures, self.answers, self.stop = client, [], 0, threading.Event()
        self.want = scores([1], [[0.0, 1.0]])
        self.threads = [threading.Thread(target=self.run) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    def run(self):
        while not self.stop.is_set():
            try:
                got = self.client.predict({"user": [1], "price": [[0.0, 1.0]]})["score"]
                assert torch.allclose(got, self.want, atol=1e-6)
                self.answers += 1
            except Exception as error:
                self.failures.append(error)
            self.stop.wait(0.001)  # others start meanwhile

    def wait_for(self, more):
        target = self.answers + more
        eventually(lambda: self.answers >= target or self.failures, WAIT, f"{more} more answers")
        assert not self.failures, self.failures[0]

    def end(self):
        self.stop.set()
        for thread in self.threads:
            thread.join(WAIT)


def test_replicas_are_killed_under_load_and_no_prediction_fails(tmp_path):
    export(tmp_path)
    replicas = [Served(tmp_path), Served(tmp_path)]
    try:
        for each in replicas:
            each.start()
        with Client([each.address for each in replicas], model="m", deadline=WAIT) as client:
            load = Load(client)
            try:
                load.wait_for(50)
                for each in replicas:
                    each.kill()
                    load.wait_for(50)
                    before = client.replicas()[each.address]["answers"]
                    each.start()
                    eventually(lambda: client.replicas()[each.address]["answers"] > before, WAIT, "it to answer again")  # noqa: B023
                load.wait_for(50)
            finally:
                load.end()
            assert not load.failures
    finally:
        for each in replicas:
            each.kill()


def test_replicas_of_a_registry_appear_and_leave(tmp_path):
    export(tmp_path / "model")
    registry = f"dir://{tmp_path}/registry"
    (tmp_path / "registry").mkdir()
    flags = ("--registry", f"dir:{tmp_path}/registry")
    first, second = Served(tmp_path / "model", *flags), Served(tmp_path / "model", *flags)
    good = {"user": [1], "price": [[0.0, 1.0]]}
    try:
        with Client(registry, model="m", deadline=WAIT) as client, ThreadPoolExecutor(1) as pool:
            with pytest.raises(StatusError, match="lists no replica"):
                client.predict(good, deadline=0.2)
            early = pool.submit(client.predict, good)  # asked before there is a replica
            first.start()
            assert early.result(WAIT)["score"].shape == (1,)
            second.start()
            eventually(lambda: len(client.replicas()) == 2, WAIT, "the second replica")
            load = Load(client)
            try:
                eventually(lambda: client.replicas()[second.address]["answers"] > 10, WAIT, "answers of the second")
                first.process.terminate()  # leaves the registry, then drains
                first.process.wait(WAIT)
                eventually(lambda: list(client.replicas()) == [second.address], WAIT, "the first to leave")
                load.wait_for(20)
            finally:
                load.end()
            assert not load.failures
        with Client(str(tmp_path / "registry"), model="other", deadline=0.5) as client:
            with pytest.raises(StatusError, match="models with replicas: m") as failure:
                client.predict(good)
            assert failure.value.code == Code.UNAVAILABLE
    finally:
        first.kill()
        second.kill()


def test_replicas_of_a_zookeeper_are_found_and_leave(tmp_path, zookeeper):
    pytest.importorskip("kazoo")
    export(tmp_path)
    replica = Served(tmp_path, "--registry", zookeeper.hosts)
    good = {"user": [1], "price": [[0.0, 1.0]]}
    try:
        replica.start()
        with Client(f"zk://{zookeeper.hosts}", model="m", deadline=WAIT) as client:
            assert client.predict(good)["score"].shape == (1,)
            assert list(client.replicas()) == [replica.address]
            replica.process.terminate()
            replica.process.wait(WAIT)
            eventually(lambda: not client.replicas(), WAIT, "the replica to leave")
    finally:
        replica.kill()


def test_a_registry_that_is_away_is_told(refused):
    pytest.importorskip("kazoo")
    with pytest.raises(ConfigError, match="cannot reach"):
        Client(f"zk://{refused()}", model="m")
