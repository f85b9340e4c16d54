"""The quick launches against Triton's own: the same compiled kernel, grid and arguments, in the same order.

Kernels are compiled for a GPU that is not present, and a launcher that only records its calls replaces the GPU's; run
by `tests/test_gpu_compile.py`.
"""

from types import SimpleNamespace

import offline
import torch
import triton

import shoal
from shoal.ops.cuda import launch as ops_launch
from shoal.ops.cuda import reduce, split, unique
from shoal.table.cuda import launch, stored

NOTES = []
DIRECT = []


class Notes:
    """A launcher."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = 4, 5

    def __init__(self, source, metadata):
        self.name = source.fn.fn.__name__

    def launch(self, x, y, z, stream, function, cooperative, pdl, scratch, profile, *arguments):
        """What Triton's own calls."""
        assert (cooperative, pdl, scratch, profile) == (4, 5, None, None)
        DIRECT.append(self.name)
        self(x, y, z, stream, function, *arguments)

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        heard = [bool(getattr(hook, "calls", hook)) for hook in (enter, leave)]
        NOTES.append((self, (x, y, z), stream, function, metadata, heard, plain))


offline.Hopper.launcher_cls = Notes
offline.Hopper.utils = SimpleNamespace(
    load_binary=lambda *_: (1, 2, 32, 0, 1024), get_device_properties=lambda _: {"max_shared_mem": 232_448}
)
torch._C._cuda_getDevice = lambda: 0
torch._C._cuda_getCurrentRawStream = lambda device: 0
stored.as_device = lambda device, name: torch.device("cpu")
torch.empty = torch.zeros  # nothing is computed, so values that are read back must be initialised
COMPARED = {"first": 0, "again": 0}


def compared(quick, slow):
    """A call both ways."""
    before = len(NOTES)
    quick()
    slow()
    mine, theirs = NOTES[before:]
    assert mine == theirs, (mine, theirs)
    return mine[0]


def watch_bound(call=launch.Bound.__call__):
    def both(bound, programs, *arguments):
        known = dict(bound._made)
        compared(
            lambda: call(bound, programs, *arguments),
            lambda: bound._fn[(programs,)](*arguments, **bound._constants, **bound._options),
        )
        COMPARED["again" if known == bound._made else "first"] += 1

    launch.Bound.__call__ = both


def watch_fast(call=ops_launch.Fast._launch):
    def both(kernel, grid, *arguments, **constants):
        known = len(kernel._made)
        compared(lambda: call(kernel, grid, *arguments, **constants), lambda: kernel.jit[grid](*arguments, **constants))
        COMPARED["again" if known == len(kernel._made) else "first"] += 1

    ops_launch.Fast._launch = both


watch_bound()
watch_fast()
ops_launch.Kernel.__call__ = lambda *_, **__: None  # takes only numbers, and has only one launch path


def of_tables():
    for dim, optimizer in ((6, "adam"), (1, "sgd")):
        table = shoal.HashTable(dim, optimizer=optimizer, device="cuda", on_bad_gradient="skip")
        for n in (64, 63, 1, 64, 0, 3):
            ids, grads = torch.arange(n), torch.ones(n, dim)
            table.lookup(ids)
            table.apply_gradients(ids, grads, 1 << 40, enable_dedup=True, req_time=n)
            table.apply_gradients(ids, grads, 1, distinct=True)
            table.lookup(torch.arange(n + 1)[1:], insert_missing=True)  # its address is at an offset of 8 bytes


def of_ops():
    for n, dim in ((64, 16), (63, 5), (1, 1), (64, 16), (48, 32)):
        rows, index, splits = torch.ones(n, dim), torch.zeros(n, dtype=torch.int64), torch.tensor([0, n])
        for how in (0, 1, 2):
            reduce.reduce_by_index(index, rows, n, how)
        reduce.reduce_by_index(torch.zeros(2 * n, dtype=torch.int64)[::2], rows, 1, 0)
        reduce.first_n(rows, splits, 2)
        split.ragged_split_by_indices(index, index, splits, 20)
        unique.fill_with_offset_map(
            torch.arange(n), splits, torch.ones(n), torch.arange(n + 1), torch.arange(n), torch.zeros(n), [1]
        )


of_tables()
of_ops()
made = len(DIRECT)
with triton.knobs.runtime.scope():
    triton.knobs.runtime.launch_enter_hook.add(lambda _: None)  # a hook is set, as by a profiler
    of_tables()
assert len(DIRECT) == made
assert len(set(DIRECT)) > 10, set(DIRECT)
assert COMPARED["first"] > 20, COMPARED
assert COMPARED["again"] > 60, COMPARED
print(COMPARED)
