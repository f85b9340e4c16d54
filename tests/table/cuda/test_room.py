"""The room of groups: whoever else writes to the tables, every id finds its row and nothing is counted twice."""

import threading

import pytest
import torch
from gpu_tables import assert_same_rows, pair

import shoal
from shoal.table.protocol import Features, Part, Step, group_of

DIM = 4


def step(tables, ids, device):
    """One update of every table with the same ids."""
    group = group_of(tables)
    features = Features(tables=tuple(range(len(tables))))
    every = ids.repeat(len(tables)).to(device)
    counts = torch.full((len(tables),), ids.numel())
    found = group.find(every, counts, features, missing="zeros")
    grad = torch.ones(every.numel(), DIM, device=device)
    group.update([Part(found, features, grad)], step=Step(0, 100))
    return group


def pairs(count):
    made = [pair(DIM, shoal.Sgd(lr=1.0), initializer="zeros") for _ in range(count)]
    return [one for one, _ in made], [two for _, two in made]


def test_updates_make_room_beside_other_writes(device):
    cpu, gpu = pairs(3)
    for turn in range(5):
        ids = torch.arange(turn * 60, turn * 60 + 90)
        for tables, on in ((cpu, "cpu"), (gpu, device)):
            step(tables, ids, on)
            step(tables[1:], ids + 1000, on)  # another group with some of the tables
            own = torch.arange(5000 + 100 * turn, 5080 + 100 * turn)
            tables[2].assign(own.to(on), torch.ones(own.numel(), DIM, device=on), req_time=100)
            if turn == 2:
                tables[0].clear()
                tables[1].erase(ids[:30].to(on))
    for one, two in zip(cpu, gpu, strict=True):
        assert one.size() == two.size()
        assert_same_rows(one, two)


def test_rows_that_are_restored_leave_the_room_that_they_have(device, tmp_path):
    cpu, gpu = pairs(2)
    for tables, on in ((cpu, "cpu"), (gpu, device)):
        step(tables, torch.arange(300), on)
        path = str(tmp_path / f"{tables[0].name}")
        tables[0].save(path)
        step(tables, torch.arange(200, 600), on)
        tables[0].restore(path)
        step(tables, torch.arange(250, 900), on)
    for one, two in zip(cpu, gpu, strict=True):
        assert one.size() == two.size()
        assert_same_rows(one, two)


def test_tables_of_a_group_take_turns_together(device):
    _, gpu = pairs(3)
    first = step(gpu[:2], torch.arange(5), device)
    assert gpu[0]._storage.turn is gpu[1]._storage.turn
    assert gpu[0]._storage.turn is not gpu[2]._storage.turn
    step(gpu[1:], torch.arange(5), device)
    assert len({id(table._storage.turn) for table in gpu}) == 1
    assert first is group_of(gpu[:2])


def test_threads_of_several_groups(device):
    _, gpu = pairs(3)
    errors = []

    def run(tables, start):
        try:
            for turn in range(3):
                step(tables, torch.arange(start + turn * 20, start + turn * 20 + 30), device)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(tables, start))
        for tables, start in ((gpu, 0), (gpu[:2], 1000), (gpu[1:], 2000), (gpu[2:], 3000))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not errors
    assert [table.size() for table in gpu] == [140, 210, 210]


@pytest.mark.gpu
def test_a_step_whose_counts_the_device_knows_takes_what_is_there(device):
    _, gpu = pairs(2)
    group = group_of(gpu)
    features = Features(tables=(0, 1), combiners=(0, 0), columns=(0, DIM), width=2 * DIM)
    offsets = torch.tensor([0, 1, 3, 4, 6], device=device)
    for turn in range(200):
        ids = torch.arange(turn * 6, turn * 6 + 6, device=device)
        found = group.find(ids, offsets, features, missing="zeros")
        grad = torch.ones(2, 2 * DIM, device=device)
        group.update([Part(found, features, grad, offsets)], step=Step(0, 100))
    assert [table.size() for table in gpu] == [600, 600]
