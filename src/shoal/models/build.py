"""Build a model from its name, or from the import path of your own module."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from shoal.errors import ConfigError, ShoalError, did_you_mean
from shoal.models.inputs import Inputs

MODELS = {
    "deepfm": "shoal.models.deepfm:DeepFm",
    "dlrm": "shoal.models.dlrm:Dlrm",
    "dcn": "shoal.models.dcn:DcnV2",
    "two_tower": "shoal.models.two_tower:TwoTower",
}
"""Name -> where the class is."""


def build_model(name: str, inputs: Inputs, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Build the model ``name`` (one of `MODELS`, or ``package.module:Class``) from ``inputs`` and the options.

    >>> build_model("deepfm", Inputs(sparse=("user", "item"), dim=8), {"hidden": [32]}).deep.out_width
    1
    """
    options = dict(options or {})
    make = find_model(name)
    try:
        inspect.signature(make).bind(inputs, **options)
    except TypeError as error:
        takes = [p.name for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY]
        unknown = next((option for option in options if option not in takes), "")
        hint = did_you_mean(unknown, takes)
        raise ConfigError(f"model {name!r}: {error}{hint}; its options are: {', '.join(takes) or 'none'}") from None
    try:
        model = make(inputs, **options)
    except (TypeError, RuntimeError) as error:
        if name not in MODELS or isinstance(error, ShoalError):
            raise  # an error in the user's code is reported with its location
        raise ConfigError(
            f"model {name!r} cannot be built for rows of dim {inputs.dim or inputs.dims} with {options} ({error})"
        ) from None
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {name!r} must make an nn.Module, got {type(model).__name__}")
    return model


def find_model(name: str) -> Any:
    """The class or function that makes the model."""
    forms = f"one of {', '.join(MODELS)} or package.module:Class"
    found = find_object(MODELS.get(name, name), f"model {name!r}:", forms, did_you_mean(name, MODELS))
    if not callable(found):
        raise ConfigError(f"model {name!r} must name a class or a function, got a {type(found).__name__}")
    return found


def find_object(path: str, where: str, forms: str = "package.module:Name", hint: str = "") -> Any:
    """Import the object ``package.module:Name``; every error begins with ``where``."""
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{where} name must be {forms}, got {path!r}{hint}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m does, so that a module next to the configuration is found
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{where} there is no module {error.name!r} on Python's path") from None
    try:
        return getattr(module, attribute)
    except AttributeError:
        close = did_you_mean(attribute, dir(module))
        raise ConfigError(f"{where} module {module_name!r} has no {attribute!r}{close}") from None
