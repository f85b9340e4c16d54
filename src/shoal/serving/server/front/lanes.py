"""Batches of requests from the native front end.

A lane whose net is native is bound to its predictor and answered without Python until another version takes over. For
other lanes, Python is called once per batch to look rows up and run the net.
"""

import atexit
import logging
import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from shoal import _core
from shoal.proto.serving.tf_serving_pb2 import ModelSpec
from shoal.serving.predict import PredictCall, plain_dtype, plain_outputs
from shoal.serving.server.batching import cut_rows, rows_match
from shoal.serving.server.models import ServedModels, Version, find_signature, generation
from shoal.serving.server.servable import Signature, Tensors
from shoal.serving.server.traffic import Traffic
from shoal.serving.server.trained import BATCH, FeatureSignature, MadeInputs, made_inputs

log = logging.getLogger(__name__)

WAIT_SECS = 1.0
MAX_UNFIT = 8  # after this many consecutive batches that could not be joined, the lane is dropped
MAX_REFUSED = 1024  # maximum remembered keys that must not be batched


@dataclass(eq=False)
class Lane:
    """Requests with byte-identical model specs and output filters."""

    key: bytes
    spec: ModelSpec
    output_filter: list[str]
    unfit: int = 0

    @property
    def signature_name(self) -> str:
        return self.spec.signature_name or "serving_default"


class LaneRunners:
    """Threads that run the batches of a front end.

    Args:
        front: the front end.
        models: the served models. Each batch resolves its version again, as a request does.
        max_batch_rows: maximum rows that are joined.
        threads: number of concurrent batches, at most four of them in Python; 0 = the number of CPUs.

    Requests that a batch cannot answer, for any reason, are answered by Python one by one, which reports the error.
    """

    def __init__(
        self, front: Any, models: ServedModels, traffic: Traffic, max_batch_rows: int, threads: int = 0
    ) -> None:
        self._front, self._models, self._traffic = front, models, traffic
        self._max_batch_rows = max_batch_rows
        self._lanes: dict[int, Lane] = {}
        self._keys: set[bytes] = set()
        self._refused: set[bytes] = set()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"shoal-batches-{number}", daemon=True)
            for number in range(threads or runner_threads())
        ]
        self.batches = 0
        self.requests = 0
        self.native_requests = 0
        """The number of requests answered without Python; updated by `collect`."""
        traffic.watch(self.collect)

    def spec_of(self, number: int) -> ModelSpec | None:
        """The model spec of a lane's requests."""
        lane = self._lanes.get(number)
        return lane.spec if lane is not None else None

    def start(self) -> None:
        _running.add(self)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads. Call it after closing the front end, when no thread waits for a batch."""
        _running.discard(self)
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=10)

    def consider(self, call: PredictCall) -> None:
        """Called with a request that Python has answered: batch similar requests from now on, if possible."""
        key = _core.lane_key(call.data)
        if not key or key in self._keys or key in self._refused:
            return
        if len(self._refused) >= MAX_REFUSED:
            self._refused.clear()
        lane = Lane(key, call.spec, list(call.output_filter))
        before = generation.number
        with self._models.use(call.spec) as version:
            signature = find_signature(version, lane.signature_name, call.spec.name)
            fits = signature.batch and not signature.push and not signature.waits
            number = self._front.add_lane(key, self._models.model(call.spec.name).name) if fits else -1
            if number < 0:
                self._refused.add(key)
                return
            self._keys.add(key)
            self._lanes[number] = lane
            self._bind(number, lane, version, signature, before)

    def _bind(self, number: int, lane: Lane, version: Version, signature: Signature, before: int) -> None:
        """Answer a lane natively from now on, if possible; ``before``: the version's generation."""
        native = signature.native
        if native is not None:
            outputs = [native.outputs.index(alias) for alias in lane.output_filter]
            resolved = version.resolved(lane.spec.name, lane.signature_name)
            self._front.bind_lane(number, native.core, resolved, outputs, before)

    def collect(self) -> None:
        """Add the requests answered natively since the last call to the traffic counts."""
        for number, times, requests, rows in self._front.take_counts():
            lane = self._lanes.get(number)
            if lane is None:
                continue
            self.batches += sum(count for _, count in requests)
            answered = sum(count for _, count in times)
            self.requests += answered
            self.native_requests += answered
            self._traffic.add_batches(requests, rows)
            self._traffic.add_counted(lane.spec.name, lane.signature_name, [(ns * 1e-9, n) for ns, n in times])

    def _give_up(self, number: int, lane: Lane) -> None:
        self._refused.add(lane.key)
        self._keys.discard(lane.key)
        self._lanes.pop(number, None)
        self._front.remove_lane(number)

    def _run(self) -> None:
        while not self._stop.is_set():
            batch = self._front.next(WAIT_SECS)
            if batch is None:
                if self._stop.wait(0.001):
                    return
                continue
            try:
                self._run_batch(batch)
            except Exception:
                log.debug("a batch failed; its requests run one at a time", exc_info=True)
            except BaseException:
                log.exception("a batch failed")
            del batch  # unanswered requests go to Python

    def _run_batch(self, batch: Any) -> None:
        lane = self._lanes.get(batch.lane)
        if lane is None:  # it is being created, or was dropped
            return
        before = generation.number
        with self._models.use(lane.spec) as version:
            where = f"model {lane.spec.name!r} version {version.number}"
            signature = find_signature(version, lane.signature_name, where)
            batcher = version.batchers.get(lane.signature_name)
            if not signature.batch or (batcher is not None and not batcher.joins):
                self._give_up(batch.lane, lane)
                return
            inputs = self._inputs(batch, signature, f"{where}, signature {lane.signature_name!r}")
            if inputs is None:
                lane.unfit += 1
                if lane.unfit >= MAX_UNFIT:
                    self._give_up(batch.lane, lane)
                return
            lane.unfit = 0
            resolved = version.resolved(lane.spec.name, lane.signature_name)
            parts = batch.parts(self._max_batch_rows)
            for first, count, begin, rows in parts:
                own = inputs if len(parts) == 1 else cut_rows(inputs, begin, rows)
                self._run_part(batch, lane, version, signature, own, resolved, (first, count, rows))
            self._bind(batch.lane, lane, version, signature, before)
        self.requests += len(batch)
        self._traffic.add_many(lane.spec.name, lane.signature_name, batch.seconds)

    def _run_part(
        self, batch: Any, lane: Lane, version: Version, signature: Signature, inputs: Tensors, resolved: bytes,
        place: tuple[int, int, int],
    ) -> None:  # fmt: skip
        first, count, rows = place
        self.batches += 1
        self._traffic.add_batch(count, rows)
        outputs = signature.run(inputs)
        if count > 1:
            joins, sure = rows_match(outputs, signature.spec.outputs, rows)
            if not joins:
                self._give_up(batch.lane, lane)
            if not joins or not sure:
                batch.bounce(first, count)
                return
        if lane.output_filter:
            outputs = {alias: outputs[alias] for alias in lane.output_filter}
        given = plain_outputs(outputs, rows)
        if given is None:
            batch.bounce(first, count)
            return
        batch.answer(first, count, resolved, given[0])

    def _inputs(self, batch: Any, signature: Signature, where: str) -> Tensors | None:
        """The joined inputs of the signature's program; None if the requests must be read one by one."""
        if isinstance(signature, FeatureSignature):
            if signature.reader is None or signature.maker is None:
                return None
            made = batch.read(signature.reader)
            return {BATCH: MadeInputs(made_inputs(made, signature.maker, pin=signature.pins))} if made.total else None
        if not batch.plan():
            return None
        inputs: Tensors = {}
        for alias, dtype, shape in batch.inputs:
            inputs[alias.decode()] = torch.empty(shape, dtype=plain_dtype(dtype), device="cpu")
        batch.join_into([value.data_ptr() for value in inputs.values()])
        signature.check(where, inputs)
        return inputs


_running: "weakref.WeakSet[LaneRunners]" = weakref.WeakSet()


def _stop_all() -> None:
    """Stop the remaining runners at interpreter exit: no thread may be in native code by then."""
    for runners in list(_running):
        runners._front.close()
        runners.stop()


atexit.register(_stop_all)


def runner_threads() -> int:
    """The default number of concurrent batches on this machine."""
    return max(1, min(64, len(os.sched_getaffinity(0))))
