"""Admission filters, which decide whether a new id gets a row."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal import _core
from shoal.errors import ConfigError
from shoal.table.config.messages import SlotOccurrenceThresholdConfig
from shoal.table.config.validate import validate_slot_occurrence_threshold_config


class HashFilter(_core.FilterBlock):
    """A block of approximate counts up to 15: 16-bit cells of a 12-bit signature and a 4-bit count.

    Ids that share a cell's signature share its count. The block has ``int(capacity * fill_rate)`` home positions and
    searches ``max_step`` cells from an id's home position. Not thread-safe. Memory is allocated at the first `add`.
    """

    def __init__(self, capacity: int, fill_rate: float = 1.5, max_step: int = 64) -> None:
        if not 1 <= max_step <= 64:
            raise ConfigError(f"HashFilter: max_step must be 1..64, got {max_step}")
        super().__init__(int(capacity), float(fill_rate))
        self.fill_rate = float(fill_rate)
        self.max_step = int(max_step)

    def add(self, id: int, count: int = 1) -> int:
        """Adds ``count`` occurrences; returns the previous count, 0 for a new id, 15 if there is no room."""
        return self._add(_int64(id), _count(count), self.max_step)

    def get(self, id: int) -> int:
        """The count: 0 for an id never seen, 15 if there is no room."""
        return self._get(_int64(id), self.max_step)

    def clear(self) -> None:
        """Removes all counts and frees the memory."""
        self._clear()

    @property
    def capacity(self) -> int:
        return self._capacity()

    @property
    def total_size(self) -> int:
        """The number of home positions."""
        return self._total()

    @property
    def num_elements(self) -> int:
        return self._elements()

    @property
    def failure_count(self) -> int:
        """How often there was no room."""
        return self._failures()

    @property
    def full(self) -> bool:
        return self._full()


def _should_be_filtered(self: Any, id: int, count: int = 1, threshold: int | None = None, table: Any = None) -> bool:
    """Counts ``count`` occurrences of an id without a row; returns whether a write for them is dropped.

    ``threshold`` defaults to that of the id's slot; ``table`` is used by the probabilistic filter only.
    """
    id = _int64(id)
    if threshold is None:
        threshold = self._threshold(id)
    return self._should_be_filtered(id, _count(count), max(0, int(threshold)))


_native = property(lambda self: self, doc="The object that the native table holds.")


class DummyHashFilter(_core.NoFilter):
    """A filter that admits every id."""

    should_be_filtered = _should_be_filtered
    native = _native

    def __init__(self, name: str = "DummyHashFilter") -> None:
        super().__init__()
        self.name = name


@dataclass
class FilterBlockState:
    """One block of a sliding filter, in the form that files store."""

    failure_count: int
    total_size: int
    num_elements: int
    fill_rate: float
    cells: np.ndarray
    """uint16 ``[total_size + 64]``."""


class SlidingHashFilter(_core.SlidingFilter):
    """Admission by count: it remembers about ``capacity`` ids and forgets the oldest, one block at a time.

    The counts are in a ring of ``S = max(split_num, 5)`` blocks. An id with threshold t is dropped t times and then
    admitted. Thread-safe. Memory: ``2.4 * capacity * S / (S - 1)`` bytes when every block is in use, allocated block by
    block.
    """

    max_forward_step = 2
    max_step = 16
    should_be_filtered = _should_be_filtered
    native = _native

    def __init__(
        self, capacity: int, split_num: int, config: bytes | SlotOccurrenceThresholdConfig = b"", name: str = ""
    ) -> None:
        default, of_slot = _thresholds(config)
        super().__init__(int(capacity), int(split_num), default, of_slot)
        self.name = name

    def add(self, id: int, count: int = 1) -> int:
        """Adds ``count`` occurrences; returns the previous count, 15 if there is no room."""
        return self._add(_int64(id), _count(count))

    def get(self, id: int) -> int:
        """The count; 15 if there is no room."""
        return self._get(_int64(id))

    @property
    def capacity(self) -> int:
        return self._capacity()

    @property
    def split_num(self) -> int:
        """The number of blocks in the ring."""
        return self._split_num()

    @property
    def max_backward_step(self) -> int:
        return self._split_num() - 2

    @property
    def num_elements(self) -> int:
        return self._elements()

    @property
    def head(self) -> int:
        return self._meta()[0]

    @property
    def head_increment(self) -> int:
        return self._meta()[1]

    @property
    def failure_count(self) -> int:
        """How often there was no room."""
        return self._meta()[2]

    def get_block(self, block: int) -> FilterBlockState:
        """A copy of one block."""
        total, elements, failures, fill_rate = self._block_meta(block)
        cells = np.zeros(total + 64, np.uint16)
        self._read_block(block, 0, len(cells), cells.ctypes.data)
        return FilterBlockState(failures, total, elements, fill_rate, cells)

    def set_block(self, block: int, state: FilterBlockState) -> None:
        """Replaces one block; its size can differ from that of the filter's other blocks."""
        cells = np.ascontiguousarray(state.cells, np.uint16)
        self._set_block(
            block,
            state.total_size,
            state.num_elements,
            state.failure_count,
            state.fill_rate,
            cells.ctypes.data,
            cells.size,
        )

    def set_head(self, head: int, head_increment: int, failure_count: int) -> None:
        """Sets the block that is written to, how often it has advanced, and how often there was no room."""
        self._set_meta(head, head_increment, failure_count)


class ProbabilisticFilter(_core.ProbabilisticFilter):
    """Random admission with probability ``min(1, count / threshold)``; it stores no counts.

    With ``equal_probability``, the probability is ``1 - 0.05 ** (count / threshold)``, which admits 95 % of ids within
    ``threshold`` single occurrences.
    """

    native = _native

    def __init__(
        self,
        equal_probability: bool = False,
        config: bytes | SlotOccurrenceThresholdConfig = b"",
        name: str = "",
        seed: int | None = None,
    ) -> None:
        default, of_slot = _thresholds(config)
        drawn = int(np.random.default_rng(seed).integers(1 << 63))
        super().__init__(bool(equal_probability), default, of_slot, drawn)
        self.equal_probability = bool(equal_probability)
        self.name = name

    def should_be_filtered(self, id: int, count: int = 1, threshold: int | None = None, table: Any = None) -> bool:
        """Whether a write is dropped; always False without a ``table``, or for an id that has a row in it."""
        if table is None:
            return False
        asked = torch.tensor([_int64(id)], device=getattr(table, "device", "cpu"))
        if bool(table.contains(asked)[0]):
            return False
        return _should_be_filtered(self, id, count, threshold)


def create_hash_filter(
    capacity: int, split_num: int, config: bytes | SlotOccurrenceThresholdConfig = b"", name_suffix: str = ""
) -> SlidingHashFilter:
    """A sliding filter; ``config`` is a (serialized) `SlotOccurrenceThresholdConfig`."""
    return SlidingHashFilter(capacity, split_num, config, name="MonolithHashFilter" + name_suffix)


def create_probabilistic_filter(
    equal_probability: bool, config: bytes | SlotOccurrenceThresholdConfig = b"", name_suffix: str = ""
) -> ProbabilisticFilter:
    """A probabilistic filter; ``config`` is a (serialized) `SlotOccurrenceThresholdConfig`."""
    return ProbabilisticFilter(equal_probability, config, name="MonolithProbabilisticFilter" + name_suffix)


def create_dummy_hash_filter(name_suffix: str = "0") -> DummyHashFilter:
    """A filter that admits everything."""
    return DummyHashFilter("DummyHashFilter" + name_suffix)


def create_hash_filters(
    ps_num: int,
    enable_hash_filter: bool,
    config: bytes | SlotOccurrenceThresholdConfig = b"",
    filter_capacity: int = 300000000,
    filter_split_num: int = 7,
    filter_equal_probability: bool = False,
    filter_type: str = "sliding_hash_filter",
) -> list[Any]:
    """One filter per parameter server, at least one; they admit every id if ``enable_hash_filter`` is off.

    ``filter_type`` is ``sliding_hash_filter``, ``probabilistic_filter`` or ``no_filter``. With the defaults a sliding
    filter grows to 840 MB as it fills.
    """
    suffixes = [f"_{i}" for i in range(ps_num)] if ps_num > 0 else [""]
    if not enable_hash_filter or filter_type == "no_filter":
        return [create_dummy_hash_filter(suffix or "0") for suffix in suffixes]
    if filter_type == "sliding_hash_filter":
        return [create_hash_filter(filter_capacity, filter_split_num, config, suffix) for suffix in suffixes]
    if filter_type == "probabilistic_filter":
        return [create_probabilistic_filter(filter_equal_probability, config, suffix) for suffix in suffixes]
    known = "sliding_hash_filter, probabilistic_filter or no_filter"
    raise ConfigError(f"filter_type must be {known}, got {filter_type!r}")


def _thresholds(config: bytes | SlotOccurrenceThresholdConfig) -> tuple[int, list[tuple[int, int]]]:
    if isinstance(config, str):
        config = config.encode("latin-1")
    if not isinstance(config, SlotOccurrenceThresholdConfig):
        try:
            config = SlotOccurrenceThresholdConfig.FromString(bytes(config))
        except Exception as error:
            raise ConfigError(
                f"config must be a serialized SlotOccurrenceThresholdConfig, got {config!r:.80}"
            ) from error
    validate_slot_occurrence_threshold_config(config)
    overrides = [(item.slot, item.occurrence_threshold) for item in config.slot_occurrence_thresholds]
    return config.default_occurrence_threshold, overrides


def _int64(id: int) -> int:
    id = int(id)
    if not -(1 << 63) <= id < 1 << 63:
        raise ConfigError(f"an id must be an int64, got {id}")
    return id


def _count(count: int) -> int:
    count = int(count)
    if count < 0:
        raise ConfigError(f"a count of occurrences must be >= 0, got {count}")
    return min(count, (1 << 32) - 1)
