"""Geometry, packing, quantization, digests, compression and the fifteen checks of a payload. Plain values only."""

import copy
import math
import struct
from hashlib import blake2b

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.errors import ConfigError
from shoal.gather import (
    Compressor,
    GradientSpec,
    ParamSpec,
    PayloadRejected,
    QuantSpec,
    compress,
    decompress,
    dequantize,
    fault,
    pack12,
    payload_digest,
    quantize,
    unpack12,
    validate_payload,
)
from shoal.gather.payload.codec import pack12_reference, unpack12_reference
from tests.gather.helpers import gradients, model_of, payload, small_spec


@pytest.mark.parametrize(
    ("shape", "target_chunk", "topk", "xshape", "totalk", "k", "codec"),
    [
        ((6, 4), 4, 4, (2, 1, 3, 4), 12, 4, "packed12"),
        ((10,), 4, 4, (5, 2), 2, 2, "packed12"),
        ((8, 3, 3, 3), 4, 4, (2, 9, 4, 3), 12, 4, "packed12"),
        ((50257, 768), 64, 64, (1733, 12, 29, 64), 1856, 64, "packed12"),
        ((15,), 8, 64, (3, 5), 5, 4, "packed12"),
        ((), 4, 4, (1, 1), 1, 1, "i32"),
        ((128, 128), 128, 63, (1, 1, 128, 128), 16384, 63, "i32"),
        ((7,), 64, 1, (1, 7), 7, 1, "i32"),
    ],
)
def test_geometry_of_a_parameter(shape, target_chunk, topk, xshape, totalk, k, codec):
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.empty(shape, device="meta"))})
    param = GradientSpec.from_model(model, target_chunk=target_chunk, topk=topk).params[0]
    assert (param.xshape, param.totalk, param.k, param.codec) == (xshape, totalk, k, codec)
    assert param.grid == xshape[: len(xshape) // 2]
    assert param.chunks == math.prod(param.grid)


def test_spec_keeps_trainable_parameters_in_registration_order():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    assert [p.name for p in GradientSpec.from_model(model).params] == ["0.bias", "1.weight", "1.bias"]
    assert [p.name for p in GradientSpec.from_model(model, params=["1.bias"]).params] == ["1.bias"]
    with pytest.raises(ConfigError, match=r"0\.weight"):
        GradientSpec.from_model(model, params=["0.weight"])


def test_spec_hash_changes_with_everything_that_decides_a_payload():
    hashes = [
        small_spec().hash,
        small_spec(topk=4).hash,
        small_spec(quant=None).hash,
        small_spec(quant=QuantSpec(8)).hash,
    ]
    assert len(set(hashes)) == 4
    assert all(len(h) == 32 for h in hashes)
    assert small_spec().hash == hashes[0] == GradientSpec.from_json(small_spec().to_json()).hash


def test_payload_bytes_are_those_of_an_honest_payload():
    for quant in (QuantSpec(), None):
        spec = small_spec(quant=quant)
        assert validate_payload(payload(spec, 1), spec).download_bytes == spec.payload_bytes


@pytest.mark.parametrize("kwargs", [{"target_chunk": 0}, {"topk": 0}, {"target_chunk": 2.5}, {"topk": True}])
def test_sizes_other_than_counts_are_config_errors(kwargs):
    with pytest.raises(ConfigError):
        GradientSpec.from_model(model_of(), **kwargs)
    with pytest.raises(ConfigError):
        ParamSpec("w", (4,), (1, 4), 3, "packed12")
    with pytest.raises(ConfigError):
        QuantSpec(bins=257)


# ---- packing


def test_packing_example():
    assert pack12(torch.tensor([1, 4095, 256, 7])).tolist() == [1, 240, 255, 0, 113, 0]
    assert unpack12(torch.tensor([1, 240, 255, 0, 113, 0], dtype=torch.uint8), (2, 2)).tolist() == [[1, 4095], [256, 7]]


@given(st.lists(st.integers(0, 4095), max_size=80).map(lambda v: v[: len(v) // 2 * 2]))
def test_packing_round_trips_and_matches_its_reference(values):
    indices = torch.tensor(values, dtype=torch.int64)
    packed = pack12(indices)
    assert torch.equal(packed, pack12_reference(indices))
    assert torch.equal(unpack12(packed, indices.shape), indices)
    assert torch.equal(unpack12_reference(packed), indices)


@pytest.mark.parametrize("n", [0, 2, 18, 20, 22, 1022, 131072 + 6])
def test_every_length_is_unpacked_to_its_last_byte(n):
    indices = torch.randint(0, 4096, (n,), dtype=torch.int32)
    assert torch.equal(unpack12(pack12(indices), n), indices.long())


@pytest.mark.parametrize("bad", [[1], [0, 4096], [-1, 3], [0.5, 1.0]])
def test_what_cannot_be_packed_is_a_value_error(bad):
    with pytest.raises(ValueError, match="pack12"):
        pack12(torch.tensor(bad))


def test_unpacking_needs_the_right_number_of_bytes():
    with pytest.raises(ValueError, match="unpack12"):
        unpack12(torch.zeros(4, dtype=torch.uint8), (2,))
    with pytest.raises(ValueError, match="uint8"):
        unpack12(torch.zeros(3), (2,))
    with pytest.raises(ValueError, match="unpack12"):
        unpack12(torch.zeros(3, dtype=torch.uint8), (-1, -2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_values_come_back_in_the_dtype_that_was_quantized(dtype):
    q, params = quantize(torch.tensor([-1.0, 0.5, 2.0, 0.1], dtype=dtype))
    back = dequantize(q, params)
    assert back.dtype == (torch.float32 if dtype == torch.float64 else dtype)
    assert torch.equal(back, dequantize(q, (*params[:4], torch.float32)).to(back.dtype))


# ---- quantization


def test_quantization_example():
    values = torch.tensor([-1.0, 0.5, 2.0, 0.1, 0.9, -0.3])
    q, (shift, scale, offset, lookup, dtype) = quantize(values)
    assert np.float32(shift) == np.float32(0.36666664)
    assert np.float32(scale) == np.float32(1.5520953)
    assert offset == 2
    assert dtype == torch.float32
    assert q.tolist() == [1, 2, 3, 2, 2, 2]
    assert lookup.tolist() == pytest.approx([0, -1.3666667, -0.0666667, 1.6333333], abs=1e-7)
    back = dequantize(q, (shift, scale, offset, lookup, dtype))
    assert back.tolist() == [np.float32(v) for v in (-1.0, 0.29999998, 2.0, 0.29999998, 0.29999998, 0.29999998)]
    assert float(back.double().norm()) == pytest.approx(2.3151674, rel=1e-7)


@pytest.mark.parametrize("bins", [1, 2, 4, 5, 255, 256])
def test_bins_match_their_reference(bins):
    from shoal.gather.payload.codec import _bin, _bin_reference

    z = torch.randn(50_001) * 3
    z[:4] = torch.tensor([0.0, 1e30, -1e30, 0.25])
    for a, b in zip(_bin(z, 0.5, bins // 2, bins), _bin_reference(z, 0.5, bins // 2, bins), strict=True):
        assert torch.equal(a, b) or torch.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("values", [[3.0], [2.0, 2.0, 2.0]])
def test_values_without_spread_have_scale_one(values):
    q, params = quantize(torch.tensor(values))
    assert params[1] == 1.0
    assert dequantize(q, params).tolist() == values


@pytest.mark.parametrize("bins", [1, 2, 4, 8, 9, 16, 17, 32, 33, 256])
def test_every_number_of_bins_is_looked_up(bins):
    generator = torch.Generator().manual_seed(bins)
    params = (0.25, 1.0, bins // 2, torch.randn(bins, generator=generator), torch.float32)
    for n in (0, 1, 7, 16, 31, 100, 70_001):
        q = torch.randint(0, bins, (n,), generator=generator).to(torch.uint8)
        assert torch.equal(dequantize(q, params), params[3][q.long()] + 0.25)


def test_dequantized_values_are_cast_to_the_peers_dtype():
    q, params = quantize(torch.randn(100), bins=16)
    for dtype in (torch.float16, torch.bfloat16, "bfloat16"):
        out = dequantize(q, (*params[:4], dtype))
        wanted = torch.bfloat16 if isinstance(dtype, str) else dtype
        assert out.dtype == wanted
        assert torch.equal(out, (params[3][q.long()] + params[0]).to(wanted))


# ---- compression


@pytest.mark.parametrize("quant", [None, QuantSpec(), QuantSpec(256)])
@pytest.mark.parametrize(("target_chunk", "topk"), [(16, 8), (4, 3), (64, 64), (100, 7), (1, 5)])
def test_compression_sends_the_largest_of_every_chunk(quant, target_chunk, topk):
    model = model_of(((64, 48), (48,), (10,), (), (6, 5, 2), (100, 200)))
    spec = GradientSpec.from_model(model, target_chunk=target_chunk, topk=topk, quant=quant)
    sent = compress(gradients(spec, 3), spec)
    validate_payload(sent, spec)
    dense = decompress(sent, spec)
    for param in spec.params:
        y, x, h, w = param.blocks
        chunked = gradients(spec, 3)[param.name].reshape(y, h, x, w).transpose(1, 2).reshape(y * x, h * w)
        kept = dense[param.name].reshape(y, h, x, w).transpose(1, 2).reshape(y * x, h * w)
        index = chunked.abs().topk(param.k, dim=1).indices
        if quant is None:
            wanted = torch.zeros_like(chunked).scatter(1, index, chunked.gather(1, index))
            assert torch.equal(kept, wanted)
        else:
            assert torch.equal((kept != 0).sum(1) <= param.k, torch.ones(len(kept), dtype=torch.bool))


def test_of_equal_magnitudes_the_lower_position_is_sent():
    spec = GradientSpec.from_model(model_of(((8,),)), target_chunk=8, topk=4, quant=None)
    state = compress({"p0": torch.tensor([1.0, -1, 1, 0, 1, -1, 1, 1])}, spec)["state_dict"]
    assert unpack12(state["p0idxs"], 4).tolist() == [0, 1, 2, 4]


def test_error_feedback_delays_but_never_loses():
    spec = small_spec()
    compressor = Compressor(spec)
    sent, given_ = {}, {}
    for step in range(20):
        g = gradients(spec, step)
        out = decompress(compressor.compress(g), spec)
        for name in g:
            given_[name] = given_.get(name, 0) + g[name].double()
            sent[name] = sent.get(name, 0) + out[name].double()
    for name in sent:
        total = sent[name] + compressor.memory[name].double()
        assert torch.allclose(total, given_[name], atol=1e-4)
    saved = compressor.state_dict()
    other = Compressor(spec)
    other.load_state_dict(saved)
    a, b = compressor.compress(gradients(spec, 50)), other.compress(gradients(spec, 50))
    assert payload_digest(a, spec) == payload_digest(b, spec)
    compressor.reset()
    assert compressor.memory == {}


def test_a_compressors_memory_is_loaded_in_any_layout_and_dtype_but_only_in_its_shape():
    spec = small_spec()
    compressor = Compressor(spec)
    compressor.compress(gradients(spec, 1))
    saved = compressor.state_dict()
    want = payload_digest(compressor.compress(gradients(spec, 2)), spec)
    for change in (lambda t: t.t().contiguous().t(), torch.Tensor.double):
        other = Compressor(spec)
        other.load_state_dict(saved | {"memory": {name: change(t) for name, t in saved["memory"].items()}})
        assert payload_digest(other.compress(gradients(spec, 2)), spec) == want
    for wrong in ({"p0": torch.zeros(1)}, {"other": torch.zeros(10)}):
        with pytest.raises(ConfigError, match="must have shape"):
            other.load_state_dict(saved | {"memory": saved["memory"] | wrong})
        assert other.memory["p0"].shape == (64, 48)


@pytest.mark.parametrize("k", [8, 1], ids=["packed12", "i32"])
def test_a_payload_of_another_shape_is_not_decompressed(k):
    spec = GradientSpec.from_model(model_of(), target_chunk=16, topk=k, quant=None)
    for key in ("p0vals", "p0idxs"):
        made = payload(spec, 1)
        made["state_dict"][key] = made["state_dict"][key].reshape(-1)[:3].clone()
        with pytest.raises(PayloadRejected, match="p0"):
            decompress(made, spec)


def test_gradients_that_are_not_finite_are_refused():
    spec = small_spec()
    g = gradients(spec, 1)
    g["p1"][3] = float("nan")
    with pytest.raises(ConfigError, match="p1"):
        compress(g, spec)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e39])
def test_a_bad_gradient_leaves_the_carried_over_errors_of_all_parameters(bad):
    spec = small_spec()
    compressor = Compressor(spec)
    compressor.compress(gradients(spec, 1))
    before = {name: memory.clone() for name, memory in compressor.memory.items()}
    last = spec.params[-1].name
    g = {name: each.double() for name, each in gradients(spec, 2).items()}
    g[last].view(-1)[0] = bad
    with pytest.raises(ConfigError, match=f"{last}.*must be finite"):
        compressor.compress(g)
    assert all(torch.equal(memory, before[name]) for name, memory in compressor.memory.items())
    compressor.compress(gradients(spec, 3))


def test_a_sum_that_overflows_is_refused_and_changes_nothing():
    spec = small_spec()
    compressor = Compressor(spec)
    g = gradients(spec, 1)
    compressor.compress(g)
    last = spec.params[-1].name
    compressor.memory[last].view(-1)[0] = 3e38
    before = {name: memory.clone() for name, memory in compressor.memory.items()}
    g[last].view(-1)[0] = 3e38
    with pytest.raises(ConfigError, match=f"{last}.*finite sum"):
        compressor.compress(g)
    assert all(torch.equal(memory, before[name]) for name, memory in compressor.memory.items())


# ---- digest and norms


def test_digest_is_what_the_format_says():
    spec = small_spec()
    made = payload(spec, 4)
    digest = blake2b(digest_size=32)
    for param in spec.params:
        state = made["state_dict"]
        shift, scale, offset, lookup, _ = state[param.name + "quant_params"]
        digest.update(param.name.encode() + b"\0" + state[param.name + "idxs"].numpy().tobytes())
        digest.update(state[param.name + "vals"].numpy().tobytes() + struct.pack("<fdi", shift, scale, offset))
        digest.update(lookup.numpy().tobytes() + b"float32\0")
    assert validate_payload(made, spec).digest == digest.hexdigest() == payload_digest(made, spec)


@pytest.mark.parametrize("quant", [None, QuantSpec(), QuantSpec(200)])
def test_norms_are_float64_sums_over_blocks_for_every_thread_count(quant):
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.empty(1024, 1024))})
    spec = GradientSpec.from_model(model, target_chunk=32, topk=64, quant=quant)
    made = payload(spec, 1)
    values = made["state_dict"]["wvals"]
    if quant is not None:
        values = dequantize(values, made["state_dict"]["wquant_params"])
    blocks = [b.double().square().sum() for b in values.reshape(-1).split(16384)]
    wanted = torch.stack(blocks).sum().sqrt().to(torch.float32)
    before = shoal.num_threads()
    try:
        norms = []
        for threads in (1, 2, 5):
            shoal.set_num_threads(threads)
            norms.append(validate_payload(made, spec).norms)
    finally:
        shoal.set_num_threads(before)
    assert all(torch.equal(n, norms[0]) for n in norms)
    assert float(norms[0]) == pytest.approx(float(wanted), rel=1e-7)


# ---- validation


def _set(name, value):
    return lambda p: p["state_dict"].__setitem__(name, value)


def _drop(*names):
    return lambda p: [p["state_dict"].pop(name) for name in names]


def _quant(index, value):
    def change(p):
        params = list(p["state_dict"]["p0quant_params"])
        params[index] = value
        p["state_dict"]["p0quant_params"] = tuple(params)

    return change


def _top(name, value):
    return lambda p: p.__setitem__(name, value)


def _element(name, index, value):
    return lambda p: p["state_dict"][name].reshape(-1).__setitem__(index, value)


def _both(*changes):
    return lambda p: [change(p) for change in changes]


def _indices(rows):
    def change(p):
        p["state_dict"]["p1idxs"] = pack12(torch.tensor(rows).reshape(3, 8))

    return change


GOOD = [[0, 1, 2, 3, 4, 5, 6, 7]] * 3
CASES = [
    ("not_a_mapping", _top("state_dict", [1])),
    ("empty_payload", _top("state_dict", {})),
    ("empty_payload", lambda p: p.pop("state_dict")),
    ("bad_global_step", _top("global_step", -1)),
    ("bad_global_step", _top("global_step", True)),
    ("bad_global_step", _top("global_step", 1.0)),
    ("window_mismatch", _top("metadata", {"window": 8})),
    ("unknown_param", _set("ghostvals", None)),
    ("unknown_param", _set("quant_params", 1)),
    ("missing_param", _drop("p1idxs", "p1vals", "p1quant_params")),
    ("incomplete_param", _drop("p1idxs")),
    ("incomplete_param", _set("p1vals", None)),
    ("incomplete_param", _drop("p1idxs", "p1vals")),
    ("bad_value_dtype", _set("p0vals", torch.zeros(4, 3, 8, dtype=torch.float64))),
    ("bad_value_dtype", _set("p0vals", "x")),
    ("empty_values", _set("p0vals", torch.zeros(4, 3, 0, dtype=torch.uint8))),
    ("bad_value_shape", _set("p0vals", torch.zeros(3, 4, 8, dtype=torch.uint8))),
    ("bad_value_shape", _set("p0vals", torch.zeros(96, dtype=torch.uint8))),
    ("bad_topk", _set("p0vals", torch.zeros(4, 3, 6, dtype=torch.uint8))),
    ("missing_quant_params", _drop("p0quant_params")),
    ("bad_quant_params", _set("p0quant_params", (0.0, 1.0))),
    ("bad_quant_params", _quant(0, float("nan"))),
    ("bad_quant_params", _quant(0, torch.tensor(float("inf")))),
    ("bad_quant_params", _quant(1, 0.0)),
    ("bad_quant_params", _quant(1, 1.1e4)),
    ("bad_quant_params", _quant(1, float("nan"))),
    ("bad_quant_params", _quant(2, 1.5)),
    ("bad_quant_params", _quant(3, torch.zeros(5))),
    ("bad_quant_params", _quant(3, torch.zeros(4, dtype=torch.float64))),
    ("bad_quant_params", _quant(3, torch.tensor([0, 0, 0, float("inf")]))),
    ("bad_quant_params", _quant(4, "float64")),
    ("bad_quant_params", _element("p0vals", 5, 4)),
    ("bad_index_dtype", _set("p0idxs", torch.zeros(144, dtype=torch.int8))),
    ("bad_index_length", _set("p0idxs", torch.zeros(141, dtype=torch.uint8))),
    ("index_out_of_range", _indices([*GOOD[:2], [0, 1, 2, 3, 4, 5, 6, 16]])),
    ("duplicate_index", _indices([*GOOD[:2], [0, 1, 2, 3, 4, 5, 6, 6]])),
    ("duplicate_index", _indices([*GOOD[:2], [7, 6, 5, 4, 3, 2, 1, 7]])),
    ("nonfinite_values", _both(_quant(4, "float16"), _quant(0, 1e5))),
    ("value_too_large", _quant(0, 2e4)),
    # the first check in order wins
    ("bad_quant_params", _both(_element("p0vals", 0, 9), _set("p0idxs", torch.zeros(1)))),
    ("bad_topk", _both(_set("p0vals", torch.zeros(4, 3, 6, dtype=torch.uint8)), _drop("p0quant_params"))),
    ("index_out_of_range", _indices([[0, 0, 1, 2, 3, 4, 5, 6], [16, 1, 2, 3, 4, 5, 6, 7], GOOD[0]])),
    ("bad_global_step", _both(_top("global_step", None), _top("metadata", {"window": 1}))),
    ("unknown_param", _both(_set("zidxs", 0), _drop("p0idxs", "p0vals", "p0quant_params"))),
]


@pytest.mark.parametrize(("reason", "change"), CASES)
def test_the_first_failing_check_is_the_reason(reason, change):
    spec = small_spec()
    made = payload(spec, 6)
    change(made)
    with pytest.raises(PayloadRejected) as caught:
        validate_payload(made, spec, window=7)
    assert caught.value.reason == reason
    assert fault(reason) == "peer"


def test_what_is_not_a_mapping_is_named_so():
    with pytest.raises(PayloadRejected) as caught:
        validate_payload([1], small_spec())
    assert caught.value.reason == "not_a_mapping"


@pytest.mark.parametrize(
    "change",
    [
        _quant(0, torch.tensor(0.25)),
        _quant(4, "bfloat16"),
        _indices([[7, 6, 5, 4, 3, 2, 1, 0]] * 3),
        _set("extra", "anything"),
        _top("metadata", {"window": 7, "who": "me"}),
        _top("metadata", None),
        lambda p: p.pop("global_step"),
        _set("p0vals", torch.randn(4, 3, 8).to(torch.bfloat16)),
        _both(_set("p0vals", torch.randn(4, 3, 8)), _set("p0quant_params", "ignored with float values")),
    ],
)
def test_what_the_rules_allow_is_accepted(change):
    spec = small_spec()
    made = payload(spec, 6)
    change(made)
    assert validate_payload(made, spec, window=7).norms.shape == (3,)


def test_uint8_values_need_a_spec_with_quantization():
    made = payload(small_spec(), 6)
    with pytest.raises(PayloadRejected) as caught:
        validate_payload(made, small_spec(quant=None))
    assert caught.value.reason == "bad_value_dtype"


def test_int32_indices_are_checked_like_packed_ones():
    spec = GradientSpec.from_model(model_of(((128, 128),)), target_chunk=128, topk=9)
    made = payload(spec, 1)
    validate_payload(made, spec)
    for value, reason in ((-1, "index_out_of_range"), (16384, "index_out_of_range"), (None, "duplicate_index")):
        broken = copy.deepcopy(made)
        idxs = broken["state_dict"]["p0idxs"].reshape(-1)
        idxs[3] = idxs[2] if value is None else value
        with pytest.raises(PayloadRejected) as caught:
            validate_payload(broken, spec)
        assert caught.value.reason == reason
    wide = copy.deepcopy(made)
    wide["state_dict"]["p0idxs"] = wide["state_dict"]["p0idxs"].long()
    with pytest.raises(PayloadRejected) as caught:
        validate_payload(wide, spec)
    assert caught.value.reason == "bad_index_dtype"


def test_values_at_the_limit_are_accepted():
    spec = small_spec(quant=None)
    made = payload(spec, 2)
    made["state_dict"]["p0vals"][0, 0, 0] = 1e4
    validate_payload(made, spec)
    made["state_dict"]["p0vals"][0, 0, 0] = -10000.001
    with pytest.raises(PayloadRejected) as caught:
        validate_payload(made, spec)
    assert caught.value.reason == "value_too_large"
    made["state_dict"]["p0vals"][0, 0, 0] = math.nan
    with pytest.raises(PayloadRejected) as caught:
        validate_payload(made, spec)
    assert caught.value.reason == "nonfinite_values"


def test_parameter_names_that_end_like_suffixes_are_told_apart():
    model = torch.nn.ParameterDict({n: torch.nn.Parameter(torch.zeros(8, 8)) for n in ("w", "widxs", "wvals")})
    spec = GradientSpec.from_model(model, target_chunk=4, topk=4)
    validate_payload(payload(spec, 1), spec)


@pytest.mark.parametrize(
    ("reason", "whose"),
    [("too_late", "peer"), ("oversize", "peer"), ("not_found", "unknown"), ("timeout", "unknown"),
     ("store_error", "local"), ("local_error", "local"), ("changed_during_read", "local"), ("rank_failed", "local")],
)  # fmt: skip
def test_whose_fault_a_skip_is(reason, whose):
    assert fault(reason) == whose
    with pytest.raises(ValueError, match="reason must be one of"):
        fault("nonsense")
