"""The order of tests over several workers: the files that take longest start first, and long files are split."""

from collections import OrderedDict

from xdist.scheduler import LoadFileScheduling

APART = ("tests/table/test_interpreted.py", "tests/ops/test_cuda_kernels.py", "tests/test_gpu_compile.py")
"""Files whose tests share nothing, so that any worker may run each of them."""

FIRST = (
    "tests/test_gpu_compile.py", "tests/fuzz/test_fuzz.py", "tests/table/test_interpreted.py", "tests/up/test_up.py",
    "tests/train/loop/test_shared_servers.py", "tests/train/loop/test_best.py", "tests/observe/test_pages.py",
    "tests/observe/test_ports.py", "tests/nn/test_dcp.py", "tests/serving/server/test_compiled_nets.py",
    "tests/serving/client/test_client.py", "tests/serving/server/test_device.py",
    "tests/serving/server/test_native_nets.py", "tests/train/loop/test_elastic.py", "tests/up/test_ray.py",
    "tests/up/test_up_streams.py", "tests/docs/test_live.py", "tests/examples/test_movielens.py",
    "tests/examples/test_ray_train.py", "tests/train/loop/test_gpu.py", "tests/sharded/all_to_all/test_gpu_ways.py",
    "tests/observe/test_tracing.py", "tests/docs/test_design.py", "tests/ops/test_cuda_kernels.py",
)  # fmt: skip
"""The longest files that have few tests; the others follow by their number of tests."""


class Scheduling(LoadFileScheduling):
    """A file runs on one worker, those of ``APART`` test by test; those of ``FIRST`` begin."""

    def _split_scope(self, nodeid):
        file = nodeid.partition("::")[0]
        return nodeid if file in APART else file

    def _assign_work_unit(self, node):
        if not any(self.assigned_work.values()):  # no worker has work yet
            self.workqueue = OrderedDict(sorted(self.workqueue.items(), key=_order))
        super()._assign_work_unit(node)


def _order(unit):
    scope, tests = unit
    file = scope.partition("::")[0]
    return FIRST.index(file) if file in FIRST else len(FIRST), -len(tests)
