"""Pushes in the form that a replica stores, while that form changes; servers on loopback."""

import time

import numpy as np
import pytest
import torch

from shoal.serving import ModelServer, SignatureDefMap, export_ps
from shoal.serving.status import StatusError
from shoal.serving.sync.monolith.push_client import PushClient
from shoal.serving.sync.quantize import asked_by, check_codecs, fingerprint, known
from shoal.serving.sync.split import Delta, DeltaBatch
from shoal.table import FloatCompressorConfig, HashTableConfigInstance, MultiHashTable
from tests.serving.server.test_server import CODE, Client, config_of, export, fails
from tests.serving.sync.test_sync_client import instance


def fixed(r):
    return FloatCompressorConfig(fixed_r8=FloatCompressorConfig.FixedR8(r=r))


HALF = FloatCompressorConfig(fp16=FloatCompressorConfig.Fp16())
FLOAT = FloatCompressorConfig(fp32=FloatCompressorConfig.Fp32())


# --- named codecs -----------------------------------------------------------------------------------------------------


def test_codecs_have_fingerprints_and_plain_floats_none():
    assert fingerprint({}) == ""
    one = fingerprint({"a": "half", "b": "fixed_r8:1.0"})
    assert one == fingerprint({"b": "fixed_r8:1.0", "a": "half"})
    assert len({one, fingerprint({"a": "half"}), fingerprint({"a": "fixed_r8:1.0", "b": "half"})}) == 3


@pytest.mark.parametrize("codec", ["zstd", "fixed_r8", "fixed_r8:x", "fixed_r8:0", "half:2", "half;zip", ":1"])
def test_forms_that_a_sender_does_not_know_are_sent_as_floats(codec):
    assert not known(codec)


def test_only_encoded_values_need_the_right_codec():
    codecs = {"a_value": "fixed_r8:1.0", "b_value": "half"}
    floats = {alias: torch.zeros(1, 2) for alias in codecs}
    check_codecs(codecs, floats, "")
    check_codecs(codecs, {**floats, "b_value": torch.zeros(1, 2).half()}, "")  # their dtypes tell
    encoded = {**floats, "a_value": torch.zeros(1, 2, dtype=torch.int8)}
    check_codecs(codecs, encoded, fingerprint({"a_value": "fixed_r8:1.0"}))
    for said in ("", fingerprint({"a_value": "fixed_r8:8.0"}), fingerprint(codecs)):
        with pytest.raises(StatusError, match=r"accepts a_value in fixed_r8:1\.0") as caught:
            check_codecs(codecs, encoded, said)
        assert caught.value.code == 9


# --- switches ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def replica(tmp_path):
    server = None

    def start():
        nonlocal server
        server = ModelServer(config=config_of(m=(tmp_path, "latest")), poll_wait_seconds=0).start()
        return server, Client(server), PushClient(f"127.0.0.1:{server.port}", quantize=True)

    yield start
    server.stop(0)


def batch_of(value, dim=2):
    delta = Delta("T", dim, np.array([5]), np.full((1, dim), value, np.float32))
    return DeltaBatch("m", "hashtable_assign", 60_000, False, [delta], time.time())


def lookup(client):
    return client.predict("m", "lookup", {"u": torch.tensor([5])})["u"][0, 0].item()


def codecs_of(pusher):
    return [form.codecs for form in pusher._forms.values()]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (fixed(1.0), fixed(8.0)),
        (fixed(1.0), HALF),
        (fixed(1.0), FLOAT),
        (HALF, FLOAT),
        (HALF, fixed(1.0)),
        (FLOAT, fixed(1.0)),
        (FLOAT, HALF),
    ],
    ids=["other range", "r8 to half", "r8 to float", "half to float", "half to r8", "float to r8", "float to half"],
)
def test_a_push_after_a_switch_stores_the_value_that_was_sent(replica, tmp_path, before, after):
    export(tmp_path, 1, 1, codec=before)
    server, client, pusher = replica()
    assert pusher.push(batch_of(0.5)).status_code == 0
    assert lookup(client) == 0.5
    export(tmp_path, 2, 2, codec=after)
    server.refresh()
    for value in (0.25, -0.75):
        assert pusher.push(batch_of(value)).status_code == 0
        assert lookup(client) == value
    assert pusher.push(batch_of(0.5)).status_code == 0
    wanted = {"fixed_r8": "fixed_r8:", "fp16": "half", "fp32": None}[after.WhichOneof("type")]
    (codecs,) = codecs_of(pusher)  # the sender knows the new form
    assert codecs == {} if wanted is None else codecs["T_value"].startswith(wanted)
    pusher.close()


def test_values_in_a_codec_that_is_not_named_are_refused_with_what_is_taken(replica, tmp_path):
    export(tmp_path, 1, 1, codec=fixed(8.0))
    _, client, pusher = replica()
    inputs = {"T_id": torch.tensor([5]), "T_value": torch.full((1, 2), 64, dtype=torch.int8)}
    with fails(CODE.FAILED_PRECONDITION, "accepts T_value in fixed_r8:8.0"):
        client.predict("m", "hashtable_assign", inputs)
    assert lookup(client) == 0.0
    with fails(CODE.INVALID_ARGUMENT, "must be float or int8, got half"):
        client.predict("m", "hashtable_assign", {**inputs, "T_value": torch.ones(1, 2).half()})
    pusher.close()


def test_a_push_that_is_refused_for_another_reason_changes_nothing(replica, tmp_path):
    export(tmp_path, 1, 1, codec=fixed(1.0))
    _, client, pusher = replica()
    assert pusher.push(batch_of(0.5)).status_code == 0
    assert pusher.push(batch_of(0.25, dim=3)).status_code == 3
    assert lookup(client) == 0.5
    assert pusher.push(batch_of(0.25)).status_code == 0
    assert lookup(client) == 0.25
    pusher.close()


def test_a_multi_table_follows_too(replica, tmp_path):
    def write(version, *forms):
        configs = {}
        for name, form in zip("ab", forms, strict=True):
            config = instance(2).table_config
            config.entry_config.segments[0].comp_config.CopyFrom(form)
            configs[name] = HashTableConfigInstance(config, [1.0])
        table = MultiHashTable.from_configs(configs, name_suffix=f"v{version}")
        table.name = "M"
        export_ps(tmp_path / str(version), [table], model_name="m", sub_graph="ps_0", global_step=version)

    def push(value):
        deltas = [Delta(name, 2, np.array([5]), np.full((1, 2), value, np.float32)) for name in "ab"]
        return pusher.push(DeltaBatch("m", "M/raw_assign", 60_000, True, deltas, time.time())).status_code

    write(1, fixed(1.0), HALF)
    server, client, pusher = replica()
    assert push(0.5) == 0
    for version, forms in enumerate([(fixed(8.0), HALF), (HALF, fixed(8.0)), (FLOAT, FLOAT), (fixed(1.0), HALF)], 2):
        write(version, *forms)
        server.refresh()
        for value in (0.25, -0.5):
            assert push(value) == 0
            got = client.predict("m", "lookup", {"a": torch.tensor([5]), "b": torch.tensor([5])})
            assert got["a"].tolist() == got["b"].tolist() == [[value, value]]
    pusher.close()


def test_a_replica_that_says_nothing_gets_floats():
    assert asked_by(SignatureDefMap().signature_def["hashtable_assign"]) == {}
