"""Serving entries in GPU memory: encoded rows read like those of a CPU table."""

import pytest
import torch
from gpu_tables import MIN, config

from shoal.errors import UnsupportedError
from shoal.table import (
    AdagradOptimizer,
    EntryConfig,
    FixedR8Compressor,
    Fp16Compressor,
    Fp32Compressor,
    HashTable,
    MultiHashTable,
    OneBitCompressor,
    RandomUniformInitializer,
    SlotOccurrenceThresholdConfig,
    ZerosInitializer,
    create_hash_filter,
    reset_registry,
    save_incremental,
)
from shoal.table.checkpoint.tensors import copy_table, table_state

CODECS = [Fp32Compressor(), Fp16Compressor(), FixedR8Compressor(2.0), FixedR8Compressor(0.7), OneBitCompressor()]
MIXED = [(3, CODECS[2]), (2, CODECS[1]), (1, CODECS[4]), (5, CODECS[0]), (1, CODECS[1])]


def serving(segments, **fields):
    made = config([(dim, ZerosInitializer(), AdagradOptimizer(), codec) for dim, codec in segments],
                  [0.1] * len(segments), **fields)  # fmt: skip
    made.table_config.entry_config.entry_type = EntryConfig.SERVING
    return made


def both(segments, filters=(None, None), **fields):
    return [
        HashTable.from_config(serving(segments, **fields), name="s", device=device, hash_filter=f)
        for device, f in zip(("cpu", "cuda"), filters, strict=True)
    ]


def assert_same(cpu, gpu, device, ids=None):
    ids = torch.arange(-5, 60) if ids is None else ids
    assert torch.equal(gpu.lookup(ids.to(device)).cpu(), cpu.lookup(ids))
    assert torch.equal(gpu.contains(ids.to(device)).cpu(), cpu.contains(ids))
    assert gpu.size() == cpu.size()


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # from the interpreter, if a half is infinite
@pytest.mark.parametrize("segments", [[(3, codec)] for codec in CODECS] + [MIXED], ids=str)
def test_rows_are_encoded_as_on_the_cpu(segments, device):
    cpu, gpu = both(segments)
    dim = cpu.dim_size
    torch.manual_seed(0)
    odd = torch.tensor([float("nan"), float("inf"), -7.0, 70000.0, -0.0, 0.3, 1e-40, 2.5, -0.3, 0.0078, 0.0079, -2.0])
    for round_ in range(3):
        ids = torch.randint(0, 40, (30,))
        values = torch.randn(30, dim) * 1.5
        for table, to in ((cpu, "cpu"), (gpu, device)):
            table.assign(ids.to(to), values.to(to), round_)
            table.assign_add(ids.flip(0).to(to) + 10, values.to(to), round_)
        assert_same(cpu, gpu, device)
    for table, to in ((cpu, "cpu"), (gpu, device)):
        table.assign(torch.tensor([MIN, 5, 5, 7, 8], device=to), odd.repeat(5)[: 5 * dim].to(to))
        assert table.reinitialize(torch.tensor([7, 99, 99], device=to))[1].tolist() == [1, 0, 1]
        assert table.erase(torch.tensor([8, 12345], device=to)) == 1
    shown, expected = (
        t.lookup(torch.tensor([MIN, 5, 7, 99], device=d)).cpu() for t, d in ((gpu, device), (cpu, "cpu"))
    )
    torch.testing.assert_close(shown, expected, rtol=0, atol=0, equal_nan=True)
    assert gpu.size() == cpu.size()
    assert gpu.max_update_time == cpu.max_update_time == 2


def test_what_serving_entries_do_not_do(device, tmp_path):
    _, gpu = both([(2, Fp16Compressor())])
    one = torch.tensor([1], device=device)
    for call in (
        lambda: gpu.apply_gradients(one, torch.zeros(1, 2, device=device)),
        lambda: gpu.lookup(one, insert_missing=True),
        lambda: gpu.lookup_entry(one),
        lambda: gpu.save(str(tmp_path / "t")),
        lambda: gpu.save_as_tensor(0, 1, 10, 0),
        lambda: save_incremental(gpu, tmp_path),
    ):
        with pytest.raises(UnsupportedError, match="not supported by serving entries"):
            call()
    assert gpu.lookup(one[:0]).shape == (0, 2)
    assert gpu.assign(one[:0], torch.zeros(0, 2, device=device)).size() == 0


def test_zero_vectors_are_not_stored(device):
    cpu, gpu = both([(2, Fp32Compressor())], skip_zero_embedding=True)
    for table, to in ((cpu, "cpu"), (gpu, device)):
        at = {"device": to}
        table.assign(torch.tensor([1, 2, 3, 3, 4, 4], **at), torch.tensor(
            [[1.0, 1], [0, 1e-30], [0, 0], [1, 0], [1, 0], [0, 0]], **at))  # fmt: skip
        assert table.contains(torch.tensor([1, 2, 3, 4], **at)).tolist() == [True, False, True, False]
        table.assign(torch.tensor([1, 5], **at), torch.zeros(2, 2, **at))
        table.assign_add(torch.tensor([6], **at), torch.zeros(1, 2, **at))
    assert_same(cpu, gpu, device)
    assert gpu.contains(torch.tensor([1, 5, 6], device=device)).tolist() == [False, False, True]


def test_zero_vectors_and_a_filter(device):
    threshold = SlotOccurrenceThresholdConfig(default_occurrence_threshold=1).SerializeToString()
    filters = [create_hash_filter(1000, 7, threshold, name_suffix=f"serving{i}") for i in range(2)]
    cpu, gpu = both([(1, Fp16Compressor())], filters, skip_zero_embedding=True)
    torch.manual_seed(1)
    for _ in range(4):
        ids, values = torch.randint(0, 12, (10,)), torch.randint(0, 2, (10, 1)).float()
        cpu.assign(ids, values)
        gpu.assign(ids.to(device), values.to(device))
        assert_same(cpu, gpu, device)


@pytest.mark.parametrize("skip_zero", [False, True])
def test_a_training_checkpoint_is_restored_without_its_states(skip_zero, device, tmp_path):
    segments = [(dim, RandomUniformInitializer(), AdagradOptimizer(), codec) for dim, codec in MIXED]
    training = HashTable.from_config(config(segments, [0.1] * len(MIXED)), name="s", device="cuda")
    ids = torch.arange(50, device=device)
    values = torch.randn(50, training.dim_size)
    values[::7] = 0
    training.assign(ids, values.to(device), 1234)
    training.save(str(tmp_path / "t"))
    cpu, gpu = both(MIXED, skip_zero_embedding=skip_zero)
    for table in (cpu, gpu):
        table.restore(str(tmp_path / "t"))
    assert_same(cpu, gpu, device)
    assert gpu.max_update_time == 1234
    assert gpu.size() == (42 if skip_zero else 50)
    assert gpu.evict(1234 + 36500 * 86400) == gpu.size() or gpu.size() == 0


def test_a_state_dict_goes_either_way(device):
    cpu, gpu = both(MIXED)
    ids, values = torch.arange(20), torch.randn(20, 12)
    cpu.assign(ids, values, 5)
    gpu.assign(ids.to(device), values.to(device), 5)
    here, there = table_state(cpu), table_state(gpu)
    for name in ("ids", "times"):
        assert sorted(here[name].tolist()) == sorted(there[name].tolist())
    by_id = [state["rows"][state["ids"].argsort()] for state in (here, there)]
    assert torch.equal(*by_id)
    assert_same(cpu, copy_table(gpu), device)


def test_serving_tables_of_equal_rows_share_a_launch(device):
    reset_registry()
    multis = [
        MultiHashTable.from_configs(
            {name: serving([(2, FixedR8Compressor(1.0))]) for name in "abc"}, name_suffix=d, device=d
        )
        for d in ("cpu", "cuda")
    ]
    ids = torch.arange(8)
    for multi, d in zip(multis, ("cpu", device), strict=True):
        multi.assign(
            {"a": (ids.to(d), torch.full((8, 2), 0.3, device=d)), "c": (ids[:3].to(d), torch.ones(3, 2, device=d))}
        )
    cpu, gpu = multis
    assert gpu.tables["a"]._storage is gpu.tables["c"]._storage
    splits = torch.tensor([0, 4, 6, 8])
    assert torch.equal(gpu.raw_lookup((ids.to(device), splits)).cpu(), cpu.raw_lookup((ids, splits)))
    reset_registry()
