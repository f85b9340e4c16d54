"""Launches of GPU kernels that go past Triton's Python."""

import pytest

from shoal import _gpu


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
