"""Calls of every kernel of GPU tables, compiled for a card that is not here. Run by `test_compile`."""

import offline
import torch

import shoal
from shoal.table.cuda import backend, launch, table
from shoal.table.native import OPTIMIZERS


def _compile(bound, programs, *arguments):
    offline.compile_only(bound._fn, arguments, **bound._constants, **bound._options)


launch.Bound.__call__ = _compile
table.as_device = lambda device, name: torch.device("cpu")
assert not backend.interpreted()

ids, narrow = torch.arange(64), torch.ones(64, 6)
for optimizer in OPTIMIZERS:
    if optimizer in ("batch_softmax", "dynamic_wd_adagrad"):  # have dim 1, or no name
        continue
    made = shoal.HashTable(6, optimizer=optimizer, device="cuda", on_bad_gradient="skip")
    made.apply_gradients(ids, narrow, enable_dedup=True, req_time=5)
    if optimizer in ("sgd", "adam", "lamb"):
        made.apply_gradients(ids, narrow)
        made.apply_gradients(ids, narrow, distinct=True)
print(sorted(offline.COMPILED))
