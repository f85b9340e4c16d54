"""Traces a net for any batch size and describes its inputs and outputs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.serving.export.check import BATCHES, batches_of, check_same, is_row_wise, output_specs, run
from shoal.serving.export.compiled import compile_net
from shoal.serving.export.manifest import TensorSpec
from shoal.serving.export.program_file import load_exported
from shoal.serving.server.net.exported import direct_call, input_sizes
from shoal.serving.server.program import Feature
from shoal.serving.server.servable import dtype_of


@dataclass(frozen=True, slots=True)
class ExportedNet:
    """The properties of a net, as determined by its export."""

    outputs: dict[str, TensorSpec]
    row_wise: bool
    """Whether each output row depends only on its own input row."""
    lengths: dict[str, int | None]
    """Alias -> the required length of an unpooled feature; None if its length may vary within limits."""
    compiled: dict[str, str]
    """device -> the AOTInductor library in the version's folder."""


def describe(features: Mapping[str, Feature], outputs: list[str], **more: Any) -> dict[str, Any]:
    """The manifest's ``program``."""
    listed = {alias: asdict(feature) for alias, feature in features.items()}
    return {"file": "variables/program.pt2", "features": listed, "outputs": outputs, **more}


def input_specs(
    features: Mapping[str, Feature], dense: Mapping[str, torch.Tensor], lengths: Mapping[str, int | None]
) -> dict[str, TensorSpec]:
    """The inputs of an entry: ids and dense values."""
    specs = {
        alias: TensorSpec("int64", [None, lengths.get(alias)], feature.padding) for alias, feature in features.items()
    }
    return specs | _dense_specs(dense)


def pooled_specs(
    features: Mapping[str, Feature],
    dense: Mapping[str, torch.Tensor],
    dims: Mapping[str, int],
    lengths: Mapping[str, int | None],
) -> dict[str, TensorSpec]:
    """The inputs of the net itself: pooled rows and dense values."""
    specs = {}
    for alias, feature in features.items():
        middle = [lengths.get(alias)] if feature.combiner == "none" else []
        specs[alias] = TensorSpec("float", [None, *middle, dims[feature.slot]])
    return specs | _dense_specs(dense)


def _dense_specs(dense: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {alias: TensorSpec(dtype_of(value), [None, *value.shape[1:]]) for alias, value in dense.items()}


def example_inputs(
    features: Mapping[str, Feature], dense: Mapping[str, torch.Tensor], dims: Mapping[str, int]
) -> tuple[dict[str, torch.Tensor], dict[str, dict[int, Any]]]:
    """(arguments to trace a net with, which of their dimensions vary)."""
    arguments: dict[str, torch.Tensor] = {}
    shapes: dict[str, dict[int, Any]] = {}
    rows = max([len(value) for value in dense.values()] + [2])
    any_size = torch.export.Dim.AUTO
    for alias, feature in features.items():
        middle = (3,) if feature.combiner == "none" else ()
        arguments[alias] = torch.zeros(rows, *middle, dims[feature.slot], device="cpu")
        shapes[alias] = {0: any_size, 1: any_size} if middle else {0: any_size}
    for alias, value in dense.items():
        arguments[alias] = value if len(value) == rows else value[:1].expand(rows, *value.shape[1:]).clone()
        shapes[alias] = {0: any_size}
    return arguments, shapes


def export_program(
    net: torch.nn.Module,
    arguments: dict[str, torch.Tensor],
    shapes: dict[str, Any],
    file: Path | None,
    *,
    compiled: bool = False,
) -> ExportedNet:
    """Trace the net with ``torch.export``, save it to ``file`` if given, and check the saved program.

    ``compiled``: also compile it with AOTInductor if there is a compiler.

    Raises:
        ConfigError: the program differs from the net for some batch size; the message says which, and why.
    """
    training = net.training
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    net.eval()
    try:
        lengths: dict[str, int | None] = {}
        exported = None
        if file is not None:
            with torch.no_grad():
                exported = torch.export.export(net, (), arguments, dynamic_shapes=shapes)
            lengths = _lengths(exported, shapes)
        batches = batches_of(arguments, shapes, net, not lengths)
        _restore(net, buffers)
        results = {rows: run(net, inputs) for rows, inputs in batches.items()}
        if exported is not None and file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.export.save(exported, str(file))
            check_same(direct_call(load_exported(file)), batches, results)
        libraries: dict[str, str] = {}
        if compiled and file is not None:
            found = compile_net(
                lambda: load_exported(file), file.parent, lambda made: check_same(made, batches, results)
            )
            libraries = {device: f"{file.parent.name}/{name}" for device, name in found.items()}
        row_wise = is_row_wise(net, batches[max(BATCHES)])
        return ExportedNet(output_specs(results.values()), row_wise, lengths, libraries)
    finally:
        _restore(net, buffers)
        net.train(training)


def _restore(net: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in net.named_buffers():
            value.copy_(buffers[name])


def _lengths(exported: torch.export.ExportedProgram, shapes: Mapping[str, Any]) -> dict[str, int | None]:
    """alias -> the only accepted length of an input whose length should vary; None if it varies within limits.

    Raises:
        ConfigError: the number of rows does not vary freely.
    """
    found: dict[str, int | None] = {}
    for alias, sizes in input_sizes(exported).items():
        if not sizes[0].free:
            raise ConfigError(
                f"the net cannot be exported for any batch size: torch.export limits the rows of input {alias!r} to "
                f"{sizes[0].limits}, because forward depends on them (len(x), a branch on x.shape[0], a reshape to "
                "a fixed size); make it independent of the number of rows"
            )
        if 1 in shapes[alias] and not sizes[1].free:
            found[alias] = sizes[1].fixed
    return found
