"""The number of a step: counted on the host, and on the device once a CUDA graph has captured one."""

import types

import pytest
import torch

import shoal
from shoal.errors import UnsupportedError
from shoal.nn.keeper import keeper_of
from shoal.nn.update.steps import next_step, refresh
from shoal.table.protocol import Traits


class Capturable:
    """As much of a group as steps look at; its device is the CPU, so that tensors can be read."""

    traits = Traits(capturable=True)


@pytest.fixture
def capture(monkeypatch):
    state = types.SimpleNamespace(on=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.on)
    return state


def slots(n=2):
    tables = [shoal.HashTable(2) for _ in range(n)]
    return tables, [keeper_of(table) for table in tables]


def test_tables_of_different_age_go_on_from_the_oldest():
    _tables, own = slots(3)
    own[1].global_step = 5
    group = types.SimpleNamespace(traits=Traits())
    assert next_step(group, own[:2]).number == 5
    assert [slot.global_step for slot in own] == [6, 6, 0]
    assert next_step(group, own[2:]).number == 0


def test_a_step_that_was_never_run_cannot_be_captured(capture):
    _tables, own = slots()
    capture.on = True
    with pytest.raises(UnsupportedError, match="once without capture"):
        next_step(Capturable(), own)
    assert own[0].global_step == 0


def test_the_device_counts_once_a_step_was_captured(capture):
    _tables, own = slots()
    group = Capturable()
    for number in range(3):
        assert next_step(group, own).number == number
    capture.on = True
    step = next_step(group, own)  # runs here as a replay would
    assert step.number.tolist() == [3]
    assert step.time_s.shape == (1,)
    capture.on = False
    step = next_step(group, own)
    assert step.number.tolist() == [4]
    assert isinstance(step.time_s, int)
    assert [slot.global_step for slot in own] == [5, 5]
    own[0].global_step = 100  # as a state dict sets it
    assert next_step(group, own).number.tolist() == [100]


def test_the_clock_is_refreshed_in_place(capture):
    _tables, own = slots()
    group = Capturable()
    next_step(group, own)
    capture.on = True
    seconds = next_step(group, own).time_s
    own[0].clock = lambda: 1234.5
    refresh([(group, own[0])])
    assert seconds.tolist() == [1234]
