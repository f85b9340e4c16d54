"""GPU tables that a group calls one by one: caches, filters, rounded and serving rows."""

import sys
from pathlib import Path

import pytest
import torch
from gpu_tables import assert_same_rows, config
from group_batches import ROUNDS

import shoal
from shoal.errors import UnsupportedError
from shoal.table import (
    EntryConfig,
    FixedR8Compressor,
    Fp32Compressor,
    HashTable,
    RandomUniformInitializer,
    SlotOccurrenceThresholdConfig,
    create_hash_filter,
)
from shoal.table.clock import now
from shoal.table.cuda.cache import CachedHashTable
from shoal.table.protocol import SUM, Features, Part, Step, groups_of

sys.path.insert(0, str(Path(__file__).parents[1]))  # to import group_conformance
from group_conformance import CASES, Kind


def _cached(count, **options):
    return [CachedHashTable(shoal.HashTable(4, **options), cache_rows=32768) for _ in range(count)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_group_of_caches(case, device):
    case(Kind(make=_cached, exact=False, device=str(device), rounds=ROUNDS))


def test_a_filter_decides_which_ids_get_a_row(device):
    def filtered(**options):
        thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=2)
        hash_filter = create_hash_filter(1000, 7, thresholds.SerializeToString())
        return shoal.HashTable(4, hash_filter=hash_filter, optimizer=shoal.Sgd(lr=1.0), seed=3, **options)

    table, plain = filtered(device="cuda"), filtered()
    ((group, _),) = groups_of([table])
    features = Features((0,), (SUM,), (0,), 4)
    ids, offsets = torch.tensor([5, 6, 5], device=device), torch.tensor([0, 1, 2, 3], device=device)
    for _ in range(4):
        found = group.find(ids, torch.tensor([3]), features, missing="initial")
        torch.testing.assert_close(group.rows(found, features, missing="initial").cpu(), plain.lookup(ids.cpu()))
        group.update([Part(found, features, torch.ones(3, 4, device=device), offsets)], step=Step())
        plain.apply_gradients(ids.cpu(), torch.ones(3, 4), enable_dedup=True)
    assert table.size() == plain.size() == 2
    assert_same_rows(plain, table)


def test_rounded_rows_are_a_group_by_their_own_calls(device):
    segment = (4, RandomUniformInitializer(), shoal.Adagrad(lr=0.1), FixedR8Compressor(1.0))
    table = HashTable.from_config(config([segment], [0.1]), name="rounded", seed=3, device="cuda")
    plain = HashTable.from_config(config([segment], [0.1]), name="plain", seed=3)
    ((group, _),) = groups_of([table])
    features = Features((0, 0), padding=7)
    ids = torch.tensor([5, 6, 5, 7], device=device)
    found = group.find(ids, torch.tensor([1, 3]), features, missing="initial")
    rows = group.rows(found, features, missing="initial").cpu()
    assert table.size() == 0
    torch.testing.assert_close(rows[:3], plain.lookup(ids[:3].cpu(), insert_missing=True))
    assert not rows[3].any()
    group.update([Part(found, features, torch.ones(4, 4, device=device))], step=Step(3, lr_scale=(0.5,)))
    plain._apply(ids[:3].cpu(), torch.ones(3, 4), [0.05], 3, True, 0)
    torch.testing.assert_close(table.lookup(ids[:3]).cpu(), plain.lookup(ids[:3].cpu()))


def test_the_time_of_the_clock_does_not_move_a_row_back(device):
    segment = (4, RandomUniformInitializer(), shoal.Sgd(lr=0.1), FixedR8Compressor(1.0))
    table = HashTable.from_config(config([segment], [0.1]), name="rounded", device="cuda", clocked=True)
    ((group, _),) = groups_of([table])
    ids, later = torch.tensor([5, 6], device=device), int(now()) + 3600
    table.assign(ids[:1], torch.zeros(1, 4, device=device), later)
    found = group.find(ids, torch.tensor([2]), Features(), missing="initial")
    group.update([Part(found, Features(), torch.ones(2, 4, device=device))], step=Step(time_s=now()))
    times = table.fetch_times(ids.cpu()).tolist()
    assert times[0] == later
    assert times[1] <= now()


def test_a_serving_table_is_read_and_not_updated(device):
    made = config([(4, RandomUniformInitializer(), shoal.Sgd(lr=0.1), Fp32Compressor())], [0.1])
    made.table_config.entry_config.entry_type = EntryConfig.SERVING
    table = HashTable.from_config(made, name="served", device="cuda")
    table.assign(torch.arange(3, device=device), torch.ones(3, 4, device=device))
    ((group, _),) = groups_of([table])
    assert not group.traits.trains
    found = group.find(torch.tensor([2, 5], device=device), torch.tensor([2]), Features(), missing="initial")
    assert group.rows(found, Features(), missing="initial").tolist() == [[1.0] * 4, [0.0] * 4]
    with pytest.raises(UnsupportedError, match="serving"):
        group.update([Part(found, Features(), torch.ones(2, 4, device=device))], step=Step())
