"""Validation against a direct reading of its rules: random damage, several at once, and the first rule that fails."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.gather import GradientSpec, PayloadRejected, QuantSpec, pack12, validate_payload
from tests.gather.helpers import WINDOW, model_of, payload

SHAPES = ((12, 10), (9,), (), (70, 70), (4, 3, 2))
FLOATS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


def reason_of(made, spec, window, max_abs):
    """The rules of the specification, one after the other, with no thought for speed. None when all hold."""
    state = made.get("state_dict")
    if not state:
        return "empty_payload"
    step = made.get("global_step", 0)
    if type(step) is not int or step < 0:
        return "bad_global_step"
    if "window" in made.get("metadata", {}) and made["metadata"]["window"] != window:
        return "window_mismatch"
    names = {p.name for p in spec.params}
    for key in state:
        for suffix in ("idxs", "vals", "quant_params"):
            if key.endswith(suffix) and key[: -len(suffix)] not in names:
                return "unknown_param"
    for param in spec.params:
        if (reason := reason_of_param(state, param, spec, max_abs)) is not None:
            return reason
    return None


def reason_of_param(state, param, spec, max_abs):
    keys = [param.name + suffix for suffix in ("idxs", "vals", "quant_params")]
    if not any(key in state for key in keys):
        return "missing_param"
    idxs, vals, quant = (state.get(key) for key in keys)
    if idxs is None or vals is None:
        return "incomplete_param"
    allowed = [*FLOATS, *([torch.uint8] if spec.quant else [])]
    if vals.dtype not in allowed:
        return "bad_value_dtype"
    if vals.numel() == 0:
        return "empty_values"
    if vals.ndim != len(param.grid) + 1 or tuple(vals.shape[:-1]) != param.grid:
        return "bad_value_shape"
    if vals.shape[-1] != param.k:
        return "bad_topk"
    values = vals.float()
    if vals.dtype == torch.uint8:
        if quant is None:
            return "missing_quant_params"
        if not isinstance(quant, tuple) or len(quant) != 5 or not quant_holds(quant, vals, spec.quant.bins):
            return "bad_quant_params"
        shift, _, _, lookup, dtype = quant
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        values = (lookup[vals.long()] + torch.tensor(float(shift))).to(dtype).float()
    if idxs.dtype != (torch.uint8 if param.codec == "packed12" else torch.int32):
        return "bad_index_dtype"
    if param.codec == "packed12":
        if idxs.numel() * 2 != 3 * param.chunks * param.k:
            return "bad_index_length"
        triples = idxs.reshape(-1, 3).tolist()
        flat = [n for a, b, c in triples for n in (a | (b & 15) << 8, b >> 4 | c << 4)]
    else:
        if idxs.shape != vals.shape:
            return "bad_index_length"
        flat = idxs.reshape(-1).tolist()
    if any(not 0 <= n < param.totalk for n in flat):
        return "index_out_of_range"
    rows = [flat[i : i + param.k] for i in range(0, len(flat), param.k)]
    if any(len(set(row)) < len(row) for row in rows):
        return "duplicate_index"
    if not torch.isfinite(values).all():
        return "nonfinite_values"
    return "value_too_large" if (values.abs() > max_abs).any() else None


def quant_holds(quant, vals, bins):
    shift, scale, offset, lookup, dtype = quant
    return (
        math.isfinite(float(shift))
        and math.isfinite(scale)
        and 1e-12 <= abs(scale) <= 1e4
        and type(offset) is int
        and isinstance(lookup, torch.Tensor)
        and lookup.dtype == torch.float32
        and lookup.shape == (bins,)
        and bool(torch.isfinite(lookup).all())
        and (dtype in FLOATS or dtype in FLOATS.values())
        and int(vals.max()) < bins
    )


def put_index(state, name, param, chunk, column, value):
    """One index of a chunk, whatever the codec; a packed one cannot be negative or over 4095."""
    idxs = state.get(name + "idxs")
    if idxs is None or not isinstance(idxs, torch.Tensor):
        return
    if param.codec == "i32":
        if idxs.dtype == torch.int32 and idxs.numel() == param.chunks * param.k:
            idxs.reshape(-1)[chunk * param.k + column] = value
    elif idxs.dtype == torch.uint8 and idxs.numel() * 2 == 3 * param.chunks * param.k:
        at = (chunk * param.k + column) // 2 * 3
        a, b, c = idxs[at : at + 3].tolist()
        pair = [a | (b & 15) << 8, b >> 4 | c << 4]
        pair[column % 2] = value % 4096
        idxs[at : at + 3] = pack12(torch.tensor(pair))


def set_quant(state, name, position, value):
    quant = state.get(name + "quant_params")
    if isinstance(quant, tuple) and len(quant) == 5:
        state[name + "quant_params"] = (*quant[:position], value, *quant[position + 1 :])


def damage(draw, made, spec):
    state = made["state_dict"]
    index = draw(st.integers(0, len(spec.params) - 1))
    param = spec.params[index]
    name = param.name
    vals = state.get(name + "vals")
    chunk, column = draw(st.integers(0, param.chunks - 1)), draw(st.integers(0, param.k - 1))
    kind = draw(st.sampled_from(DAMAGES))
    if kind == "drop":
        state.pop(name + draw(st.sampled_from(["idxs", "vals", "quant_params"])), None)
    elif kind == "drop all":
        for suffix in ("idxs", "vals", "quant_params"):
            state.pop(name + suffix, None)
    elif kind == "none":
        state[name + draw(st.sampled_from(["idxs", "vals", "quant_params"]))] = None
    elif kind == "step":
        made["global_step"] = draw(st.sampled_from([-1, True, 1.0, "3", None]))
    elif kind == "window":
        made["metadata"] = {"window": draw(st.sampled_from([WINDOW, WINDOW + 1]))}
    elif kind == "extra":
        state["other" + draw(st.sampled_from(["idxs", "vals", "quant_params", "stuff"]))] = torch.zeros(2)
    elif kind == "index":
        put_index(state, name, param, chunk, column, draw(st.integers(-3, param.totalk + 3)))
    elif kind == "dtype" and vals is not None:
        state[name + "vals"] = vals.to(draw(st.sampled_from([torch.float64, torch.int32, torch.bfloat16])))
    elif kind == "shape" and vals is not None:
        shape = draw(st.sampled_from([(1,), (*vals.shape, 1), (0, *vals.shape[1:]), (*vals.shape[:-1], param.k + 1)]))
        state[name + "vals"] = torch.zeros(shape, dtype=vals.dtype)
    elif kind == "index shape" and isinstance(state.get(name + "idxs"), torch.Tensor):
        idxs = state[name + "idxs"]
        state[name + "idxs"] = draw(st.sampled_from([idxs.reshape(-1)[:-1].clone(), idxs.to(torch.int64)]))
    elif kind == "value" and vals is not None and vals.numel() == param.chunks * param.k:
        extremes = [math.nan, math.inf, 1e4, -1.5e4] if vals.is_floating_point() else [0, 3, 4, 255]
        vals = state[name + "vals"] = vals.clone()
        vals.reshape(-1)[chunk * param.k + column] = draw(st.sampled_from(extremes))
    elif kind == "quant":
        position, values = draw(
            st.sampled_from(
                [
                    (0, [math.nan, math.inf, 9.9e3, 3e38, 1e39, torch.tensor(0.5)]),
                    (1, [0.0, 1e-13, -1e-12, 1e4, -1.1e4, math.nan]),
                    (2, [0, 7, 1.0, True, None]),
                    (3, [None, torch.zeros(3), torch.zeros(4, dtype=torch.float64), torch.tensor([0, 1, 2, math.inf]),
                         torch.tensor([0.0, 3e38, 3e38, 0])]),
                    (4, ["float16", "float64", torch.bfloat16, torch.float64, None]),
                ]
            )
        )  # fmt: skip
        set_quant(state, name, position, draw(st.sampled_from(values)))
    elif kind == "quant shape":
        state[name + "quant_params"] = draw(st.sampled_from([(1.0, 2.0), [0.0, 1.0, 2, torch.zeros(4), "float32"]]))


DAMAGES = (
    "drop", "drop all", "none", "step", "window", "extra", "index", "dtype", "shape", "index shape", "value", "quant",
    "quant shape",
)  # fmt: skip


@pytest.mark.parametrize("quant", [QuantSpec(), None], ids=["quantized", "plain"])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_the_reason_is_the_first_rule_that_fails(quant, data):
    spec = GradientSpec.from_model(model_of(SHAPES), target_chunk=70, topk=7, quant=quant)
    assert {p.codec for p in spec.params} == {"packed12", "i32"}
    made = payload(spec, data.draw(st.integers(0, 3)))
    for _ in range(data.draw(st.integers(0, 3))):
        damage(data.draw, made, spec)
    expected = reason_of(made, spec, WINDOW, 1e4)
    if expected is None:
        info = validate_payload(made, spec, window=WINDOW)
        assert math.isfinite(float(info.norms.sum()))
        return
    with pytest.raises(PayloadRejected) as caught:
        validate_payload(made, spec, window=WINDOW)
    assert caught.value.reason == expected
