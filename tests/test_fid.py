"""Feature ids: plain values and tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.fid import make_v1, make_v2, slot_v1, slot_v2, v1_to_v2


def test_examples_of_the_specification():
    assert make_v1(5, 77) == 90071992547409997
    assert make_v2(5, 77) == 1407374883553357
    assert make_v1(5, 2**50 + 3) == 91197892454252547
    assert v1_to_v2(91197892454252547) == 1407374883553283 == make_v2(5, 3)
    assert make_v1(600, 1) == -7638104968020361215


@pytest.mark.parametrize(("make", "slots"), [(make_v1, 1024), (make_v2, 32768)])
def test_a_slot_out_of_range_is_refused(make, slots):
    for slot in (-1, slots):
        with pytest.raises(ValueError, match=str(slot)):
            make(slot, 1)
    assert make(slots - 1, 0) is not None


@given(st.integers(0, 1023), st.integers(0, 2**64 - 1))
def test_a_v1_fid_gives_its_parts_back(slot, signature):
    fid = make_v1(slot, signature)
    assert -(2**63) <= fid < 2**63
    assert slot_v1(fid) == slot
    assert fid & (2**54 - 1) == signature & (2**54 - 1)
    assert v1_to_v2(fid) == make_v2(slot, signature & (2**48 - 1))
    assert slot_v1(torch.tensor([fid])).tolist() == [slot]
    assert v1_to_v2(torch.tensor([fid])).tolist() == [v1_to_v2(fid)]


@given(st.integers(0, 32767), st.integers(0, 2**64 - 1))
def test_a_v2_fid_is_never_negative_and_gives_its_slot_back(slot, signature):
    fid = make_v2(slot, signature)
    assert 0 <= fid < 2**63
    assert slot_v2(fid) == slot
    assert slot_v2(torch.tensor([fid])).tolist() == [slot]


def test_an_unsigned_fid_is_read_like_its_signed_twin():
    fid = make_v1(600, 1)
    assert slot_v1(fid + 2**64) == slot_v1(fid) == 600
    assert v1_to_v2(fid + 2**64) == v1_to_v2(fid)


def test_a_tensor_of_another_dtype_is_refused():
    with pytest.raises(ValueError, match="int32"):
        slot_v1(torch.tensor([1], dtype=torch.int32))


def test_numpy_integers_of_any_width_give_the_same_fid():
    for kind in (np.int16, np.int32, np.uint16, np.int64, np.uint64):
        assert make_v1(kind(600), kind(77)) == make_v1(600, 77)
        assert make_v2(kind(5), kind(77)) == make_v2(5, 77)
        assert slot_v1(kind(77)) == slot_v2(kind(77)) == 0
        assert v1_to_v2(kind(77)) == 77


def test_a_signature_tensor_of_another_dtype_is_refused():
    for make in (make_v1, make_v2):
        with pytest.raises(ValueError, match="a signature tensor must be int64"):
            make(600, torch.tensor([77], dtype=torch.int32))
