"""Nets that run natively, against torch: every operation, the models of `shoal train`, weights that change."""

import copy
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.models import Inputs, build_model
from shoal.serving.server.net.native import NativeNet
from shoal.serving.server.net.row_plan import NotNative, Op

aten = torch.ops.aten


class Call(nn.Module):
    """A function of ``x`` and ``y`` as a net."""

    def __init__(self, function, **parameters):
        super().__init__()
        self._function = function
        for name, value in parameters.items():
            self.register_buffer(name, value)

    def forward(self, x, y):
        return self._function(self, x, y)


def exported(net, x, y):
    rows = torch.export.Dim.AUTO
    with torch.no_grad():
        return torch.export.export(net.eval(), (), {"x": x, "y": y}, dynamic_shapes={"x": {0: rows}, "y": {0: rows}})


def inputs(rows=5, shape=(3, 8)):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, *shape, generator=generator), torch.randn(rows, *shape, generator=generator)


def native_of(net, shape=(3, 8)):
    return NativeNet(exported(net, *inputs(4, shape)))


def assert_as_torch(net, shape=(3, 8), rows=(0, 1, 2, 7, 64, 65, 130), tolerance=2e-6):
    native = native_of(net, shape)
    for count in rows:
        x, y = inputs(count, shape)
        with torch.no_grad():
            expected = net(x, y)
        got = native(x=x, y=y)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


SIMPLE = {
    "relu": lambda m, x, y: torch.relu(x),
    "sigmoid": lambda m, x, y: torch.sigmoid(4 * x),
    "tanh": lambda m, x, y: torch.tanh(x),
    "exp": lambda m, x, y: torch.exp(x),
    "log": lambda m, x, y: torch.log(x.abs() + 0.1),
    "sqrt, rsqrt": lambda m, x, y: x.abs().sqrt() + (y.abs() + 1).rsqrt(),
    "square, pow": lambda m, x, y: x.square() + y.pow(2) + y.abs().pow(1.5),
    "reciprocal": lambda m, x, y: (x.abs() + 1).reciprocal(),
    "gelu": lambda m, x, y: nn.functional.gelu(x) + nn.functional.gelu(y, approximate="tanh"),
    "silu, elu": lambda m, x, y: nn.functional.silu(x) + nn.functional.elu(y, 0.5),
    "softplus": lambda m, x, y: nn.functional.softplus(30 * x) + nn.functional.softplus(y, 2.0),
    "leaky_relu": lambda m, x, y: nn.functional.leaky_relu(x, 0.1),
    "clamp": lambda m, x, y: x.clamp(-0.5, 0.5) + y.clamp(min=0.1) + x.clamp(max=0.2) + nn.functional.relu6(9 * y),
    "neg, abs": lambda m, x, y: -x.abs(),
    "add, sub": lambda m, x, y: torch.add(x, y, alpha=2) - (x - 3) + torch.sub(y, x, alpha=0.5),
    "mul, div": lambda m, x, y: x * y / (y.abs() + 1) * 3 / 2,
    "numbers first": lambda m, x, y: (1 - x) * 2 + 1 / (2 + y.abs()),
    "maximum": lambda m, x, y: torch.maximum(x, y) + torch.minimum(x, y * 2),
    "addcmul": lambda m, x, y: torch.addcmul(x, y, x, value=0.5),
    "broadcast": lambda m, x, y: x * y.sum(2, keepdim=True) + y[:, :1],
    "sum": lambda m, x, y: x.sum(1) + y.sum(2).sum(1, keepdim=True),
    "sum of two": lambda m, x, y: x.sum((1, 2)),
    "mean, amax": lambda m, x, y: x.mean(2) + y.amax(2) + x.mean((1, 2), keepdim=True)[:, :, 0],
    "softmax": lambda m, x, y: x.softmax(2) + (5 * y).softmax(1),
    "log_softmax": lambda m, x, y: x.log_softmax(-1),
    "normalize": lambda m, x, y: nn.functional.normalize(x, dim=2),
    "cat": lambda m, x, y: torch.cat([x, y, x[:, :, :3]], 2),
    "cat of parts": lambda m, x, y: torch.cat([x[:, 0], y.flatten(1), x[:, :, 2]], 1),
    "stack": lambda m, x, y: torch.stack([x, y], 1) + torch.stack([y, x], dim=1),
    "select, slice": lambda m, x, y: x[:, 1] + y[:, -1] + x[:, 0, 1:].sum(1, keepdim=True),
    "step": lambda m, x, y: x[:, :, 1::3] + y[:, :, ::3][:, :, :3],
    "transpose": lambda m, x, y: x.transpose(1, 2).flatten(1) + y.permute(0, 2, 1).reshape(-1, 24),
    "unsqueeze": lambda m, x, y: x.unsqueeze(2) + y.unsqueeze(-2),
    "squeeze": lambda m, x, y: x.sum(2, keepdim=True).squeeze(2) + y[:, :, :1].squeeze(-1),
    "reshape": lambda m, x, y: x.reshape(x.shape[0], 4, 6) + y.view(-1, 4, 6),
    "expand": lambda m, x, y: x[:, :1].expand(-1, 3, -1) + y,
    "split": lambda m, x, y: torch.cat([*x.split(3, 2), *y.chunk(2, 2), *x.unbind(2)[:1], y[:, :, 0]][:5], 2),
    "unbind": lambda m, x, y: x.unbind(1)[0] * y.unbind(1)[2],
    "index_select": lambda m, x, y: x.index_select(2, torch.tensor([3, 1, 1])) + y[:, :, [0, 2, 7]],
    "bmm": lambda m, x, y: torch.bmm(x, y.transpose(1, 2)) + x @ y.transpose(1, 2),
    "bmm of columns": lambda m, x, y: x.transpose(1, 2) @ y,
    "bmm to one": lambda m, x, y: x[:, :, :1].transpose(1, 2) @ y[:, :, :1],
    "dropout": lambda m, x, y: nn.functional.dropout(x, 0.5, training=False) + y.clone().contiguous(),
}  # fmt: skip


def all_of(functions):
    """One net that gives the result of each."""
    return Call(lambda m, x, y: {name: function(m, x, y) for name, function in functions.items()})


def test_operations_are_as_torchs():
    assert_as_torch(all_of(SIMPLE), tolerance=1e-5)


def test_every_native_operation_is_tried():
    tried = ops_of(all_of(SIMPLE)) | ops_of(constants())
    from shoal.serving.server.net.operations import OPERATIONS

    variants = {aten.mul.Scalar, aten.div.Scalar, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Tensor}  # older torch
    left = {str(each) for each in OPERATIONS.keys() - tried - variants}
    rare = re.compile(
        "contiguous|detach|alias|lift_fresh|to.dtype|_to_copy|_unsafe_view|hardtanh|squeeze|_softmax|_log_softmax|"
        "expand_as|unflatten|narrow|amax|matmul|mm|clamp_min|clamp_max|reshape|view|split|zeros|ones|full|empty"
    )
    assert not {each for each in left if not rare.search(each)}


def ops_of(net):
    return {node.target for node in exported(net, *inputs(4)).graph.nodes if node.op == "call_function"}


CONSTANT = {
    "linear": lambda: Call(
        lambda m, x, y: nn.functional.linear(x, m.w, m.b) + nn.functional.linear(y, m.w),
        w=torch.randn(40, 8), b=torch.randn(40)),
    "linear of rows": lambda: Call(
        lambda m, x, y: nn.functional.linear(x.flatten(1), m.w, m.b) + y[:, 0, :5], w=torch.randn(5, 24),
        b=torch.randn(5)),
    "narrow": lambda: Call(
        lambda m, x, y: nn.functional.linear(x[:, 1], m.w, m.b) + nn.functional.linear(y.flatten(1), m.v),
        w=torch.randn(1, 8), b=torch.randn(1), v=torch.randn(1, 24)),
    "addmm": lambda: Call(
        lambda m, x, y: torch.addmm(torch.addmm(m.b, x.flatten(1), m.w), y.flatten(1), m.w), w=torch.randn(24, 33),
        b=torch.randn(33)),
    "mm": lambda: Call(lambda m, x, y: x.flatten(1) @ m.w + torch.mm(y.flatten(1), m.w), w=torch.randn(24, 70)),
    "layer norm": lambda: Call(
        lambda m, x, y: nn.functional.layer_norm(x, (8,), m.w, m.b) + nn.functional.layer_norm(y, (3, 8)),
        w=torch.randn(8), b=torch.randn(8)),
    "batch norm": lambda: Call(
        lambda m, x, y: (nn.functional.batch_norm(x, m.mean, m.var, m.w, m.b)
                         + nn.functional.batch_norm(y, m.mean, m.var)),
        w=torch.randn(3), b=torch.randn(3), mean=torch.randn(3), var=torch.rand(3)),
    "constants": lambda: Call(
        lambda m, x, y: (x + m.row) * m.column + y * m.whole * m.one, row=torch.randn(8), column=torch.randn(3, 1),
        whole=torch.randn(1, 3, 8), one=torch.tensor(1.5)),
    "folded": lambda: Call(
        lambda m, x, y: x @ (m.w * 2).t().softmax(0) + y[:, torch.tril_indices(3, 3).unbind(0)[0][:3]],
        w=torch.randn(8, 8)),
}  # fmt: skip


class Several(nn.ModuleDict):
    def forward(self, x, y):
        return {name: net(x, y) for name, net in self.items()}


def constants():
    torch.manual_seed(3)
    return Several({name: make() for name, make in CONSTANT.items()})


def test_operations_with_constants_are_as_torchs():
    assert_as_torch(constants(), tolerance=2e-5)


def random_net(chance):
    """Some operations one after the other, on whatever the one before gave."""
    unary = [torch.relu, torch.tanh, torch.sigmoid, nn.functional.gelu, lambda z: z.softmax(-1), lambda z: z * 0.5 + 1]
    shapes = [
        lambda z: z.flatten(1), lambda z: z.unsqueeze(1), lambda z: z.transpose(1, -1),
        lambda z: torch.cat([z, z * 2], 1), lambda z: z[:, ::2], lambda z: z.sum(-1, keepdim=True),
        lambda z: z.reshape(z.shape[0], -1, 2) if z[0].numel() % 2 == 0 else z, lambda z: z - z.mean(1, keepdim=True),
        lambda z: z @ z.transpose(1, 2) if z.ndim == 3 and z[0].numel() < 200 else z,
    ]  # fmt: skip
    chosen = [chance.choice(chance.choice([unary, shapes])) for _ in range(6)]

    def run(m, x, y):
        made = x * y
        for step in chosen:
            made = step(made)
        return {"made": made, "also": y.sum(2)}

    return Call(run)


def test_random_nets_are_as_torchs():
    native = 0
    for seed in range(12):
        net = random_net(random.Random(seed))
        try:
            assert_as_torch(net, rows=(1, 5, 70), tolerance=1e-4)
        except NotNative:
            continue
        native += 1
    assert native >= 6


@pytest.mark.parametrize("isa", ["base", "avx2", "avx512"])
def test_products_of_any_size(isa):
    if isa == "avx512":  # if this CPU has it
        check_products()
        return
    code = "from tests.serving.server.test_native_nets import check_products; check_products()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=os.environ | {"SHOAL_ISA": isa})


def check_products():
    sizes = [(1, 1), (7, 3), (16, 4), (33, 5), (129, 64), (24, 100)]
    nets = {
        f"{k} {n}": Call(
            lambda m, x, y: nn.functional.linear(x[:, : m.w.shape[1]], m.w, m.b), w=torch.randn(n, k), b=torch.randn(n)
        )
        for k, n in sizes
    }
    assert_as_torch(Several(nets), (130,), rows=(1, 3, 6, 8, 13, 66), tolerance=1e-4)


def test_special_numbers_are_as_torchs():
    values = torch.tensor([[math.nan, math.inf, -math.inf, 0.0, -0.0, 1e38, -1e38, 100.0, -100.0, 88.7, -87.5, 1e-20]])
    names = ("relu", "sigmoid", "tanh", "exp", "maximum", "clamp", "softmax", "neg, abs", "silu, elu", "softplus")
    net = Call(lambda m, x, y: {name: SIMPLE[name](m, x[:, None], y[:, None]) for name in names})
    native = native_of(net, (12,))
    for x, y in ((values, values.flip(1)), (values.flip(1), values)):
        got = native(x=x, y=y)
        for name, expected in net(x, y).items():
            atol = 1e-30 if name == "exp" else 1e-6
            torch.testing.assert_close(got[name], expected, rtol=1e-5, atol=atol, equal_nan=True)


MIXES = {
    "over rows": lambda m, x, y: x.sum(0, keepdim=True) + y,
    "softmax over rows": lambda m, x, y: x.softmax(0) + y,
    "all": lambda m, x, y: x / y.sum(),
    "rows times rows": lambda m, x, y: x.flatten(1) @ y.flatten(1).t(),
    "rows as columns": lambda m, x, y: x.permute(1, 0, 2) + 1,
    "unknown": lambda m, x, y: torch.erfinv(x.clamp(-0.5, 0.5)),
    "whole numbers": lambda m, x, y: (x > 0).long() + (y > 0),
    "sort": lambda m, x, y: x.sort(2)[0],
}


@pytest.mark.parametrize("name", MIXES)
def test_what_is_not_native_is_said(name):
    with pytest.raises(NotNative):
        native_of(Call(MIXES[name]))


def test_only_float32_is_native():
    net = Call(lambda m, x, y: (x.double() * 2).float() + y)
    with pytest.raises(NotNative, match="float32"):
        native_of(net)


MODELS = {
    "deepfm": {"hidden": [32, 16]},
    "dlrm": {"bottom": [32], "top": [64, 32]},
    "dcn": {"crosses": 2, "rank": 8, "hidden": [32]},
    "two_tower": {"user": ["d0", "s0"], "item": ["s1", "d1"], "temperature": 0.1, "hidden": [16, 8]},
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_trainer_are_native(name):
    torch.manual_seed(1)
    sparse = tuple(f"s{i}" for i in range(5))
    net = build_model(name, Inputs(dense=("d0", "d1", "d2"), sparse=sparse, dim=8), MODELS[name]).eval()
    rows = torch.export.Dim.AUTO
    with torch.no_grad():
        made = torch.export.export(
            net, (), {"dense": torch.zeros(4, 3), "rows": torch.zeros(4, 5, 8)},
            dynamic_shapes={"dense": {0: rows}, "rows": {0: rows}},
        )  # fmt: skip
    native = NativeNet(made)
    for count in (1, 3, 200):
        dense, found = torch.randn(count, 3), torch.randn(count, 5, 8)
        with torch.no_grad():
            torch.testing.assert_close(native(dense=dense, rows=found), net(dense, found), rtol=1e-4, atol=1e-5)


def test_other_weights_make_another_net_and_leave_this_one_alone():
    torch.manual_seed(2)
    net = CONSTANT["folded"]()
    native = native_of(net)
    x, y = inputs(9)
    before = native(x=x, y=y)
    other = copy.deepcopy(net)
    other.w += 1.0 * torch.randn(8, 8)
    after = native.with_weights({"w": other.w})
    torch.testing.assert_close(after(x=x, y=y), other(x, y), rtol=1e-5, atol=1e-5)
    assert torch.equal(native(x=x, y=y), before)
    torch.testing.assert_close(before, net(x, y), rtol=1e-5, atol=1e-5)


def test_names_of_outputs_are_those_of_the_net():
    net = Call(lambda m, x, y: {"b": x + y, "a": x - y})
    got = native_of(net)(x=torch.ones(2, 3, 8), y=torch.ones(2, 3, 8))
    assert list(got) == ["b", "a"]
    assert got["a"].eq(0).all()


def test_inputs_of_another_form_are_refused():
    native = native_of(Call(lambda m, x, y: x + y))
    with pytest.raises(ValueError, match=r"'x' must be float32 \[2, 3, 8\], got torch.float32 \[2, 3, 9\]"):
        native(x=torch.zeros(2, 3, 9), y=torch.zeros(2, 3, 8))


def test_operations_are_numbered_as_in_the_core():
    header = (Path(__file__).parents[3] / "csrc/nn/net/loops.h").read_text()
    body = header.split("enum class Op : int32_t {")[1].split("};")[0]
    names = [line.split(",")[0].strip() for line in body.splitlines() if line.strip()]
    assert names == [each.name for each in Op]
