"""Tests on a real device: no waiting, streams, captured graphs that survive growth; compiled steps on any device."""

import warnings

import pytest
import torch
from gpu_tables import pair

import shoal
from shoal.errors import CapacityError, ConfigError, UnsupportedError
from shoal.table import HashTable, TouchedKeySet, save_incremental


def test_a_compiled_step_keeps_reads_and_writes_in_order(device):
    table = shoal.HashTable(3, optimizer=shoal.Sgd(lr=1.0), initializer="zeros", device="cuda")

    def step(ids, scale):
        before = table.lookup(ids)
        table.apply_gradients(ids, torch.ones(4, 3, device=ids.device) * scale, 1, enable_dedup=True)
        after = table.lookup(ids)
        return after - before

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    ids = torch.tensor([5, 6, 7, 8], device=device)
    for scale in (1.0, 2.0):
        change = compiled(ids, torch.tensor(scale, device=device))
        assert torch.equal(change, torch.full((4, 3), -scale, device=device))
    assert table.size() == 4


@pytest.mark.gpu
def test_the_hot_path_does_not_wait_for_the_device():
    table = shoal.HashTable(16, optimizer="adagrad", device="cuda").reserve(400_000)
    ids = torch.randint(0, 1 << 60, (50_000,), device="cuda")
    grads = torch.randn(50_000, 16, device="cuda")
    table.apply_gradients(ids, grads, enable_dedup=True)  # compiles
    table.apply_gradients(ids, grads)
    table.apply_gradients(ids, grads, distinct=True)
    table.lookup(ids, insert_missing=True)
    table.lookup(ids)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for i in range(3):
            table.lookup(ids)
            table.lookup(ids + i, insert_missing=True)
            table.apply_gradients(ids + 10 + i, grads, i, enable_dedup=True)
            table.apply_gradients(ids, grads, i)
            table.apply_gradients(ids, grads, i, distinct=True)
            table.assign(ids, grads)
            table.contains(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert table.size() == ids.numel() * 6


@pytest.mark.gpu
def test_calls_run_on_the_current_stream():
    table = shoal.HashTable(4, optimizer="sgd", initializer="zeros", device="cuda").reserve(100_000)
    ids = torch.arange(50_000, device="cuda")
    values = torch.zeros(50_000, 4, device="cuda")
    table.assign(ids, values)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        values += 1  # after the call
        table.assign(ids, values)
        rows = table.lookup(ids)
    torch.cuda.current_stream().wait_stream(side)
    assert bool((rows == 1).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dedup", [False, True])
def test_a_captured_step_goes_on_after_the_table_has_grown(dedup):
    cpu, gpu = pair(8, shoal.Adagrad(lr=0.1))
    gpu.reserve(5000)
    ids, grads = torch.zeros(2000, dtype=torch.int64, device="cuda"), torch.zeros(2000, 8, device="cuda")

    def step():
        rows = gpu.lookup(ids)
        gpu.apply_gradients(ids, grads, 1, enable_dedup=dedup)
        return rows

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    cpu.apply_gradients(ids.cpu(), grads.cpu(), 1, enable_dedup=dedup)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = step()
    torch.manual_seed(0)
    for round_ in range(6):
        batch, values = torch.randint(0, 30_000, (2000,)), torch.randn(2000, 8)
        gpu.reserve(gpu.size() + 2000)
        if round_ == 3:
            gpu.reserve(300_000)  # grows index and arena in place
        ids.copy_(batch)
        grads.copy_(values)
        expected = cpu.lookup(batch)
        graph.replay()
        torch.testing.assert_close(rows.cpu(), expected, rtol=1e-4, atol=1e-5)
        cpu.apply_gradients(batch, values, 1, enable_dedup=dedup)
    assert gpu.size() == cpu.size()


@pytest.mark.gpu
def test_a_graph_that_outruns_its_reserve_is_told_of():
    table = shoal.HashTable(8, optimizer="sgd", device="cuda", on_bad_gradient="ignore")
    ids = torch.arange(60_000, device="cuda")
    table.lookup(ids[:10], insert_missing=True)
    table.lookup(ids.clone())
    table.apply_gradients(ids[:0], torch.zeros(0, 8, device="cuda"))
    room = table._storage.arena.room
    graph = torch.cuda.CUDAGraph()
    batch = torch.zeros(60_000, dtype=torch.int64, device="cuda")
    table.lookup(batch, insert_missing=True)
    torch.cuda.synchronize()
    table._storage.counts.set(3, 100)  # as if there were room for this many rows
    with torch.cuda.graph(graph):
        table.lookup(batch, insert_missing=True)
    batch.copy_(ids + 1_000_000)
    graph.replay()
    with pytest.raises(CapacityError, match="captured graph"):
        table.size()
    assert room > 100


@pytest.mark.gpu
def test_a_real_full_device_is_refused_and_harms_nothing():
    table = shoal.HashTable(64, optimizer="adam", device="cuda", name="large")
    ids = torch.arange(1000, device="cuda")
    table.assign(ids, torch.ones(1000, 64, device="cuda"))
    text = r"'large': no room for .* must have at most .* MiB, got .* MiB; nothing was changed"
    with pytest.raises(CapacityError, match=text):
        table.reserve(900_000_000)
    assert table.size() == 1000
    assert bool((table.lookup(ids) == 1).all())
    table.assign(ids + 5000, torch.ones(1000, 64, device="cuda"))
    assert table.size() == 2000


@pytest.mark.gpu
def test_a_new_id_in_every_block_at_once_loses_no_gradient():
    """Programs that find it in its bucket before it has a row wait for the row, also when they know all other ids."""
    table = shoal.HashTable(
        1, optimizer=shoal.Sgd(lr=1.0), initializer="zeros", device="cuda", on_bad_gradient="ignore"
    )
    known = torch.randint(0, 1 << 60, (200_000,), device="cuda")
    table.reserve(2_000_000).assign(known, torch.zeros(200_000, 1, device="cuda"))
    grads = torch.ones(200_000, 1, device="cuda")
    for round_ in range(20):
        ids = known.clone()
        new = (1 << 61) + round_
        ids[::64] = new
        table.apply_gradients(ids, grads, enable_dedup=True)
        assert table.lookup(torch.tensor([new], device="cuda")).item() == -ids[::64].numel()


@pytest.mark.gpu
def test_a_sync_client_makes_no_write_wait():
    table = shoal.HashTable(4, optimizer="sgd", device="cuda").reserve(100_000)
    keys = TouchedKeySet(1 << 20)
    table._set_touched(keys, 3)
    ids, grads = torch.arange(1000, device="cuda"), torch.randn(1000, 4, device="cuda")
    table.apply_gradients(ids, grads, enable_dedup=True)  # compiles
    keys.steal()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        for i in range(5):
            table.apply_gradients(ids + 100 * i, grads, enable_dedup=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sorted(keys.steal_pairs()[0].tolist()) == list(range(1400))
    assert len(keys) == 0


@pytest.mark.gpu
def test_every_bad_gradient_is_told_of():
    table = shoal.HashTable(2, optimizer="sgd", device="cuda")
    ids, bad = torch.arange(3, device="cuda"), torch.full((3, 2), float("nan"), device="cuda")
    good = torch.ones(3, 2, device="cuda")
    shoal.HashTable(2, optimizer="sgd", device="cuda").apply_gradients(ids, good)  # compiles
    torch.cuda._sleep(1_000_000_000)  # half a second: the host is far ahead
    table.apply_gradients(ids, bad)
    table.apply_gradients(ids, good)
    with pytest.raises(ConfigError, match="nothing was applied"):
        table.as_op()
    assert table.size() == 3


@pytest.mark.gpu
@pytest.mark.parametrize("tracked", [False, True])
def test_increments_and_captured_graphs(tracked, tmp_path):
    table = shoal.HashTable(2, optimizer="sgd", device="cuda", name="t", on_bad_gradient="ignore").reserve(1000)
    ids, grads = torch.arange(8, device="cuda"), torch.ones(8, 2, device="cuda")
    table.apply_gradients(ids, grads)
    if tracked:
        save_incremental(table, tmp_path)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        table.apply_gradients(ids, grads)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        table.apply_gradients(ids, grads)
    save_incremental(table, tmp_path)
    ids.copy_(torch.arange(4, 12))
    graph.replay()
    delta = save_incremental(table, tmp_path)
    assert (delta.kind, delta.rows) == (("delta", 8) if tracked else ("full", 12))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_table_works_on_its_own_device_whatever_the_current_one_is():
    cpu, _ = pair(3, shoal.Adagrad(lr=0.1))
    other = shoal.HashTable(3, optimizer=shoal.Adagrad(lr=0.1), seed=7, device="cuda:1")
    ids, grads = torch.arange(100), torch.randn(100, 3)
    cpu.apply_gradients(ids, grads)
    other.apply_gradients(ids.to("cuda:1"), grads.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(other.lookup(ids.to("cuda:1")).cpu(), cpu.lookup(ids))


@pytest.mark.gpu
def test_ids_that_replays_brought_count_when_there_must_be_room():
    table = shoal.HashTable(4, optimizer="sgd", device="cuda", on_bad_gradient="ignore").reserve(4000)
    ids = torch.arange(1000, device="cuda")
    table.lookup(ids, insert_missing=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.lookup(ids, insert_missing=True)
    room = table._storage.arena.room
    for round_ in range(1, 4):
        ids.copy_(torch.arange(1000) + 1000 * round_)
        graph.replay()
    more = torch.arange(room - 2000, device="cuda") + (1 << 40)  # fits next to the 1000 ids that the host has counted
    table.lookup(more, insert_missing=True)
    assert table.size() == 4000 + more.numel()


@pytest.mark.gpu
def test_a_captured_step_of_several_tables_outlives_the_plans_and_rates_that_it_was_made_with():
    from gpu_tables import config

    from shoal.table import MultiHashTable, SgdOptimizer, ZerosInitializer, reset_registry

    reset_registry()
    segment = [(2, ZerosInitializer(), SgdOptimizer())]
    many = MultiHashTable.from_configs({"a": config(segment, [1.0]), "b": config(segment, [0.5])}, device="cuda")
    for table in many.tables.values():
        table.on_bad_gradient = "ignore"
        table.reserve(10_000)
    ids, grads = torch.arange(64, device="cuda"), torch.ones(128, device="cuda")

    def step(sizes):
        many.fused_apply_gradient(ids, None, torch.tensor(sizes), grads, None, None, 1, 0, 1, True)

    step([32, 32])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step([32, 32])
    for i in range(64):
        many.tables["a"]._storage.keep(("other", i), lambda: torch.full((2,), 9.0, device="cuda"))
        step([i, 64 - i])
    before = many.fused_lookup(ids, torch.tensor([32, 32]), 1)[0].clone()
    graph.replay()
    change = many.fused_lookup(ids, torch.tensor([32, 32]), 1)[0] - before
    torch.testing.assert_close(change.cpu(), torch.tensor([-1.0] * 64 + [-0.5] * 64))


@pytest.mark.gpu
def test_the_first_write_with_a_time_is_not_captured():
    config = shoal.HashTable(4, optimizer="sgd").config
    table = HashTable.from_config(config, name="configured", device="cuda").reserve(100)  # without a clock
    ids = torch.arange(10, device="cuda")
    table.lookup(ids, insert_missing=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    def step():
        ids.add_(0)  # avoids a warning about an empty graph
        table.lookup(ids, insert_missing=True, req_time=5)

    with pytest.raises(UnsupportedError, match="run the step once"), torch.cuda.graph(graph):
        step()


def test_tables_do_not_mind_another_default_device(tmp_path, device):
    other = "meta" if device.type == "cpu" else "cuda"  # a device that native code cannot write to
    ids, grads = torch.arange(20, device=device), torch.ones(20, 2, device=device)
    with torch.device(other):
        table = shoal.HashTable(2, optimizer="sgd", initializer="zeros", device="cuda", name="t", expire_after="1d")
        table.apply_gradients(ids, grads, enable_dedup=True, req_time=5)
        table.save(str(tmp_path / "t"))
        assert table.evict(10) == 0
        table.clear()
        table.restore(str(tmp_path / "t"))
        assert len(table.lookup_entry(ids[:3])) == 3
        table.as_op()
    assert table.size() == 20
