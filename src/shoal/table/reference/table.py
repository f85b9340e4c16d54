"""`ReferenceTable`: the definition of `HashTable`, with a dict of rows and a loop over the ids."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shoal.errors import ConfigError, UnsupportedError
from shoal.fid import shard_of, slot_v2
from shoal.table.config.entry import HashTableConfigInstance, infer_dim_size
from shoal.table.config.messages import EntryConfig, EntryDump
from shoal.table.config.native import default_expiry_s, slot_expiry_s
from shoal.table.config.validate import validate_table_config
from shoal.table.reference.optimizers import State, reference_optimizer
from shoal.table.reference.quantizers import (
    HashNet,
    decode,
    encode,
    fixed_r8_codes,
    fixed_r8_values,
    initial_weights,
    stochastic_round_float16,
)

F = np.float32
MAX_TIME = (1 << 32) - 1
SMALLEST_NORMAL = F(1.17549435e-38)


@dataclass
class Row:
    """A training row has raw weights and a state per segment; a serving row has the codes of each segment."""

    weights: np.ndarray
    states: list[State] = field(default_factory=list)
    codes: list[np.ndarray] = field(default_factory=list)
    time: int = 0


class ReferenceTable:
    """The definition of `HashTable`: the same methods and results, at the speed of a Python loop.

    ``hash_filter`` has ``should_be_filtered(id, count)``; ``touched`` collects the ids that training marked.
    """

    def __init__(self, config: HashTableConfigInstance, hash_filter: Any = None, name: str = "", seed: int = 0) -> None:
        validate_table_config(config.table_config, config.learning_rate_fns, name)
        self.config = config
        self.name = name
        self.extra_restore_names = list(config.extra_restore_names)
        self.dim_size = infer_dim_size(config.table_config)
        self.hash_filter = hash_filter
        self.rows: dict[int, Row] = {}
        self.max_update_time = 0
        self.touched: set[int] = set()
        self.random = np.random.default_rng(seed)
        entry = config.table_config.entry_config
        self.serving = entry.entry_type == EntryConfig.SERVING
        self.segments = list(entry.segments)
        ends = np.cumsum([segment.dim_size for segment in self.segments]).tolist()
        self.slices = [slice(end - s.dim_size, end) for end, s in zip(ends, self.segments, strict=True)]
        self.optimizers = [] if self.serving else [reference_optimizer(s.opt_config) for s in self.segments]
        self.hash_nets = [
            HashNet(s.comp_config.one_bit) if s.comp_config.WhichOneof("type") == "one_bit" else None
            for s in self.segments
        ]

    # --- reading ---------------------------------------------------------------------------------------------------
    def lookup(self, ids: Any, use_multi_threads: bool = False, enable_dedup: bool = False) -> torch.Tensor:
        keys = _ids(ids)
        out = np.zeros((len(keys), self.dim_size), F)
        for i, key in enumerate(keys):
            if key in self.rows:
                out[i] = self._read(self.rows[key])
        return torch.from_numpy(out)

    def contains(self, ids: Any) -> torch.Tensor:
        return torch.tensor([key in self.rows for key in _ids(ids)], dtype=torch.bool, device="cpu")

    def size(self) -> int:
        return len(self.rows)

    def lookup_entry(self, ids: Any) -> list[bytes]:
        self._training_only("lookup_entry")
        return [self.dump(key).SerializeToString() if key in self.rows else b"" for key in _ids(ids)]

    def save_as_tensor(self, shard_idx: int, num_shards: int, limit: int, offset: int) -> tuple[int, list[bytes]]:
        part = sorted(key for key in self.rows if shard_of(key, num_shards) == shard_idx)[offset : offset + limit]
        return offset + len(part), [self.dump(key, with_id=True).SerializeToString() for key in part]

    def dump(self, key: int, with_id: bool = False) -> EntryDump:
        """The row as a checkpoint record."""
        row = self.rows[key]
        dump = EntryDump(num=row.weights.tolist(), last_update_ts_sec=row.time)
        if with_id:
            dump.id = key
        dump.opt.SetInParent()
        for optimizer, state in zip(self.optimizers, row.states, strict=True):
            single = optimizer.dump(state)
            if single is not None:
                dump.opt.dump.append(single)
        return dump

    def stale(self, key: int, now: int) -> bool:
        """Whether a row has expired by its slot's rule."""
        expiry = self.config.table_config.slot_expire_time_config
        return now - self.rows[key].time >= slot_expiry_s(expiry).get(slot_v2(key), default_expiry_s(expiry))

    # --- writing ---------------------------------------------------------------------------------------------------
    def assign(self, ids: Any, values: Any, req_time: int | None = None) -> "ReferenceTable":
        keys, values, now = self._write_arguments(ids, values, req_time)
        for key, value, dropped in zip(keys, values, self._dropped(keys, [1] * len(keys)), strict=True):
            if dropped:
                continue
            if self.config.table_config.skip_zero_embedding and _is_zero(value):
                self.rows.pop(key, None)
                continue
            row = self.rows.get(key) or self._create(key)
            self._store(row, value)
            row.time = now
        return self

    def assign_add(self, ids: Any, values: Any, req_time: int | None = None) -> "ReferenceTable":
        keys, values, now = self._write_arguments(ids, values, req_time)
        for key, value in zip(keys, values, strict=True):
            if self._dropped([key], [1])[0]:
                continue
            known = key in self.rows
            row = self.rows[key] if known else self._create(key)
            base = self._read(row) if self.serving else row.weights
            self._store(row, value if self.serving and not known else base + value)
            row.time = now
        return self

    def apply_gradients(
        self,
        ids: Any,
        grads: Any,
        global_step: int,
        use_multi_threads: bool = False,
        enable_dedup: bool = False,
        req_time: int | None = None,
    ) -> "ReferenceTable":
        self._training_only("apply_gradients")
        keys, grads, now = self._write_arguments(ids, grads, req_time)
        counts = [1] * len(keys)
        if enable_dedup:
            sums: dict[int, np.ndarray] = {}
            occurrences: dict[int, int] = {}
            for key, grad in zip(keys, grads, strict=True):
                sums[key] = sums[key] + grad if key in sums else grad
                occurrences[key] = occurrences.get(key, 0) + 1
            keys, grads, counts = list(sums), list(sums.values()), list(occurrences.values())
        rates = self.config.call_learning_rate_fns(global_step).numpy()
        for key, grad, dropped in zip(keys, grads, self._dropped(keys, counts), strict=True):
            if dropped:
                continue
            row = self.rows.get(key) or self._create(key)
            self._step(row, grad, rates, int(global_step))
            row.time = now
            self.touched.add(key)
        return self

    def reinitialize(self, ids: Any) -> tuple["ReferenceTable", torch.Tensor]:
        status = []
        for key in _ids(ids):
            status.append(int(key in self.rows))
            self._create(key).time = int(time.time())
            self.touched.add(key)
        return self, torch.tensor(status, dtype=torch.int32, device="cpu")

    def evict(self, max_update_time: int) -> int:
        old = [key for key in self.rows if self.stale(key, max_update_time)]
        for key in old:
            del self.rows[key]
        return len(old)

    def clear(self) -> "ReferenceTable":
        self.rows.clear()
        return self

    def restore_dumps(self, records: Iterable[bytes]) -> "ReferenceTable":
        """Replaces all rows with the records of a checkpoint."""
        self.rows.clear()
        for record in records:
            dump = EntryDump.FromString(record)
            weights = np.array(dump.num, F)
            if self.config.table_config.skip_zero_embedding and _is_zero(weights):
                continue
            row = self._create(dump.id)
            self._store(row, weights)
            singles = iter(dump.opt.dump)
            for i, optimizer in enumerate(self.optimizers):
                if optimizer.kind != "moving_average":
                    row.states[i] = optimizer.load(next(singles))
            row.time = dump.last_update_ts_sec
            self.max_update_time = max(self.max_update_time, row.time)
        return self

    # --- inside ----------------------------------------------------------------------------------------------------
    def _training_only(self, what: str) -> None:
        if self.serving:
            raise UnsupportedError(f"table {self.name!r}: {what} is not supported by serving entries")

    def _write_arguments(self, ids: Any, values: Any, req_time: int | None) -> tuple[list[int], Any, int]:
        keys = _ids(ids)
        values = np.asarray(values, F).reshape(-1)
        if values.size != len(keys) * self.dim_size:
            raise ConfigError(
                f"table {self.name!r}: {len(keys)} ids must have {self.dim_size} values each, got {values.size} values"
            )
        now = 0 if req_time is None else int(req_time)
        if not 0 <= now <= MAX_TIME:
            raise ConfigError(f"table {self.name!r}: req_time must be 0..{MAX_TIME}, got {now}")
        self.max_update_time = max(self.max_update_time, now)
        return keys, values.reshape(len(keys), self.dim_size), now

    def _dropped(self, keys: list[int], counts: list[int]) -> list[bool]:
        """Which ids the filter rejects; it checks all ids without a row before the first write."""
        if self.hash_filter is None:
            return [False] * len(keys)
        return [
            key not in self.rows and self.hash_filter.should_be_filtered(key, count)
            for key, count in zip(keys, counts, strict=True)
        ]

    def _create(self, key: int) -> Row:
        row = self.rows[key] = Row(np.zeros(self.dim_size, F))
        if self.serving:
            self._store(row, row.weights)
            return row
        for segment, part, optimizer in zip(self.segments, self.slices, self.optimizers, strict=True):
            row.weights[part] = initial_weights(segment.init_config, segment.dim_size, self.random)
            row.states.append(optimizer.init(segment.dim_size))
        return row

    def _store(self, row: Row, value: np.ndarray) -> None:
        if self.serving:
            row.codes = [encode(s.comp_config, value[part]) for s, part in zip(self.segments, self.slices, strict=True)]
        else:
            row.weights = np.array(value, F)

    def _read(self, row: Row) -> np.ndarray:
        if self.serving:
            pairs = zip(self.segments, row.codes, strict=True)
            return np.concatenate([decode(segment.comp_config, codes) for segment, codes in pairs])
        out = row.weights.copy()
        for segment, part, net in zip(self.segments, self.slices, self.hash_nets, strict=True):
            if net is not None:
                out[part] = net.value(out[part])
            elif segment.comp_config.WhichOneof("type") == "fixed_r8":
                r = segment.comp_config.fixed_r8.r
                out[part] = fixed_r8_values(fixed_r8_codes(out[part], r), r)
        return out

    def _step(self, row: Row, grad: np.ndarray, rates: np.ndarray, global_step: int) -> None:
        weights = row.weights.copy()
        for i, (segment, part) in enumerate(zip(self.segments, self.slices, strict=True)):
            w, g, net = row.weights[part], grad[part], self.hash_nets[i]
            if net is not None:
                net.advance(global_step)
                g = net.gradient(w, g)
            new = self.optimizers[i].step(row.states[i], w, g, rates[i], global_step)
            if segment.opt_config.stochastic_rounding_float16:
                new = stochastic_round_float16(new, self.random.random(len(new), F))
            weights[part] = new
        row.weights = weights


def _ids(ids: Any) -> list[int]:
    return np.asarray(ids, np.int64).reshape(-1).tolist()


def _is_zero(value: np.ndarray) -> bool:
    return bool(np.sum(value * value, dtype=F) < SMALLEST_NORMAL)
