"""Checks that an exported net agrees with the net for any batch size, and whether its rows are independent."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.serving.export.manifest import TensorSpec
from shoal.serving.server.net.exported import named_outputs
from shoal.serving.server.servable import dtype_of

BATCHES = (1, 2, 3, 7)
_LENGTHS = {1: 3, 2: 1, 3: 5, 7: 2}  # batch size -> length of unpooled features
_PARTS = (1, 2, 4)  # how the largest batch is split

Net = Callable[..., Any]
Tensors = dict[str, torch.Tensor]


def batches_of(arguments: Tensors, shapes: Mapping[str, Any], net: Net, any_length: bool) -> dict[int, Tensors]:
    """Random inputs of each batch size, close to the given examples, to test a net with.

    ``any_length``: whether the second dimension of inputs varies, if ``shapes`` allows it.
    """
    tried = {}
    for rows in BATCHES:
        makers = [(length, noise) for length in ((_LENGTHS[rows], None) if any_length else (None,)) for noise in (1, 0)]
        for length, noise in makers:  # a net may reject a length, or values far from the examples
            inputs = _inputs(arguments, shapes, rows, length, noise)
            try:
                run(net, inputs)
            except Exception as error:
                if (length, noise) == makers[-1]:
                    raise ConfigError(f"the net fails for a batch of {rows} rows: {error}") from error
            else:
                tried[rows] = inputs
                break
    return tried


def _inputs(arguments: Tensors, shapes: Mapping[str, Any], rows: int, length: int | None, noise: int) -> Tensors:
    generator = torch.Generator().manual_seed(rows)
    inputs = {}
    for alias, example in arguments.items():
        value = example[torch.arange(rows, device="cpu") % len(example)]
        if length is not None and 1 in shapes[alias]:
            value = value[:, torch.arange(length, device="cpu") % value.shape[1]]
        if noise and value.is_floating_point():
            value = value + torch.randn(value.shape, generator=generator, device="cpu").to(value.dtype)
        inputs[alias] = value
    return inputs


def run(net: Net, inputs: Tensors) -> Tensors:
    """The outputs of a net by name; its random numbers are the same in every run."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        outputs = named_outputs(net(**inputs))
    for alias, value in outputs.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"output {alias!r} of the net must be a tensor, got {type(value).__name__}")
    return outputs


def check_same(exported: Net, batches: Mapping[int, Tensors], expected: Mapping[int, Tensors]) -> None:
    """Raise ConfigError if the exported program's results differ from the net's."""
    for rows, inputs in batches.items():
        advice = (
            "torch.export followed one path through forward and keeps to it; make forward independent of the number of "
            "rows (no len(x), no squeeze() without a dimension, no branch on x.shape[0])"
        )
        try:
            got = run(exported, inputs)
        except Exception as error:
            raise ConfigError(f"the exported net fails for a batch of {rows} rows: {error}; {advice}") from error
        if why := _difference(got, expected[rows], 1e-4):
            raise ConfigError(f"the exported net differs from the net for a batch of {rows} rows: {why}; {advice}")


def is_row_wise(net: Net, inputs: Tensors) -> bool:
    """Whether each row of every output depends only on its own input row, so that requests can be joined."""
    full, begin = run(net, inputs), 0
    if any(value.shape[:1] != (sum(_PARTS),) for value in full.values()):
        return False
    for rows in _PARTS:
        part = run(net, {alias: value[begin : begin + rows] for alias, value in inputs.items()})
        if _difference(part, {alias: value[begin : begin + rows] for alias, value in full.items()}, 1e-3):
            return False
        begin += rows
    return True


def _difference(got: Tensors, expected: Tensors, tolerance: float) -> str:
    if got.keys() != expected.keys():
        return f"its outputs are {sorted(got)} instead of {sorted(expected)}"
    for alias, value in got.items():
        other = expected[alias]
        loose = value.dtype in (torch.float16, torch.bfloat16)
        limit = (10 if loose else 1) * tolerance if value.is_floating_point() else 0.0
        try:
            torch.testing.assert_close(value, other, rtol=limit, atol=limit, equal_nan=True)
        except AssertionError as error:
            return f"output {alias!r}: {' '.join(str(error).split())}"
    return ""


def output_specs(results: Iterable[Tensors]) -> dict[str, TensorSpec]:
    """The specs of the outputs; a size or rank that differed between batches is left open."""
    found: dict[str, list[torch.Tensor]] = {}
    for outputs in results:
        for alias, value in outputs.items():
            found.setdefault(alias, []).append(value)
    specs = {}
    for alias, values in found.items():
        if len({value.ndim for value in values}) == 1:
            sizes = [set(each) for each in zip(*(value.shape for value in values), strict=True)]
            shape = [each.pop() if len(each) == 1 else None for each in sizes]
        else:
            shape = None
        specs[alias] = TensorSpec(dtype_of(values[0]), shape)
    return specs
