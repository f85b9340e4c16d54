"""`SharedTensor`: a flat buffer that several fills write before it is returned."""

from typing import NamedTuple

from torch import Tensor

from shoal.errors import ConfigError


class Fill(NamedTuple):
    """One call of `fill_with_offset_map`, kept for the gradient."""

    value: Tensor | None
    """None if only the gradient is needed."""
    pos: Tensor
    pos_splits: Tensor
    offset_splits: Tensor
    offsets: Tensor
    dims: list[int]


class SharedTensor:
    """A handle to a float32 buffer of ``size`` floats, zero until filled; unusable once finalized."""

    def __init__(self, buffer: Tensor, offsets: Tensor | None = None) -> None:
        self._buffer = buffer
        self._offsets = offsets  # the offsets made together with the buffer: no two of them overlap
        self._fills: list[Fill] = []
        self._finalized = False

    @property
    def size(self) -> int:
        """The number of floats in the buffer."""
        return self._buffer.shape[0]

    def buffer(self, op: str) -> Tensor:
        """The live buffer; raises once the handle is finalized."""
        if self._finalized:
            raise ConfigError(f"{op}: the shared tensor is finalized; make a new one for each batch")
        return self._buffer

    def __repr__(self) -> str:
        return f"SharedTensor(size={self.size}, fills={len(self._fills)}, finalized={self._finalized})"
