"""Helpers for model specs, model configs and names of sub-models."""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.proto.serving.tf_serving_pb2 import ModelConfig, ModelSpec


def gen_model_spec(name: str, version: int | str | None = None, signature_name: str | None = None) -> ModelSpec:
    """Make a ``ModelSpec``; ``version`` is a number or a label."""
    spec = ModelSpec(name=name)
    if isinstance(version, str):
        spec.version_label = version
    elif version is not None:
        spec.version.value = version
    if signature_name is not None:
        spec.signature_name = signature_name
    return spec


def gen_model_config(
    name: str,
    base_path: str,
    version_policy: str = "latest",
    version_data: int | Sequence[int] | None = 1,
    model_platform: str = "tensorflow",
    version_labels: Mapping[str, int] | None = None,
) -> ModelConfig:
    """Make a ``ModelConfig``. ``version_data``: a count for ``latest`` and ``latest_once``, a list for ``specific``."""
    config = ModelConfig(name=name, base_path=base_path, model_platform=model_platform)
    policy: Any = config.model_version_policy
    kind = version_policy.lower()
    if kind in ("latest", "latest_once"):
        getattr(policy, kind).num_versions = 1 if version_data is None else int(version_data)  # pyrefly: ignore
    elif kind == "all":
        policy.all.SetInParent()
    elif kind == "specific":
        policy.specific.SetInParent()
        policy.specific.versions.extend([version_data] if isinstance(version_data, int) else version_data or ())
    else:
        raise ValueError(f"version_policy must be latest, latest_once, specific or all, got {version_policy!r}")
    for label, version in (version_labels or {}).items():
        config.version_labels[label] = version
    return config


def parse_sub_model_name(text: str) -> tuple[str, int]:
    """(type, index) of a sub-model's name: ``Dense_7`` is ("dense", 7), ``entry`` is ("entry", 0)."""
    text = text.strip()
    if not text:
        raise ValueError("a sub-model's name must not be empty; examples are ps_3, entry and dense_0")
    kind, underscore, index = text.rpartition("_")
    if not underscore:
        return text.lower(), 0
    try:
        return kind.strip().lower(), int(index)
    except ValueError:
        raise ValueError(f"a sub-model's name must end in a number after '_', got {text!r}") from None


pasre_sub_model_name = parse_sub_model_name
