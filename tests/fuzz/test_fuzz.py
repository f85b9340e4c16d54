"""Readers of external bytes reject damaged input with one of our errors, and never crash or hang."""

from pathlib import Path

import pytest

from shoal import _core
from shoal.testing.fuzz import FuzzFinding, Target, fuzz, kept_inputs, try_one
from tests.fuzz.targets import all_targets

CORPUS = Path(__file__).parent / "corpus"
RUNS = 15_000
"""Damaged inputs per reader, the same ones on every machine; before a release, `make fuzz` makes others for an hour."""


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return {one.name: one for one in all_targets(tmp_path_factory.mktemp("fuzz"))}


NAMES = (
    "predict", "predict_response", "rest", "ps_request", "ps_reply", "ps_create", "ps_log", "data_csv", "data_features",
    "data_criteo", "data_tfrecord", "data_parquet", "checkpoint", "manifest", "export_manifest", "payload_safetensors",
    "payload_pt", "tensors", "toml_train", "toml_plan", "agent_conf", "net_plan",
    *(["http2"] if _core.front_available() else []),
    "data_json", "live_frames", "live_address", "toml_join", "toml_up", "toml_tables", "data_options", "ps_group",
)  # fmt: skip


def test_every_reader_is_here(targets):
    assert sorted(targets) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_takes_its_own_kind_of_input(targets, name):
    for seed in targets[name].seeds:
        targets[name].read(seed)


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_answers_or_refuses_its_corpus(targets, name):
    """Valid input, and what broke a reader before."""
    kept = list(kept_inputs(CORPUS / name))
    assert kept, f"tests/fuzz/corpus/{name} is empty; python -m tests.fuzz.run --write-seeds fills it"
    for _, data in kept:
        try_one(targets[name], data)


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_refuses_damaged_input(targets, name):
    fuzz(targets[name], seed=1, runs=RUNS)


def test_a_reader_that_breaks_is_found():
    def read(data: bytes) -> None:
        if data != b"abc":
            raise IndexError("broken")

    with pytest.raises(FuzzFinding, match="IndexError: broken"):
        fuzz(Target("toy", [b"abc"], read), seed=1, runs=50)


def test_a_reader_that_hangs_is_found():
    def read(data: bytes) -> None:
        while data != b"abc":
            pass

    with pytest.raises(FuzzFinding, match="not read within"):
        fuzz(Target("toy", [b"abc"], read), seed=1, runs=50, limit_s=0.2)
