"""Nets on a GPU: batches are enqueued one after another, each as a CUDA graph captured for its size."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from shoal.serving.export.compiled import CompiledNet
from shoal.serving.server.net.exported import DirectNet, ModuleNet, direct_call
from shoal.serving.server.net.placement import Placement
from shoal.serving.server.servable import Tensors

log = logging.getLogger(__name__)


class Card:
    """The GPU that runs a program's batches.

    All batches are enqueued on one stream, so each sees the writes enqueued before it, and a graph's results are read
    before the graph runs again. A thread waits only for its own batch.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()

    def bring(self, tensors: Tensors) -> Tensors:
        """Copy host tensors to the device; copies of pinned tensors do not block the caller."""
        return {name: value.to(self.device, non_blocking=True) for name, value in tensors.items()}

    def run(self, compute: Callable[[], Tensors]) -> Tensors:
        """The result of ``compute``, copied to host memory."""
        if self.device.type != "cuda":
            with self._lock, torch.inference_mode():
                return {alias: value.clone() for alias, value in compute().items()}
        with torch.cuda.device(self.device), torch.inference_mode():
            done = torch.cuda.Event(blocking=True)
            with self._lock:
                on_host = {alias: self._to_host(value) for alias, value in compute().items()}
                done.record()
            done.synchronize()
        return on_host

    def _to_host(self, value: torch.Tensor) -> torch.Tensor:
        if value.device.type == "cpu":
            return value
        into = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        return into.copy_(value, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Graph:
    """The net for one number of rows, with its own inputs and outputs."""

    graph: Any
    inputs: dict[str, torch.Tensor]
    results: tuple[torch.Tensor, ...]


class CardNet:
    """An exported program on a device, in the placement's precision; called with keyword arguments.

    A batch is padded to the next power of two, up to ``placement.batch_rows``, and replayed as a CUDA graph. A graph's
    results are valid until the next call. Programs whose rows are not independent, and inputs with other varying sizes,
    run without graphs.

    Args:
        exported: the program; it is moved to the device.
        graphs: whether rows are independent.
        library: the same net, compiled for the device.
    """

    def __init__(
        self,
        exported: torch.export.ExportedProgram,
        placement: Placement,
        *,
        graphs: bool,
        library: CompiledNet | None = None,
    ) -> None:
        self._library = library
        self.weights: Mapping[str, torch.Tensor] = dict(exported.state_dict)
        """The weights, in host memory."""
        self.device = placement.torch_device
        self._placement = placement
        if self.device.type != "cpu":
            move_to_device_pass(exported, str(self.device))
            exported.graph_module.recompile()
        self._net: DirectNet | ModuleNet = direct_call(exported)
        fixed = isinstance(self._net, DirectNet) and all(
            isinstance(size, int)
            for node in exported.graph.nodes
            if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
            for size in node.meta["val"].shape[1:]
        )
        self._graphs: dict[int, _Graph] | None = {} if graphs and fixed and self.device.type == "cuda" else None
        self._capturing = threading.Lock()

    @property
    def sizes(self) -> list[int]:
        """The batch sizes that have a graph."""
        return sorted(self._graphs or ())

    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> CardNet:
        """A copy of the net with all of its weights replaced, and graphs for the same sizes."""
        other = copy.copy(self)
        other.weights = dict(weights)
        other._net = self._net.with_weights({name: value.to(self.device) for name, value in weights.items()})
        other._library = None if self._library is None else self._library.replaced(weights)
        if self._graphs is not None:
            other._graphs = {}
            for rows, graph in sorted(self._graphs.items()):
                if other._graphs is not None:  # a failed capture disables graphs
                    other._capture(rows, graph.inputs)
        return other

    def __call__(self, **inputs: torch.Tensor) -> Any:
        graph = self._graph_for(inputs) if self._graphs is not None else None
        if graph is None:
            return self._run(inputs)
        rows = next(iter(inputs.values())).shape[0]
        for name, value in inputs.items():
            graph.inputs[name][:rows].copy_(value)
        graph.graph.replay()
        assert isinstance(self._net, DirectNet)
        return self._net.named([value[:rows] for value in graph.results])

    def _run(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        return self._net.named(self._results(inputs)) if isinstance(self._net, DirectNet) else self._cast(inputs)

    def _cast(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        with self._precision():
            found = self._net(**inputs)
        return pytree.tree_map_only(torch.Tensor, _wide, found)

    def _results(self, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        assert isinstance(self._net, DirectNet)
        if self._library is not None:
            try:
                return tuple(pytree.tree_leaves(self._library(**inputs)))
            except Exception as error:  # many kinds of error; torch also reports invalid inputs
                log.warning("torch runs the net from now on, because the compiled library failed: %s", error)
                self._library = None
        with self._precision():
            return tuple(map(_wide, self._net.results(inputs)))

    def _precision(self) -> Any:
        if self._placement.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    # --- graphs -----------------------------------------------------------------------------------------------------

    def _graph_for(self, inputs: Mapping[str, torch.Tensor]) -> _Graph | None:
        rows = next(iter(inputs.values())).shape[0] if inputs else 0
        if not 0 < rows <= self._placement.batch_rows or any(value.shape[0] != rows for value in inputs.values()):
            return None
        size = min(1 << (rows - 1).bit_length(), self._placement.batch_rows)
        assert self._graphs is not None
        return self._graphs.get(size) or self._capture(size, inputs)

    def _capture(self, rows: int, like: Mapping[str, torch.Tensor]) -> _Graph | None:
        """Capture a graph for this many rows; None if the net cannot be captured, which disables graphs."""
        assert self._graphs is not None
        given = {
            name: torch.zeros(rows, *one.shape[1:], dtype=one.dtype, device=self.device) for name, one in like.items()
        }
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        generator = torch.cuda.default_generators[index]
        random_state = generator.clone_state()
        try:
            with self._capturing, torch.cuda.device(self.device), torch.inference_mode():
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(2):  # allocations of the first call must not be part of the graph
                        self._results(given)
                    side.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    graph.capture_begin(capture_error_mode="thread_local")  # other threads may allocate meanwhile
                    try:
                        results = self._results(given)
                    finally:
                        graph.capture_end()
                if any(value.ndim == 0 or value.shape[0] != rows for value in results):
                    raise RuntimeError("its outputs do not have one row per input row")
        except RuntimeError as error:
            log.warning("the net runs without CUDA graphs, because it cannot be captured: %s", error)
            generator.graphsafe_set_state(random_state)  # it is still capturing, and would refuse every call
            self._graphs = None
            return None
        made = self._graphs[rows] = _Graph(graph, given, results)
        return made

    def warm(self) -> None:
        """Capture all sizes, if the net has been called before."""
        most = self._placement.batch_rows
        like = next(iter(self._graphs.values()), None) if self._graphs is not None else None
        for rows in sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)}):
            if like is not None and self._graphs is not None and rows not in self._graphs:
                self._capture(rows, like.inputs)


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype == torch.bfloat16 else value
