"""The canonical artifact: layout, damage, replay, and that it is written once."""

import hashlib
import json
import struct

import pytest
import torch

from shoal.errors import ConfigError
from shoal.gather import (
    ArtifactReader,
    GatherError,
    GradientSpec,
    QuantSpec,
    clip_factors,
    dequantize,
    gather,
    outer_update,
    unpack12,
    write_artifact,
)
from tests.gather.helpers import QUICK, WINDOW, model_of, sgd, small_plan, small_spec, small_store

SPEC = small_spec()


@pytest.fixture
def written(tmp_path):
    result = gather(small_plan(), SPEC, small_store(), config=QUICK)
    path = tmp_path / "w.pga"
    return result, path, write_artifact(result, path, spec=SPEC)


def test_layout(written):
    result, path, sha = written
    data = path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == sha
    assert data[:4] == b"PGA1"
    (length,) = struct.unpack_from("<Q", data, 4)
    header = json.loads(data[12 : 12 + length])
    assert data[12 : 12 + length].decode() == json.dumps(header, sort_keys=True, separators=(",", ":"))
    start = -(-(12 + length) // 64) * 64
    assert not any(data[12 + length : start])
    assert hashlib.blake2b(data[:-32], digest_size=32).digest() == data[-32:]
    rows = iter(header["blocks"])
    for param in SPEC.params:
        for uid in result.uids:
            at, idxs, vals, quant, _ = next(rows)
            assert at % 64 == 0
            ref = result.payloads[uid]
            i = SPEC.index[param.name]
            block = data[start + at : start + at + idxs + vals + quant]
            assert block[:idxs] == ref.param(i).idxs.numpy().tobytes()
            assert block[idxs : idxs + vals] == ref.param(i).vals.numpy().tobytes()
            shift, scale, offset = struct.unpack_from("<fdi", block, idxs + vals)
            assert (shift, scale, offset) == ref.param(i).quant[:3]
            assert block.endswith(b"float32\0")
    assert bytes.fromhex(header["norms"]) == result.norms.numpy().tobytes()
    assert not {"rank", "time", "owners", "elapsed"} & set(header)


def test_the_reader_has_the_headers_fields(written):
    result, path, _ = written
    reader = ArtifactReader(path)
    assert (reader.params, reader.quant) == (SPEC.params, SPEC.quant)
    assert len(reader.blocks) == len(reader.params) * len(reader.uids)
    for name in [
        "uids",
        "tiers",
        "global_steps",
        "skipped_uids",
        "skip_reasons",
        "intended_uids",
        "success_rate",
        "timestamps",
        "digests",
        "window",
        "version",
        "spec_hash",
    ]:
        assert getattr(reader, name) == getattr(result, name), name
    assert torch.equal(reader.norms, result.norms)
    assert reader.params == SPEC.params
    assert ArtifactReader(path.read_bytes()).uids == result.uids


def test_replay_gives_the_same_update(written):
    result, path, _ = written
    hashes = set()
    for source in (result, ArtifactReader(path), [ArtifactReader(path)]):
        model = model_of()
        hashes.add(outer_update(model, sgd(model), source, spec=SPEC).update_hash)
    assert len(hashes) == 1


def test_an_artifact_can_be_written_from_an_artifact(written, tmp_path):
    _, path, sha = written
    assert write_artifact(ArtifactReader(path), tmp_path / "copy.pga", spec=SPEC) == sha


@pytest.mark.parametrize("quant", [None, QuantSpec(16)])
def test_legacy_dict_under_a_plain_scatter_mean(tmp_path, quant):
    from tests.gather.test_update import applied, gathered

    spec = GradientSpec.from_model(model_of(((64, 48), (128, 128), ())), target_chunk=128, topk=9, quant=quant)
    result = gathered(spec, range(6))
    write_artifact(result, tmp_path / "x.pga", spec=spec)
    legacy = ArtifactReader(tmp_path / "x.pga").to_legacy_dict()
    assert set(legacy) == {"state_dict", "uids", "skipped_uids", "success_rate"}
    update, _ = applied(spec, ArtifactReader(tmp_path / "x.pga"))
    for i, param in enumerate(spec.params):
        factors = clip_factors(result.norms[:, i])[1]
        indices, values = [], []
        for row in range(len(legacy["uids"])):
            idxs, vals = (legacy["state_dict"][param.name + s][row] for s in ("idxs", "vals"))
            if quant is not None:
                vals = dequantize(vals, legacy["state_dict"][param.name + "quant_params"][row])
            if param.codec == "packed12":
                idxs = unpack12(idxs, (param.chunks, param.k))
            indices.append(idxs.reshape(param.chunks, param.k).long())
            values.append(vals.reshape(param.chunks, param.k) * factors[row])
        dense = torch.zeros(param.chunks, param.totalk)
        dense.scatter_reduce_(1, torch.cat(indices, 1), torch.cat(values, 1), "mean", include_self=False)
        y, x, h, w = param.blocks
        dense = dense.reshape(y, x, h, w).transpose(1, 2).reshape(param.shape)
        assert torch.allclose(update[param.name], dense, rtol=1e-6, atol=1e-7)


def test_every_damaged_byte_is_noticed(written):
    _, path, _ = written
    data = path.read_bytes()
    for at in (0, 5, 40, len(data) // 2, len(data) - 1):
        broken = bytearray(data)
        broken[at] ^= 0x10
        with pytest.raises(GatherError):
            ArtifactReader(bytes(broken))
    for cut in (0, 10, 100, len(data) - 1):
        with pytest.raises(GatherError):
            ArtifactReader(data[:cut])
    with pytest.raises(GatherError):
        ArtifactReader(path.with_name("absent"))


def test_a_window_is_written_once(written):
    result, path, sha = written
    before = path.stat().st_mtime_ns
    assert write_artifact(result, path, spec=SPEC) == sha
    assert path.stat().st_mtime_ns == before
    other = gather(small_plan(), SPEC, small_store(), config=QUICK)
    other.manifest.global_steps[0] += 1
    with pytest.raises(GatherError):
        write_artifact(other, path, spec=SPEC)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == sha
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("budget", [1, 300, 4096])
def test_a_small_budget_changes_nothing(written, tmp_path, budget):
    result, _, sha = written
    assert write_artifact(result, tmp_path / "b.pga", spec=SPEC, budget_bytes=budget) == sha
    with pytest.raises(ConfigError):
        write_artifact(result, tmp_path / "c.pga", spec=SPEC, budget_bytes=0)


def rewritten(data, change):
    """The artifact with another header and the trailer that goes with it."""
    (length,) = struct.unpack_from("<Q", data, 4)
    header = json.loads(data[12 : 12 + length])
    text = json.dumps(change(header) or header, sort_keys=True, separators=(",", ":")).encode()
    head = b"PGA1" + struct.pack("<Q", len(text)) + text
    start = -(-(12 + length) // 64) * 64
    body = head + b"\0" * (-len(head) % 64) + data[start:-32]
    return body + hashlib.blake2b(body, digest_size=32).digest()


def put(*keys, value):
    def change(header):
        for key in keys[:-1]:
            header = header[key]
        header[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda header: [1],
        lambda header: header.pop("digests") and None,
        put("format", value=2),
        put("tiers", value=[]),
        put("uids", value=[1]),
        put("norms", value="00"),
        put("params", 0, "k", value=6),
        put("params", 0, "xshape", value=[1, 1]),
        put("spec_hash", value="0" * 32),
        put("blocks", value=[]),
        put("blocks", 0, 0, value=-64),
        put("blocks", 1, 1, value=1 << 40),
        put("blocks", 2, 4, value="-"),
        put("blocks", 2, 4, value=["A"]),
        put("blocks", 3, value=7),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_damage(written, change):
    data = written[1].read_bytes()
    assert ArtifactReader(rewritten(data, lambda header: None)).uids == written[0].uids
    with pytest.raises(GatherError):
        ArtifactReader(rewritten(data, change))


def test_nothing_is_written_when_nothing_was_accepted(tmp_path):
    from shoal.gather import GatherPlan, MemoryStore

    empty = gather(GatherPlan(WINDOW, [1], time_max=1), SPEC, MemoryStore({}), config=QUICK)
    assert write_artifact(empty, tmp_path / "n.pga", spec=SPEC) is None
    assert list(tmp_path.iterdir()) == []
