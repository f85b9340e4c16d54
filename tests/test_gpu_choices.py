"""The place where ways of the GPU kernels are chosen."""

import pytest

from shoal import _gpu
from shoal.errors import ConfigError


def test_choices_come_from_the_environment():
    made = _gpu._read("insert=listed direct=1")
    assert (made.insert, made.direct, made.scan) == ("listed", 1, 0)
    assert _gpu._read("") == _gpu.Choices()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour=red", "colour"),
        ("direct=much", "0 or 1, got 'much'"),
        ("direct", "0 or 1, got ''"),
        ("scan=7", "0 or 1, got '7'"),
        ("insert=wrong", "joint or listed, got 'wrong'"),
        ("insert_ids=100", "power of two, got '100'"),
        ("claim_warps=-4", "power of two, got '-4'"),
        ("find_ids=0", "power of two, got '0'"),
    ],
)
def test_a_choice_that_is_none_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        _gpu._read(text)


def test_choices_end_with_the_block_that_made_them():
    before = _gpu.chosen.insert_ids
    with _gpu.choose(insert_ids=32):
        assert _gpu.chosen.insert_ids == 32
    assert _gpu.chosen.insert_ids == before
    with pytest.raises(ConfigError, match="no_such"), _gpu.choose(insert_ids=32, no_such=1):
        pass
    assert _gpu.chosen.insert_ids == before  # all or nothing


def test_only_a_known_launcher_is_passed_by():
    triton = pytest.importorskip("triton")

    class Launcher:
        global_scratch_size = profile_scratch_size = launch_cooperative_grid = launch_pdl = 0
        launch = staticmethod(print)

    known = triton.__version__.startswith("3.6.")
    assert (_gpu.c_launcher(Launcher()) is not None) == known
    Launcher.global_scratch_size = 64
    assert _gpu.c_launcher(Launcher()) is None
    assert _gpu.c_launcher(object()) is None
