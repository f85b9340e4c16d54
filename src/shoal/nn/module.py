"""What `HashEmbedding` and `HashEmbeddingBag` have in common: their tables, where they put results, their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, DataError, UnsupportedError
from shoal.nn.protocol import EmbeddingTable
from shoal.nn.slot import TableSlot, slot_of
from shoal.nn.state import NAMES, load_table_state, table_state
from shoal.table.table import HashTable


class TableModule(nn.Module):
    """A module over one table, or over a table per key.

    It has no parameters: rows belong to the table, and are updated by the table's own optimizer. ``state_dict`` holds
    the rows of local tables as ``table.ids``, ``table.rows``, … (``tables.<key>.ids`` … with a table per key); tables
    that live elsewhere are saved there. Rows stay where their table has them; ``.to`` moves and casts what `forward`
    returns.
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
        self._probe = torch.empty(0, device=None)  # follows .to, so that it knows where results go
        self._slot: TableSlot | None = None
        self._slots: dict[str, TableSlot] = {}
        if isinstance(table, Mapping):
            if not table:
                raise ConfigError(f"{type(self).__name__}: a mapping of tables has at least one")
            self._slots = {str(key): slot_of(one) for key, one in table.items()}
        else:
            self._slot = slot_of(table)
        for slot in self.slots():
            slot.choose(fused)

    @property
    def table(self) -> EmbeddingTable:
        """The one table."""
        return self._only().table

    @property
    def tables(self) -> dict[str, EmbeddingTable]:
        """By key; empty if there is one table for everything."""
        return {key: slot.table for key, slot in self._slots.items()}

    @property
    def clock(self) -> Callable[[], float]:
        """Tells the seconds that rows are stamped with, from which expiry counts; ``time.time`` at first.

        Set it to the time of your events when you train on a log. It belongs to the tables, with all their modules.
        With ``time.time`` a row whose stamp is later keeps it; what another clock tells is kept as it is, but a time
        more than a day ahead of the computer's clock is refused.
        """
        return self.slots()[0].clock

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        for slot in self.slots():
            slot.clock = clock

    def slots(self) -> list[TableSlot]:
        """The distinct slots of this module's tables."""
        return list(dict.fromkeys([self._slot, *self._slots.values()] if self._slot else self._slots.values()))

    def _only(self) -> TableSlot:
        if self._slot is None:
            raise ConfigError(
                f"{type(self).__name__} has a table for each of {list(self._slots)}; give it ids by key, too"
            )
        return self._slot

    def _of_key(self, key: str) -> TableSlot:
        if self._slot is not None:
            return self._slot
        if str(key) not in self._slots:
            raise ConfigError(f"{type(self).__name__} has tables for {list(self._slots)}, none for {key!r}")
        return self._slots[str(key)]

    def _placed(self, out: Tensor) -> Tensor:
        """A result where, and as what, the rest of the model wants it."""
        return out.to(self._probe.device, self._probe.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableModule:
        probe = fn(self._probe)
        if probe.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"{type(self).__name__} returns results on cpu or cuda, not on {probe.device}")
        self._probe = probe
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        if self._slot is not None:
            return repr(self._slot.table)
        return ", ".join(f"{key}: {slot.table!r}" for key, slot in self._slots.items())

    # --- state ------------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # Modules that share a table share its tensors, as tied parameters do.
        done = destination.__dict__.setdefault("_shoal_tables", {}) if hasattr(destination, "__dict__") else {}
        for name, slot in self._named_slots(prefix):
            if isinstance(slot.table, HashTable):
                if slot.handle not in done:
                    done[slot.handle] = table_state(slot.table) | {
                        "global_step": torch.tensor(slot.global_step, device="cpu")
                    }
                destination.update({name + part: tensor for part, tensor in done[slot.handle].items()})

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
        known = {prefix + name for name in self._state_names()}
        missing_keys += sorted(known - state_dict.keys())
        if strict:
            unexpected_keys += sorted(
                key for key in state_dict if key.startswith(prefix) and key not in known and key not in unexpected_keys
            )
        for name, slot in self._named_slots(prefix):
            table = slot.table
            if not isinstance(table, HashTable) or any(name + part not in state_dict for part in NAMES):
                continue
            try:
                load_table_state(table, {part: state_dict[name + part] for part in NAMES})
            except DataError as error:
                error_msgs.append(str(error))
                continue
            slot.pending.clear()
            if name + "global_step" in state_dict:
                slot.global_step = int(state_dict[name + "global_step"])

    def _named_slots(self, prefix: str) -> list[tuple[str, TableSlot]]:
        if self._slot is not None:
            return [(f"{prefix}table.", self._slot)]
        return [(f"{prefix}tables.{key}.", slot) for key, slot in self._slots.items()]

    def _state_names(self) -> list[str]:
        return [
            name + part
            for name, slot in self._named_slots("")
            if isinstance(slot.table, HashTable)
            for part in (*NAMES, "global_step")
        ]
