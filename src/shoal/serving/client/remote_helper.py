"""`RemotePredictHelper`: part of a model as a remote call, with nested inputs and outputs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shoal.errors import ConfigError
from shoal.serving.client.remote import remote_predict
from shoal.table.export_mode import get_current_export_ctx


class RemotePredictHelper:
    """Registers ``remote_func`` as a signature of the dense sub-graph and calls it on the server of that sub-graph.

    Args:
        name: the signature's name.
        input_tensors: nested tensors; a tensor's name is its ``name`` or its position in the structure. Aliases are the
            names with ``:`` replaced by ``_``.
        remote_func: takes the same structure and returns nested tensors.
    """

    def __init__(self, name: str, input_tensors: Any, remote_func: Callable[[Any], Any]) -> None:
        context = get_current_export_ctx()
        if context is None:
            raise ConfigError("RemotePredictHelper must be created while exporting; use enter_export_mode")
        self.name = name
        self._inputs = input_tensors
        self.input_aliases = _aliases(input_tensors)
        outputs = remote_func(input_tensors)
        self._output_leaves, self._output_structure = pytree.tree_flatten(outputs)
        self.output_aliases = _aliases(outputs, prefix="output")
        graph = context.dense_sub_graph("dense_0")
        leaves = pytree.tree_leaves(input_tensors)
        context.add_signature(
            graph,
            name,
            dict(zip(self.input_aliases, leaves, strict=True)),
            dict(zip(self.output_aliases, self._output_leaves, strict=True)),
        )

    def call_remote_predict(
        self,
        model_name: str,
        input_tensors: Any = None,
        old_model_name: str | None = None,
        task: int = 0,
        max_rpc_deadline_millis: float = 30000,
    ) -> Any:
        """Call the signature and return its outputs in the structure that ``remote_func`` returned."""
        leaves = pytree.tree_leaves(self._inputs if input_tensors is None else input_tensors)
        types = [leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in self._output_leaves]
        results = remote_predict(
            self.input_aliases,
            leaves,
            self.output_aliases,
            model_name=model_name,
            task=task,
            old_model_name=old_model_name,
            max_rpc_deadline_millis=max_rpc_deadline_millis,
            output_types=types,
            signature_name=self.name,
        )
        return pytree.tree_unflatten(results, self._output_structure)


def _aliases(structure: Any, prefix: str = "input") -> list[str]:
    names = []
    for path, leaf in pytree.tree_flatten_with_path(structure)[0]:
        given = getattr(leaf, "name", None)
        if not isinstance(given, str) or not given:
            given = "_".join(_key(part) for part in path) or prefix
            if not isinstance(structure, Mapping):
                given = f"{prefix}_{given}" if given != prefix else given
        names.append(given.replace(":", "_"))
    if len(set(names)) != len(names):
        raise AssertionError(f"aliases must be distinct, got {sorted(names)}")
    return names


def _key(part: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    return str(part)
