"""`TableTensor`: a column of a table as a tensor that ``torch.distributed.checkpoint`` writes and fills in pieces."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shoal.errors import UnsupportedError
from shoal.nn.state.landing import ANY_ROWS, Landing
from shoal.nn.state.saved import COLUMNS
from shoal.nn.state.table_state import TableState
from shoal.nn.state.torch_checkpoint import chunk_list, write_items
from shoal.table.checkpoint.tensors import KEPT


class TableTensor(torch.Tensor):
    """A column of a table in a module's ``state_dict``: its ids, rows, optimizer state or times.

    Computing, printing and ``torch.save`` treat it as an ordinary tensor of the rows that this process has when
    ``state_dict`` is called. They are copied when they are first read, or before they change.
    ``torch.distributed.checkpoint`` sees the table over all ranks instead: it writes each rank's rows piece by piece,
    and loads any number of rows.
    """

    table_state: TableState
    _name: str
    _blank: bool
    """Whether it is a tensor of zeros that `copy_` will replace."""

    @staticmethod
    def __new__(cls, state: TableState, name: str) -> TableTensor:
        spec = state.spec(name)
        shape, cpu = torch.Size(state.shape(name) if name in state.local else (0,)), torch.device("cpu")
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=spec.dtype, device=cpu)
        made.table_state, made._name, made._blank = state, name, False
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyrefly: ignore

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.zeros_like.default and not (kwargs or {}).get("dtype"):
            return args[0].blank()  # async_save makes its copy from this
        plain = lambda each: each.tensor() if isinstance(each, TableTensor) else each  # noqa: E731
        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    # --- as a tensor --------------------------------------------------------------------------------------------------

    def tensor(self) -> Tensor:
        """Return a plain tensor of this process's rows, copied on the first call."""
        if self._blank:
            return torch.zeros(self.shape, dtype=self.dtype, device="cpu")
        return self.table_state.tensors()[self._name]

    @property
    def shape(self) -> torch.Size:  # pyrefly: ignore[bad-override]
        return torch.Size(self.table_state.shape(self._name))

    def size(self, dim: int | None = None) -> Any:  # pyrefly: ignore[bad-override]
        return RowsSize(self, self._any_size()) if dim is None else self.shape[dim]

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        """False over ranks: its data is not in one memory, so it must not be written as raw memory."""
        return self.table_state.share.ranks == 1

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.tensor().untyped_storage()

    def data_ptr(self) -> int:
        """0 until the tensor is first read, and over ranks."""
        return self.tensor().data_ptr() if self.is_contiguous() and self.table_state.copied else 0

    def new_empty(self, *size: Any, **options: Any) -> Any:  # pyrefly: ignore[bad-override]
        """Return a `blank` tensor if called with its own size, as ``async_save`` does to make its copy."""
        if size and isinstance(size[0], RowsSize):
            return self.blank()
        return torch.empty(*size, dtype=options.pop("dtype", None) or self.dtype, **options)

    def blank(self) -> TableTensor:
        """Return a tensor of zeros that `copy_` will turn into a copy of this one."""
        twin = TableTensor(self.table_state, self._name)
        twin._blank = True
        return twin

    def copy_(self, src: Any, non_blocking: bool = False) -> TableTensor:  # pyrefly: ignore[bad-override]
        """Become a copy of another one, unaffected by later updates."""
        if not isinstance(src, TableTensor):
            raise UnsupportedError("rows cannot be written through a state_dict; use load_state_dict")
        self.table_state, self._blank = copy.deepcopy(src.table_state), False
        return self

    def numpy(self, *, force: bool = False) -> Any:
        return self.tensor().numpy(force=force)

    def tolist(self) -> Any:
        return self.tensor().tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tensor().__array__(*args, **kwargs)

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.tensor().__reduce_ex__(proto)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableTensor:
        return TableTensor(copy.deepcopy(self.table_state, memo), self._name)

    def __repr__(self, **_: Any) -> str:  # pyrefly: ignore[bad-override]
        share = self.table_state.share
        where = f", rank {share.rank} of {share.ranks}" if share.ranks > 1 else ""
        shape = f"{list(self.shape)}, {self.dtype}".replace("torch.", "")
        return f"TableTensor({self._name} of table {self.table_state.name!r}, {shape}{where})"

    # --- for torch.distributed.checkpoint -----------------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        self.table_state.landing = None
        pieces = [(piece.offsets, piece.sizes) for piece in self.table_state.pieces(self._name)]
        return write_items(fqn, self.dtype, self.table_state.size(self._name), pieces)

    def __create_chunk_list__(self) -> list[Any]:
        spec, wanted = self.table_state.whole.get(self._name), self.table_state.begin_landing(self._name)
        sizes = [(rows,) if spec is None else spec.size(rows) for _, rows in wanted]
        starts = [(row, *(0 for _ in size[1:])) for (row, _), size in zip(wanted, sizes, strict=True)]
        return chunk_list(zip(starts, sizes, strict=True))

    def __get_tensor_shard__(self, index: Any) -> Any:
        if self.table_state.landing is not None:
            return Inlet(self, self.table_state.landing, tuple(index.offset), self._any_size())
        return self.table_state.read(self._name, tuple(index.offset))

    def _any_size(self) -> tuple[int, ...]:
        spec = self.table_state.whole.get(self._name)
        return (ANY_ROWS,) if spec is None else spec.size(ANY_ROWS)

    @property
    def name(self) -> str:  # pyrefly: ignore[bad-override]
        """The name of the column."""
        return self._name


def tensors_of(state: TableState, global_step: int) -> dict[str, Tensor]:
    """Return the tensors of a table in a ``state_dict``, by the last part of their keys."""
    columns: dict[str, Tensor] = {name: TableTensor(state, name) for name in state.names}
    if not state.rows:  # else `dcp.load` into a new model would require it, also of rows saved without a budget
        columns.pop(KEPT, None)
    scales = torch.tensor(state.share.table.scales(), dtype=torch.float32, device="cpu")
    plain = {"scales": scales, "global_step": torch.tensor(global_step, device="cpu")}
    return {name: columns.pop(name) for name in (*COLUMNS, "config")} | plain | columns


class AnyName:
    """An object whose every public attribute is itself."""

    def __getattr__(self, name: str) -> AnyName:
        if name.startswith("_"):
            raise AttributeError(name)
        return self


class RowsSize:
    """The size of a `TableTensor`: a sequence of numbers like torch.Size, for the checks of a checkpoint's loader.

    It differs from another size (``!=``) if rows of that size do not fit the table; the number of rows does not matter.
    ``torch.distributed.checkpoint`` makes this comparison before it loads.
    """

    __slots__ = ("_of", "_whole")

    def __init__(self, of: TableTensor, whole: tuple[int, ...]) -> None:
        self._of, self._whole = of, whole

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, at: Any) -> Any:
        return self._of.shape[at]

    def __eq__(self, other: object) -> bool:
        return self._of.shape == (other._of.shape if isinstance(other, RowsSize) else other)

    def __ne__(self, other: object) -> bool:
        theirs = other._whole if isinstance(other, RowsSize) else other
        return not isinstance(theirs, tuple) or self._whole[1:] != tuple(theirs[1:]) or len(self) != len(theirs)

    def __hash__(self) -> int:
        return hash(self._of.shape)

    def numel(self) -> int:
        return self._of.shape.numel()

    def __repr__(self) -> str:
        return repr(self._of.shape)


class Inlet:
    """The target of a checkpoint's pieces: has the methods of a tensor that a checkpoint's loader calls."""

    def __init__(self, of: TableTensor, landing: Landing, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        self._of, self._landing, self._offsets, self._sizes = of, landing, offsets, sizes
        self.dtype, self.device = of.dtype, torch.device("cpu")

    def size(self, dim: int | None = None) -> Any:
        return torch.Size(self._sizes) if dim is None else self._sizes[dim]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._sizes)

    def narrow(self, dim: int, start: int, length: int) -> Inlet:
        offsets = tuple(at + start if d == dim else at for d, at in enumerate(self._offsets))
        sizes = tuple(length if d == dim else size for d, size in enumerate(self._sizes))
        return Inlet(self._of, self._landing, offsets, sizes)

    def detach(self) -> Inlet:
        return self

    def copy_(self, values: Tensor, non_blocking: bool = False) -> Inlet:
        self._landing.put(self._of.name, self._offsets, values.detach().cpu().to(self.dtype))
        return self
