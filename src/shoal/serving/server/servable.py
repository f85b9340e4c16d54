"""What a loaded version can do: its signatures, the tables behind them, and the pushes they take."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.serving.export.manifest import SignatureSpec
from shoal.serving.server.hand_over import hand_over
from shoal.serving.server.table_view import TableView
from shoal.serving.status import invalid_argument
from shoal.serving.tensors import NAME_OF_DTYPE, TensorHead

Tensors = dict[str, Any]


@dataclass(slots=True)
class Signature:
    """One callable of a servable.

    ``push`` marks those that write rows, ``batch`` those whose rows may be joined, ``waits`` those that wait on others.
    """

    spec: SignatureSpec
    run: Callable[[Tensors], Tensors]
    push: bool = False
    batch: bool = False
    waits: bool = False
    samples: bool = False
    """Whether every input has one row per sample, so that all have the same number of rows."""
    accepts: Mapping[str, tuple[str, ...]] | None = None
    """Further dtypes that an input takes beside the one in the specification."""
    hints: Mapping[str, str] | None = None
    """alias -> the form that this replica would rather get, told in its metadata."""

    def check(self, where: str, inputs: Tensors) -> None:
        """Raises invalid argument where the inputs, given as tensors or as heads, are not those of the signature."""
        wanted = self.spec.inputs
        if inputs.keys() != wanted.keys():
            missing, extra = sorted(wanted.keys() - inputs.keys()), sorted(inputs.keys() - wanted.keys())
            raise invalid_argument(
                f"{where}: inputs do not match; missing {missing}, unexpected {extra}; it takes {sorted(wanted)}"
            )
        for alias, value in inputs.items():
            spec = wanted[alias]
            got = value.dtype if isinstance(value, TensorHead) else dtype_of(value)
            if got != spec.dtype and got not in (self.accepts or {}).get(alias, ()):
                takes = " or ".join((spec.dtype, *(self.accepts or {}).get(alias, ())))
                raise invalid_argument(f"{where}: input {alias!r} is {got}, expected {takes}")
            shape = tuple(value.shape)
            if spec.shape is not None and (
                len(shape) != len(spec.shape)
                or any(want is not None and want != have for want, have in zip(spec.shape, shape, strict=True))
            ):
                raise invalid_argument(
                    f"{where}: input {alias!r} has shape {list(shape)}, expected {spec.shape} (null = any)"
                )
        if self.samples and len({value.shape[0] for value in inputs.values()}) > 1:
            rows = {alias: value.shape[0] for alias, value in sorted(inputs.items())}
            raise invalid_argument(f"{where}: inputs must have one row per sample each, got different numbers: {rows}")


def dtype_of(tensor: torch.Tensor | np.ndarray) -> str:
    """The name of a tensor's dtype as signatures write it; arrays hold strings."""
    return "string" if isinstance(tensor, np.ndarray) else NAME_OF_DTYPE.get(tensor.dtype) or str(tensor.dtype)


class Servable:
    """A loaded version: its signatures, the tables behind them, and the pushes they take.

    Attributes:
        rows_read_at: Unix time at which the export began to read its rows; None where nobody knows.
    """

    def __init__(
        self,
        signatures: Mapping[str, Signature],
        tables: Mapping[str, TableView] | None = None,
        rows_read_at: float | None = None,
    ) -> None:
        self.signatures = dict(signatures)
        self.tables = dict(tables or {})
        self.rows_read_at = rows_read_at
        self.push_lock = threading.Lock()
        self.successor: Servable | None = None
        self.graphs: Any = None
        """The ``SubGraphs`` that its signatures call, if they call any."""

    def missing(self) -> str:
        """What it needs from other servers and does not get yet, "" if that is nothing. May take seconds."""
        return self.graphs.missing() if self.graphs is not None else ""

    def close(self) -> None:
        """Frees what the version holds."""
        self.signatures, self.tables = {}, {}

    def hand_over_to(self, successor: "Servable") -> None:
        """From now on ``successor`` gets every push too; rows pushed before are copied to it where they are newer.

        See :func:`shoal.serving.server.hand_over.hand_over`.
        """
        hand_over(self, successor)
