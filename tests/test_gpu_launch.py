"""Launches of GPU kernels that bypass Triton's Python code."""

import pytest
import torch

triton = pytest.importorskip("triton")

from shoal import _gpu  # noqa: E402


class Launcher:
    """What Triton makes to launch a kernel; remembers how it was called."""

    global_scratch_size = profile_scratch_size = launch_cooperative_grid = launch_pdl = 0

    def __init__(self):
        self.direct, self.usual = [], []

    def launch(self, *args):
        self.direct.append(args)

    def __call__(self, *args):
        self.usual.append(args)


class Kernel:
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.run = Launcher()

    def launch_metadata(self, grid, stream, *args):
        return ("watched", grid, *args)


def test_only_a_known_launcher_is_passed_by():
    known = triton.__version__.startswith("3.6.")
    launcher = Launcher()
    assert (_gpu.c_launcher(launcher) is not None) == known
    launcher.global_scratch_size = 64
    assert _gpu.c_launcher(launcher) is None
    assert _gpu.c_launcher(object()) is None


def test_a_compiled_kernel_gets_addresses_and_constants_unless_somebody_listens(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: f"stream {device}", raising=False)
    kernel = Kernel()
    compiled = _gpu.Compiled(kernel, (64, True))
    compiled(1, 5, 2, [1234, 7], ["tensor", 7])
    if triton.__version__.startswith("3.6."):
        rest = (0, 0, None, None, "metadata", None, None, None, 1234, 7, 64, True)
        assert kernel.run.direct == [(5, 2, 1, "stream 1", "function", *rest)]
    hook = print
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
    compiled(0, 5, 1, [1234, 7], ["tensor", 7])
    watched = ("watched", (5, 1, 1), "tensor", 7, 64, True)
    (*head, enter, leave), args = kernel.run.usual[-1][:9], kernel.run.usual[-1][9:]
    assert head == [5, 1, 1, "stream 0", "function", "metadata", watched]
    assert (enter, leave, args) == (hook, None, ("tensor", 7, 64, True))
