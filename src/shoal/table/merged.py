"""`MergedMultiTypeHashTable`: slots with equal configurations share one table."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.table.arguments import as_ids, as_rows, device_of
from shoal.table.config.entry import HashTableConfigInstance, infer_dim_size

_LEGACY = re.compile(r"^fc_slot_[0-9]*$")


def merged_name(slots: Iterable[str]) -> str:
    """The name of the table that these slots share.

    >>> merged_name(["shop", "price"])
    'c4994ee36e1c818429b92da2af0d9b38'
    """
    return hashlib.md5(",".join(sorted(slots)).encode(), usedforsecurity=False).hexdigest()


def legacy_name(slots: Iterable[str]) -> str:
    """The name of the shared table in old checkpoints, where ``fc_slot_3`` was called ``slot_3``."""
    return merged_name([slot[3:] if _LEGACY.match(slot) else slot for slot in slots])


def merge_configs(
    slot_to_config: Mapping[str, HashTableConfigInstance],
) -> tuple[dict[str, HashTableConfigInstance], dict[str, str]]:
    """The configurations by sorted merged name, and the merged name of each slot: equal ``str(config)`` share one."""
    members: dict[str, list[str]] = {}
    for slot in sorted(slot_to_config):
        members.setdefault(str(slot_to_config[slot]), []).append(slot)
    merged, name_of = {}, {}
    for slots in members.values():
        name, legacy = merged_name(slots), legacy_name(slots)
        first = slot_to_config[slots[0]]
        extra = list(dict.fromkeys(n for slot in slots for n in slot_to_config[slot].extra_restore_names))
        if legacy != name:
            extra.append(legacy)
        merged[name] = HashTableConfigInstance(first.table_config, first.learning_rate_fns, extra)
        name_of.update(dict.fromkeys(slots, name))
    return {name: merged[name] for name in sorted(merged)}, name_of


class MergedMultiTypeHashTable:
    """A multi-type table in which slots with equal ``str(config)`` share a table of ``factory({merged name: config})``.

    The same id in two member slots is the same row; put the slot into the id to keep them separate. In one write, equal
    ids of two member slots are duplicates, in sorted slot order.
    """

    def __init__(
        self,
        slot_to_config: Mapping[str, HashTableConfigInstance],
        factory: Callable[[dict[str, HashTableConfigInstance]], Any],
    ) -> None:
        configs, self.slot_mapping = merge_configs(slot_to_config)
        """Slot -> the name of its table."""
        self._dims = {slot: infer_dim_size(config.table_config) for slot, config in slot_to_config.items()}
        self._table = factory(configs)

    @property
    def table(self) -> Any:
        """The multi-type table that holds the merged tables."""
        return self._table

    def get_table_dim_sizes(self) -> list[int]:
        """The tables' dimensions, by sorted merged name."""
        return self._table.get_table_dim_sizes()

    def lookup(
        self,
        slot_to_id: Mapping[str, Tensor],
        auxiliary_bundle: dict[str, Any] | None = None,
        early_reorder_indicies_res_pack: tuple[Any, Any] | None = None,
    ) -> Any:
        """``{slot: ids}`` to ``{slot: [n, dim]}``.

        With ``early_reorder_indicies_res_pack = (merged_slot_to_sizes, pack)`` and a synchronous table, only the keys
        of ``slot_to_id`` are used, the ids are in the pack, and the result is ``(slot_to_embedding, bundle)``. The
        bundle includes the sizes because a pipelined lookup returns the result of an earlier batch.
        """
        groups = self._groups(slot_to_id)
        if early_reorder_indicies_res_pack is None:
            ids = {
                slot: as_ids(value, slot, device=device_of(self._table)).view(-1) for slot, value in slot_to_id.items()
            }
            found = self._table.lookup({name: torch.cat([ids[s] for s in slots]) for name, slots in groups.items()})
            sizes = {name: [ids[slot].numel() for slot in slots] for name, slots in groups.items()}
            return _split(groups, found, sizes)
        sizes, pack = early_reorder_indicies_res_pack
        bundle = {} if auxiliary_bundle is None else auxiliary_bundle
        bundle["merged_slot_to_sizes"] = sizes
        found, bundle = self._table.lookup(dict.fromkeys(groups), bundle, pack)
        return _split(groups, found, bundle.pop("merged_slot_to_sizes")), bundle

    def assign(self, slot_to_id_and_value: Mapping[str, tuple[Tensor, Tensor]], *args: Any, **kwargs: Any) -> Any:
        """``{slot: (ids, values)}``; further arguments are passed on."""
        self._table.assign(self._merge(slot_to_id_and_value, "values"), *args, **kwargs)
        return self

    def assign_add(self, slot_to_id_and_value: Mapping[str, tuple[Tensor, Tensor]], *args: Any, **kwargs: Any) -> Any:
        """``{slot: (ids, values)}``; further arguments are passed on."""
        self._table.assign_add(self._merge(slot_to_id_and_value, "values"), *args, **kwargs)
        return self

    def apply_gradients(
        self, slot_to_grad: Mapping[str, Any], *args: Any, skip_merge_id: bool = False, **kwargs: Any
    ) -> Any:
        """``{slot: (ids, grads)}``; further arguments are passed on.

        With ``skip_merge_id`` and a synchronous table, the first argument is ``{slot: grads}``.
        """
        if skip_merge_id:
            merged = self._merged(slot_to_grad)
        else:
            merged = self._merge(slot_to_grad, "grads")
        self._table.apply_gradients(merged, *args, **kwargs)
        return self

    def pipeline(
        self,
        batches: Iterable[Any],
        *,
        ids: Callable[[Any], Mapping[str, Tensor]] = lambda batch: batch,
        **options: Any,
    ) -> Any:
        """The pipeline of the synchronous table, by slot; ``ids`` returns ``{slot: ids}`` of a batch."""

        def flat(batch: Any) -> dict[str, Tensor]:
            return {slot: as_ids(value, slot).view(-1) for slot, value in ids(batch).items()}

        def found(batch: Any, embeddings: Mapping[str, Tensor]) -> dict[str, Tensor]:
            of_slots = flat(batch)
            groups = self._groups(of_slots)
            sizes = {name: [of_slots[slot].numel() for slot in slots] for name, slots in groups.items()}
            return _split(groups, embeddings, sizes)

        return self._table.pipeline(
            batches, ids=lambda batch: self._merged(flat(batch)), found=found, gradients=self._merged, **options
        )

    def _merged(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Merged name -> the values of the table's member slots, concatenated."""
        groups = self._groups(values)
        return {name: torch.cat([values[slot] for slot in slots]) for name, slots in groups.items()}

    def reinitialize(self, slot: str, ids: Tensor) -> tuple[Any, Tensor]:
        """Not supported: a merged table does not know which slot a row belongs to."""
        raise NotImplementedError(
            "MergedMultiTypeHashTable does not support reinitialize: a row may belong to several slots"
        )

    def get_queue_hooks(self) -> list[Any]:
        """The hooks of the merged tables."""
        return self._table.get_queue_hooks()

    def as_op(self, name: str | None = None) -> Any:
        """Waits until all calls on the merged tables have been applied."""
        self._table.as_op()
        return self

    def __repr__(self) -> str:
        return f"MergedMultiTypeHashTable({len(self.slot_mapping)} slots, {self._table!r})"

    def _groups(self, slots: Iterable[str]) -> dict[str, list[str]]:
        """Merged name -> the given slots that share it, sorted."""
        groups: dict[str, list[str]] = {}
        for slot in sorted(slots):
            if slot not in self.slot_mapping:
                raise KeyError(f"there is no slot {slot!r}; slots are {', '.join(self.slot_mapping) or 'none'}")
            groups.setdefault(self.slot_mapping[slot], []).append(slot)
        return groups

    def _merge(self, writes: Mapping[str, tuple[Tensor, Tensor]], what: str) -> dict[str, tuple[Tensor, Tensor]]:
        merged, device = {}, device_of(self._table)
        for name, slots in self._groups(writes).items():
            ids, rows = [], []
            for slot in slots:
                ids.append(as_ids(writes[slot][0], slot, device=device).view(-1))
                dim = self._dims[slot]
                rows.append(as_rows(writes[slot][1], ids[-1].numel(), dim, slot, what, device).view(-1, dim))
            merged[name] = torch.cat(ids), torch.cat(rows)
        return merged


def _split(groups: dict[str, list[str]], found: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, slots in groups.items():
        of_slots = sizes[name].tolist() if isinstance(sizes[name], Tensor) else list(sizes[name])
        parts = torch.split(found[name], of_slots)
        out.update(zip(slots, parts, strict=True))
    return out
