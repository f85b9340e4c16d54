"""`NativePredictor`: answers a signature's serialised requests without the interpreter."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal import _core
from shoal.serving.export.manifest import TensorSpec
from shoal.serving.server.moments import WAIT_SECS, Fresh
from shoal.serving.server.net.native import NativeNet
from shoal.serving.server.net.row_plan import NotNative
from shoal.serving.tensors import dtype_code
from shoal.table.protocol import SUM

log = logging.getLogger(__name__)

Place = tuple[str, int]
"""A table by its name and the number of the sub-table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The tables that hold a feature's rows: one, or one per shard, with ids assigned by remainder."""

    places: tuple[Place, ...]
    tables: tuple[Any, ...]
    """The native tables, one per place."""
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFeature:
    """A feature: where its rows come from, how they are pooled, and their position in the net's inputs."""

    source: str
    combiner: int = SUM
    length: int = 1
    padding: int | None = None
    unpooled: bool = False
    """Whether each id has its own row in the net's input."""
    input: str
    column: int = 0


class NativePredictor:
    """Answers requests natively; keeps everything that native code reads alive until it is closed.

    Args:
        net: the net to run.
        sources: name used in ``features`` -> tables.
        outputs: names of the net's outputs.
        reader: reads requests of raw features; their numbers are the net's input ``numbers``.
        inputs: without a reader, the inputs of requests: ids of the feature of that name, or an input of the net.

    Raises:
        NotNative: it cannot be done natively; the message says why.
    """

    def __init__(
        self,
        net: NativeNet,
        sources: Mapping[str, Source],
        features: Mapping[str, ReadFeature],
        outputs: Sequence[str],
        *,
        reader: Any = None,
        numbers: str = "",
        inputs: Mapping[str, TensorSpec] | None = None,
    ) -> None:
        self.outputs = list(outputs)
        self._net = net
        self._kept = (sources, reader)
        places = [place for source in sources.values() for place in source.places]
        self._numbers = {place: number for number, place in enumerate(places)}
        order = list(sources)
        tables = [list(source.tables) for source in sources.values()]
        listed = [
            (
                order.index(one.source), one.combiner, one.length, one.padding, one.unpooled,
                net.inputs.index(one.input), one.column,
            )
            for one in features.values()
        ]  # fmt: skip
        shapes = [(alias, list(sizes)) for alias, sizes in zip(self.outputs, net.shapes, strict=True)]
        try:
            if reader is not None:
                place = net.inputs.index(numbers)
                self.core = _core.Predictor.of_samples(net.core, tables, listed, shapes, reader, place)
            else:
                named = [_named(alias, spec, features, net) for alias, spec in (inputs or {}).items()]
                self.core = _core.Predictor.of_tensors(net.core, tables, listed, shapes, named)
        except ValueError as error:
            raise NotNative(str(error)) from None

    def prepare(self, net: Any) -> Callable[[Mapping[Place, Fresh]], None]:
        """A function that switches to the weights of ``net`` (None: the current ones) and to fresh rows.

        The function returns when all batches that began earlier have ended.
        """
        native = None if net is None else self._net.with_weights(net.weights)
        if native is not None and not isinstance(native, NativeNet):
            return lambda fresh: self.close()
        self._net = native or self._net

        def switch(fresh: Mapping[Place, Fresh]) -> None:
            kept = [(self._numbers[place], *rows.tensors()) for place, rows in fresh.items() if place in self._numbers]
            given = [(number, ids.data_ptr(), ids.numel(), values.data_ptr()) for number, ids, values in kept]
            if not self.core.switch(None if native is None else native.core, given, WAIT_SECS):
                raise TimeoutError(f"a batch has run for more than {WAIT_SECS:.0f} s")

        return switch

    def close(self) -> None:
        """Start no further batches; returns when none is running."""
        if not self.core.close(WAIT_SECS):
            log.error("a batch has run for more than %.0f s", WAIT_SECS)

    def __del__(self) -> None:
        if hasattr(self, "core"):
            self.close()


def _named(
    alias: str, spec: TensorSpec, features: Mapping[str, ReadFeature], net: NativeNet
) -> tuple[str, int, list[int], int, int]:
    if spec.shape is None:
        raise NotNative(f"input {alias!r} may have any shape")
    shape = [-1 if size is None else size for size in spec.shape[1:]]
    if alias in features:
        one = features[alias]
        if spec.dtype != "int64" or len(shape) != 1:
            raise NotNative(f"input {alias!r} is not int64 ids [rows, ids]")
        shape = [one.length] if one.unpooled else shape
        return alias, dtype_code("int64"), shape, list(features).index(alias), net.inputs.index(one.input)
    if alias not in net.inputs or spec.dtype != "float" or -1 in shape:
        raise NotNative(f"input {alias!r} is not float32 with fixed sizes")
    if math.prod(shape) != math.prod(net.sizes[alias]):
        raise NotNative(f"input {alias!r} does not have the size of the net's input")
    return alias, dtype_code("float"), shape, -1, net.inputs.index(alias)
