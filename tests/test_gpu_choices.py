"""The place where ways of the GPU kernels are chosen."""

import pytest

from shoal import _gpu
from shoal.errors import ConfigError


def test_choices_come_from_the_environment():
    made = _gpu._read("insert=listed direct=1")
    assert (made.insert, made.direct, made.scan) == ("listed", 1, 0)
    assert _gpu._read("") == _gpu.Choices()


@pytest.mark.parametrize(("text", "message"), [("colour=red", "colour"), ("direct=much", "much"), ("direct", "number")])
def test_a_choice_that_is_none_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        _gpu._read(text)


def test_choices_end_with_the_block_that_made_them():
    before = _gpu.chosen.scan
    with _gpu.choose(scan=7):
        assert _gpu.chosen.scan == 7
    assert _gpu.chosen.scan == before
    with pytest.raises(ConfigError, match="no_such"), _gpu.choose(no_such=1):
        pass


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
