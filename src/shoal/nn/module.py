"""`TableModule`: the base class of modules over tables: their tables, the device of results, their state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, DataError, UnsupportedError
from shoal.nn.configs import replace_rows
from shoal.nn.keeper import TableKeeper
from shoal.nn.protocol import EmbeddingTable
from shoal.nn.read.asked import Asked, Located, located
from shoal.nn.read.plan import Feature
from shoal.nn.read.tables import Tables
from shoal.nn.state.table_state import OPTIONAL, TableState, load_state
from shoal.nn.state.tensor import AnyName, tensors_of
from shoal.nn.update.gradients import clear_pending
from shoal.table.checkpoint.shares import share_of
from shoal.table.checkpoint.tensors import NAMES
from shoal.table.protocol import Group, Missing


class TableModule(nn.Module):
    """A module over one table, or over tables by name.

    It has no parameters: rows belong to the table, and are updated by the table's own optimizer. ``state_dict`` holds
    the rows of local tables as ``table.ids``, ``table.rows``, … (``tables.<name>.ids`` … with tables by name). It holds
    nothing for a table whose rows are elsewhere, such as on servers, and warns how to save these. ``load_state_dict``
    also accepts that of a TorchRec collection, whose weight ``[n, D]`` becomes the rows of ids 0 to n - 1. Rows stay on
    their table's device; ``.to`` moves and casts the results of `forward`, which otherwise are on the rows' device.
    """

    def __init__(
        self,
        table: EmbeddingTable | Mapping[str, EmbeddingTable],
        *,
        padding_idx: int | None,
        insert_missing: bool,
        fused: bool | None,
    ) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        self.insert_missing = insert_missing
        self._tables = Tables(table, type(self).__name__)
        self._tables.padding = padding_idx
        for keeper in self.keepers():
            keeper.choose(fused)

    def _read_features(self, features: dict[str, Feature]) -> None:
        """Set the features to read, at the end of a constructor."""
        self._tables.features = features
        self._probe = torch.empty(0, device=self._tables.device())  # .to moves it to the device of results

    @property
    def table(self) -> EmbeddingTable:
        """The one table."""
        self._check_one()
        return self._tables.named[""]

    @property
    def tables(self) -> dict[str, EmbeddingTable]:
        """The tables by name; empty if there is one table for everything."""
        return {} if self._tables.one else dict(self._tables.named)

    @property
    def device(self) -> torch.device:
        """The device of results: that of the first table's rows, unless ``.to`` has changed it."""
        return self._probe.device

    @property
    def clock(self) -> Callable[[], float]:
        """The clock, in seconds, for the timestamps of rows, from which expiry counts; ``time.time`` by default.

        Set it to the time of your events when you train on a log. All modules of the tables share it. With
        ``time.time`` a row keeps a timestamp that is later; the time of any other clock is written as it is, but a
        time more than a day ahead of the computer's clock is refused.
        """
        return self.keepers()[0].clock

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        for keeper in self.keepers():
            keeper.clock = clock

    def refresh_clock(self) -> None:
        """Give captured CUDA graphs the current time; call it before a replay.

        A replay counts its steps itself, on the device, but stamps rows with the time of the last call. Without CUDA
        graphs it is not needed: each update reads the clock.
        """
        self._tables.refresh_clock()

    def keepers(self) -> list[TableKeeper]:
        """The distinct keepers of this module's tables."""
        return self._tables.distinct

    def groups(self) -> list[Group]:
        """The groups of this module's tables, in the order in which a batch calls them."""
        return self._tables.groups()

    def locate(self, *args: Any, **kwargs: Any) -> Located:
        """Locate ids before their forward, which takes the result instead of the ids; arguments are as for `forward`.

        >>> import shoal, torch
        >>> from shoal.nn import HashEmbeddingBag
        >>> bag = HashEmbeddingBag(shoal.HashTable(dim=2, initializer="zeros"))
        >>> located = bag.locate([[7, 8], [9]])  # any time before, in any thread
        >>> bag(located).shape  # the rows are read now
        torch.Size([2, 2])

        All work that does not need the rows is done here: ids are converted, moved to the tables' device, exchanged
        between ranks or distributed to servers. `shoal.train.Pipeline` does this for the next batches in a thread.
        """
        return located(self, lambda: self.ask(*args, **kwargs))

    def ask(self, *args: Any, **kwargs: Any) -> Asked:
        """Split a forward into its request and the computation of its result."""
        raise NotImplementedError

    def swap_tables(self, new: Mapping[int, Any]) -> None:
        """Replace tables; ``new`` maps the ``id()`` of each replaced table to the new one.

        Features, clocks, update counts and ``fused`` are kept.
        """
        self._tables = self._tables.swapped(new)

    def _check_one(self) -> None:
        if not self._tables.one:
            raise ConfigError(
                f"{type(self).__name__} has one table for each of {list(self._tables.named)}, so ids must come by key"
            )

    def _check_key(self, key: str) -> None:
        if not self._tables.one and key not in self._tables.features:
            raise ConfigError(f"{type(self).__name__} has no feature {key!r}, only {list(self._tables.features)}")

    def missing(self) -> Missing:
        """Return how ids without a row are answered now: with zeros, or with their initial row."""
        return "initial" if self.training and self.insert_missing else "zeros"

    def _placed(self, out: Tensor) -> Tensor:
        """Convert a result to the device and dtype that ``.to`` set."""
        probe = self._probe
        return out if out.dtype is probe.dtype and out.device == probe.device else out.to(probe.device, probe.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableModule:
        probe = fn(self._probe)
        if probe.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"{type(self).__name__}.to: the device must be cpu or cuda, got {probe.device}")
        self._probe = probe
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return repr(self._tables)

    # --- state ------------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # Modules that share a table share its tensors, as tied parameters do.
        done = destination.__dict__.setdefault("_shoal_tables", {}) if hasattr(destination, "__dict__") else {}
        for name, keeper in self._named_keepers(prefix):
            table = keeper.table
            keeper.settle()
            if keeper.handle not in done:
                share = share_of(table)
                done[keeper.handle] = None if share is None else tensors_of(TableState(share), keeper.global_step)
            tensors = done[keeper.handle]
            if tensors is not None:
                destination.update({name + part: tensor for part, tensor in tensors.items()})
            elif advice := getattr(table, "saved_by", None):
                warnings.warn(
                    f"{type(self).__name__}: this state_dict does not hold the rows of table {keeper.name!r}, because "
                    f"they are not all in this process; save them with {advice}",
                    stacklevel=2,
                )

    def _fqn_modifiers(self) -> dict[str, str]:
        """For ``torch.distributed.checkpoint.state_dict``, which reads attributes with the names of a state dict."""
        return {"table": "_any_name", "tables": "_any_name"}

    _any_name = AnyName()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = {prefix + name for name in self.state_names()}
        weights = self._torchrec_weights(state_dict, prefix)
        for name, (key, keeper) in weights.items():
            known = {own for own in known if not own.startswith(name)} | {key}
            try:
                replace_rows(keeper.table, state_dict[key])
            except ConfigError as error:
                error_msgs.append(str(error))
                continue
            clear_pending([keeper])
        missing_keys += sorted(known - state_dict.keys())
        optional = {name + part for name, _ in self._named_keepers(prefix) for part in OPTIONAL}
        if strict:
            unexpected_keys += sorted(
                key
                for key in state_dict
                if key.startswith(prefix) and key not in known | optional and key not in unexpected_keys
            )
        loaded: set[int] = set()
        for name, keeper in self._named_keepers(prefix):
            share = share_of(keeper.table)
            if share is None or keeper.handle in loaded or any(name + part not in state_dict for part in NAMES):
                continue
            loaded.add(keeper.handle)
            values = {part: state_dict[name + part] for part in (*NAMES, *OPTIONAL) if name + part in state_dict}
            try:
                load_state(share, values)
            except DataError as error:
                error_msgs.append(str(error))
                continue
            clear_pending([keeper])
            if name + "global_step" in state_dict:
                keeper.global_step = int(state_dict[name + "global_step"])

    def _torchrec_weights(self, state_dict: Mapping[str, Any], prefix: str) -> dict[str, tuple[str, TableKeeper]]:
        """Return prefix of a table's keys -> key of its weight in a TorchRec ``state_dict``, and its keeper."""
        found = {}
        for name, keeper in self._named_keepers(prefix):
            table = name.removeprefix(f"{prefix}tables.")
            for part in ("embedding_bags.", "embeddings."):
                key = f"{prefix}{part}{table}weight"
                if table != name and key in state_dict:
                    found[name] = key, keeper
        return found

    def _named_keepers(self, prefix: str) -> list[tuple[str, TableKeeper]]:
        if self._tables.one:
            return [(f"{prefix}table.", self._tables.distinct[0])]
        return [(f"{prefix}tables.{name}.", keeper) for name, keeper in self._tables.keepers.items()]

    def state_names(self) -> list[str]:
        """Return the keys of the tables that must be in this module's own ``state_dict``."""
        return [
            name + part
            for name, keeper in self._named_keepers("")
            if share_of(keeper.table) is not None
            for part in (*NAMES, "global_step")
        ]
