"""Requests with raw values and ids while rows and weights are pushed, in every form in which replicas store rows."""

import json
import random
import subprocess
import threading
import urllib.request
from pathlib import Path

import grpc
import pytest
import torch

from shoal.serving.predict import PREDICT, decode_response
from shoal.serving.server.loader import load_servable
from shoal.serving.server.moments import Fresh
from shoal.serving.server.trained import BATCH
from shoal.serving.sync.publisher import Publisher
from shoal.serving.tensors import decode_tensor
from shoal.testing.commands import Command
from shoal.train.loop.trainer import trainer
from shoal.trainer import load_config
from tests.serving.sources import HandSource
from tests.train.loop.helpers import Told
from tests.train.loop.test_export import ROWS, own_logits, serving, write_data
from tests.train.loop.test_raw_requests import alone, call_of, ids_request, raw_request

LONG = 60.0


def exported(folder, codec):
    path = write_data(folder)
    config = load_config(path, {"serve.dir": str(folder / "exports/ctr"), "serve.codec": codec})
    with trainer(config, reporter=Told()) as one:
        one.run()
        return own_logits(one, ROWS)[0]


def only_version(folder):
    (version,) = (folder / "exports/ctr").iterdir()
    return version


@pytest.mark.parametrize("codec", ["float32", "half"])
def test_every_answer_is_of_one_round_of_rows_and_weights(tmp_path, codec):
    exported(tmp_path, codec)
    version = only_version(tmp_path)
    own = load_servable(version, version.parent)
    draw = random.Random(1)
    asked = [call_of(raw_request(draw, 9)) for _ in range(3)] + [call_of(ids_request(draw, 9), "ids") for _ in range(3)]
    signatures = [own.signatures["ids" if call.spec.signature_name else "serving_default"] for call in asked]
    inputs = [alone(signature, call) for signature, call in zip(signatures, asked, strict=True)]
    source = HandSource({name: view.dims[0] for name, view in own.tables.items()}, run=2**62)
    ids = torch.cat([one.ids for one in inputs]).unique().tolist()
    first = {name: value.clone() for name, value in own.program.weights.items()}
    rounds = range(1, 9)
    weights = {value: {name: one * (1 + value / 4) for name, one in first.items()} for value in rounds}

    def answers(value, of_weights):
        """What each request is answered with the rows of one round and the weights of another."""
        for view in own.tables.values():
            view.table.assign(torch.tensor(ids), torch.full((len(ids), view.dims[0]), value / 8))
        own.program.moments.switch(own.program.bound(weights[of_weights]), {})
        made = zip(signatures, asked, strict=True)
        return [signature.run(signature.join("here", [call])[0])["logit"] for signature, call in made]

    expected = {value: answers(value, value) for value in rounds}

    def is_of(got, place, values):
        return any(torch.allclose(got, expected[value][place], rtol=1e-4, atol=1e-5) for value in values)

    for value in rounds[1:]:
        mixed = [*answers(value, value - 1), *answers(value - 1, value)]
        assert not any(is_of(got, place % len(asked), rounds) for place, got in enumerate(mixed))
    stop, seen = threading.Event(), [[] for _ in asked]

    def ask(place, address):
        with grpc.insecure_channel(address) as channel:
            call = channel.unary_unary(PREDICT)
            last = False
            while not last:
                last = stop.is_set()
                answer = decode_response(call(asked[place].data, timeout=LONG))[1]
                seen[place].append(decode_tensor(answer["logit"]))

    with serving(version.parent) as server, Publisher(source, [server.address], model="ctr") as publisher:
        threads = [threading.Thread(target=ask, args=(place, server.address)) for place in range(len(asked))]
        try:
            for value in rounds:
                for table in own.tables:
                    source.learn(table, ids, value / 8)
                source.set_weights(weights[value])
                publisher.flush(LONG)
                if value == 1:
                    for each in threads:
                        each.start()
        finally:
            stop.set()
            for each in threads:
                if each.ident:
                    each.join(LONG)
        assert not any(each.is_alive() for each in threads)
    assert all(seen)
    for place, own_answers in enumerate(seen):
        assert all(is_of(got, place, rounds) for got in own_answers)
        assert is_of(own_answers[-1], place, rounds[-1:])


@pytest.mark.parametrize("lists", [False, True])
def test_rows_that_lie_over_the_tables_are_as_those_that_are_written(tmp_path, lists):
    (tmp_path / "log.csv").write_text("click,user,item,tags\n" + "1,u1,i1,a|b\n0,u2,i2,\n" * 32)
    path = tmp_path / "run.toml"
    tags = '[features.tags]\nseparator = "|"\n' if lists else ""
    path.write_text(
        f'[data]\ntrain = ["{tmp_path / "log.csv"}"]\nformat = "csv"\nlabel = "click"\n'
        f"[features.user]\n[features.item]\n{tags}[table]\ndim = 4\n"
        '[model]\nname = "deepfm"\nhidden = [4]\n[train]\nbatch_size = 16\n'
    )
    with trainer(load_config(path), reporter=Told()) as one:
        one.run()
        version = Path(one.export(str(tmp_path / "exports/ctr")))
    own = load_servable(version, version.parent)
    (view,) = own.tables.values()
    program = own.program
    signature = own.signatures["serving_default"]
    columns = {"user": ["u1", "u2", "new"], "item": ["i1", "other", "i2"], "tags": [["a", "c"], [], ["b"]]}
    inputs = signature.convert({name: columns[name] for name in signature.spec.inputs})
    before = program(inputs)["logit"]
    ids = inputs[BATCH].ids.reshape(-1).unique()[::2]
    values = torch.randn(len(ids), 4)
    program.moments.switch(None, {(view.name, 0): Fresh(ids, values)})
    over = program(inputs)["logit"]
    view.table.assign(ids, values)
    program.moments.switch(None, {})
    torch.testing.assert_close(over, program(inputs)["logit"])
    assert not torch.allclose(over, before)


def test_a_replica_with_half_rows_is_asked_as_a_command(tmp_path):
    logits = exported(tmp_path, "half")
    command = ["serve", tmp_path / "exports/ctr", "--port", 0, "--rest-port", 0, "--json"]
    process = Command(*command, stdout=subprocess.PIPE)
    try:
        told = json.loads(process.stdout.readline())
        rest = told["rest"]
        instances = [{name: values[row] for name, values in ROWS.items()} for row in range(6)]
        request = urllib.request.Request(
            f"http://{rest}/v1/models/ctr:predict", json.dumps({"instances": instances}).encode()
        )
        with urllib.request.urlopen(request, timeout=LONG) as answer:
            rows = json.loads(answer.read())["predictions"]
        torch.testing.assert_close(torch.tensor([row["logit"] for row in rows]), logits, rtol=1e-2, atol=1e-2)
    finally:
        process.terminate()
        process.wait(LONG)
        process.stdout.close()
