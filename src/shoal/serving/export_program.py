"""A net at export: traced for any batch size, with what goes in and what comes out."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shoal.serving.manifest import TensorSpec
from shoal.serving.program import Feature, named_outputs
from shoal.serving.servable import dtype_of


def describe(features: Mapping[str, Feature], outputs: list[str], **more: Any) -> dict[str, Any]:
    """The manifest's ``program``."""
    listed = {alias: asdict(feature) for alias, feature in features.items()}
    return {"file": "variables/program.pt2", "features": listed, "outputs": outputs, **more}


def input_specs(features: Mapping[str, Feature], dense: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """What an entry takes: ids and dense values."""
    specs = {alias: TensorSpec("int64", [None, None], feature.padding) for alias, feature in features.items()}
    return specs | _dense_specs(dense)


def pooled_specs(
    features: Mapping[str, Feature], dense: Mapping[str, torch.Tensor], dims: Mapping[str, int]
) -> dict[str, TensorSpec]:
    """What the net itself takes: pooled rows and dense values."""
    specs = {}
    for alias, feature in features.items():
        middle = [None] if feature.combiner == "none" else []
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
    net: torch.nn.Module, arguments: dict[str, torch.Tensor], shapes: dict[str, Any], file: Path | None
) -> dict[str, TensorSpec]:
    """Traces the net with ``torch.export``, saves it to ``file`` if there is one, and describes its outputs."""
    training = net.training
    net.eval()
    try:
        with torch.no_grad():
            results = named_outputs(net(**arguments))
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.export.save(torch.export.export(net, (), arguments, dynamic_shapes=shapes), str(file))
    finally:
        net.train(training)
    return {alias: TensorSpec(dtype_of(value), [None, *value.shape[1:]]) for alias, value in results.items()}
