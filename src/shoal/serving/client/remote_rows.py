"""`RemoteRows`: fetches rows from all embedding shards in one native call that releases the GIL."""

import logging
import random
import time
from collections.abc import Mapping

import torch

from shoal import _core
from shoal.metrics import emit_counter, emit_timer
from shoal.observe import tracing
from shoal.serving.client.remote import native_caller, time_left
from shoal.serving.client.sub_graphs import SubGraphs
from shoal.serving.predict import PREDICT
from shoal.serving.status import Code, StatusError

log = logging.getLogger(__name__)

SIGNATURE = "lookup"


class RemoteRows:
    """Requests distinct ids from the shards that hold them: shard = id modulo the number of shards.

    This is the fast path. `lookup` returns None if something fails, if a shard does not have the version, or if calls
    are encrypted or traced. Then use `SubGraphs.call_all`, which handles other replicas and versions, spans and errors.

    Args:
        graphs: the shards ``ps_0`` to ``ps_<shards - 1>``.
        dims: slot -> columns of its rows.
    """

    def __init__(self, graphs: SubGraphs, shards: int, dims: Mapping[str, int]) -> None:
        self._graphs, self._shards, self._slots = graphs, [f"ps_{shard}" for shard in range(shards)], sorted(dims)
        self._dims = dims
        self._rows = _core.RemoteRows([(slot, dims[slot]) for slot in self._slots]) if _core.front_available() else None

    def lookup(self, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Slot -> rows ``[n, dim]`` of its ids ``[n]``; None if `SubGraphs.call_all` must be used.

        Raises:
            StatusError: the deadline has passed.
        """
        if self._rows is None or tracing.current() or (caller := native_caller()) is None:
            return None
        routes = self._graphs.routes(self._shards, SIGNATURE)
        if routes is None or not all(addresses for _, addresses in routes):
            return None
        begin = time.monotonic()
        left = time_left(self._graphs.deadline_millis / 1000)
        no_ids = torch.empty(0, dtype=torch.int64, device="cpu")
        ids = [wanted.get(slot, no_ids).contiguous() for slot in self._slots]
        rows = [
            torch.empty(one.numel(), self._dims[slot], device="cpu") for slot, one in zip(self._slots, ids, strict=True)
        ]
        given = [(one.data_ptr(), one.numel(), out.data_ptr()) for one, out in zip(ids, rows, strict=True)]
        shards = [(random.choice(addresses), spec) for spec, addresses in routes]
        metadata = [*caller.metadata, *self._graphs.metadata(self._shards)]
        status, why = self._rows.lookup(caller.core, PREDICT, shards, metadata, left, given)
        tags = f"model_name={self._graphs.model_name}|signature_name={SIGNATURE}"
        emit_timer("remote_predict_op_latency", time.monotonic() - begin, tags)
        emit_counter("remote_predict_op_throughput", len(shards), tags)
        if status == Code.DEADLINE_EXCEEDED:
            raise StatusError(
                status, f"the shards of model {self._graphs.model_name!r}, signature {SIGNATURE!r}: {why}"
            )
        if status:
            log.debug("requesting the rows of %s again without the fast path: %s", self._graphs.model_name, why)
            return None
        return {slot: found for slot, found in zip(self._slots, rows, strict=True) if slot in wanted}
