"""Whether this process is exporting, and the sub-graphs and signatures that an export collects."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class ExportMode(IntEnum):
    NONE = 0
    STANDALONE = 1
    DISTRIBUTED = 2


@dataclass(slots=True)
class Signature:
    """A named call: its inputs and outputs, by alias."""

    name: str
    inputs: dict[str, Any]
    outputs: dict[str, Any]


@dataclass(slots=True, eq=False)
class SubGraph:
    """One exported servable: ``entry``, ``ps_3``, ``dense_0``."""

    name: str
    signatures: dict[str, Signature] = field(default_factory=dict)


class ExportContext:
    """The sub-graphs and signatures that an export collects. A sub-graph is created when it is first named."""

    def __init__(self, with_remote_gpu: bool = False) -> None:
        self.with_remote_gpu = with_remote_gpu
        self._sub_graphs: dict[str, SubGraph] = {}
        self._dense_sub_graphs: dict[str, SubGraph] = {}
        self._default = SubGraph("")

    def sub_graph(self, name: str) -> SubGraph:
        return self._sub_graphs.setdefault(name, SubGraph(name))

    def dense_sub_graph(self, name: str) -> SubGraph:
        return self._dense_sub_graphs.setdefault(name, SubGraph(name))

    @property
    def sub_graphs(self) -> dict[str, SubGraph]:
        return dict(self._sub_graphs)

    @property
    def sub_graph_num(self) -> int:
        """The number of graphs that ``sub_graph`` has created."""
        return len(self._sub_graphs)

    def _graph(self, graph: SubGraph | str | None) -> SubGraph:
        if isinstance(graph, SubGraph):
            return graph
        if graph is None or graph == "":
            return self._default
        return self._dense_sub_graphs.get(graph) or self.sub_graph(graph)

    def add_signature(self, graph: Any, name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Sets a signature of a graph, replacing any signature of that name."""
        self._graph(graph).signatures[name] = Signature(name, dict(inputs), dict(outputs))

    def merge_signature(self, graph: Any, name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Adds inputs and outputs to a signature, which is created if it does not exist."""
        known = self._graph(graph).signatures.setdefault(name, Signature(name, {}, {}))
        known.inputs.update(inputs)
        known.outputs.update(outputs)

    def signatures(self, graph: Any) -> dict[str, Signature]:
        return dict(self._graph(graph).signatures)


_mode = ExportMode.NONE
_context: ExportContext | None = None
_dry_run = False


@contextlib.contextmanager
def enter_export_mode(mode: ExportMode, ctx: ExportContext | None = None) -> Iterator[ExportContext]:
    """Context manager in which the process is exporting. Cannot be nested; the mode is always reset on exit."""
    global _mode, _context
    if _mode is not ExportMode.NONE:
        raise AssertionError("export mode must not be nested, but this process is exporting already")
    _mode, _context = ExportMode(mode), ctx if ctx is not None else ExportContext()
    try:
        yield _context
    finally:
        _mode, _context = ExportMode.NONE, None


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """Context manager in which a model is only traced, as before an export."""
    global _dry_run
    previous, _dry_run = _dry_run, True
    try:
        yield
    finally:
        _dry_run = previous


def is_exporting() -> bool:
    return _mode is not ExportMode.NONE


def is_exporting_standalone() -> bool:
    return _mode is ExportMode.STANDALONE


def is_exporting_distributed() -> bool:
    return _mode is ExportMode.DISTRIBUTED


def is_dry_run_or_exporting() -> bool:
    return _dry_run or is_exporting()


def get_current_export_ctx() -> ExportContext | None:
    return _context
