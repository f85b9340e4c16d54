"""Warm-up: a version answers requests before it is published, so that first-time work does not delay callers.

Requests come from ``assets.extra/tf_serving_warmup_requests``, TFRecords of ``PredictionLog`` as in TensorFlow Serving;
without that file, each signature that can be warmed up gets one row without values.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shoal import _core
from shoal.errors import DataError, ShoalError
from shoal.serving.predict import PredictCall, decode_request
from shoal.serving.server.servable import Servable, Signature
from shoal.serving.server.trained import FeatureSignature
from shoal.serving.tensors import dtype_code, torch_dtype
from shoal.serving.wire import read_fields

log = logging.getLogger(__name__)

FILE = Path("assets.extra") / "tf_serving_warmup_requests"
MAX_RECORDS = 1000  # as in TensorFlow Serving
MAX_SECS = 60.0
_PREDICT_LOG, _REQUEST = 6, 1


def requests_in(file: Path) -> Iterator[PredictCall]:
    """The Predict requests in a warm-up file, at most a thousand.

    Raises:
        DataError: the file is damaged.
    """
    data = file.read_bytes()
    try:
        records, _, used = _core.read_frames(data, 0, MAX_RECORDS)
    except ValueError as error:
        raise DataError(f"{file} is damaged: {error}") from None
    if None in records or (used < len(data) and len(records) < MAX_RECORDS):
        raise DataError(f"{file} is damaged: it has an incomplete record")
    for record in records:
        for number, _, logged in read_fields(memoryview(record)):
            if number != _PREDICT_LOG or not isinstance(logged, memoryview):
                continue
            for inner, _, value in read_fields(logged):
                if inner == _REQUEST and isinstance(value, memoryview):
                    yield decode_request(bytes(value))


def warm_up(servable: Servable, directory: Path) -> int:
    """Let a version answer its warm-up requests and prepare the GPU; returns the number answered.

    A request that fails is logged; the version is still served.
    """
    begin, answered = time.monotonic(), 0
    runs = _recorded(servable, directory / FILE) if (directory / FILE).is_file() else _made_up(servable)
    try:
        for name, run in runs:
            try:
                run()
                answered += 1
            except (ShoalError, ValueError, RuntimeError) as error:
                log.warning("a warm-up request for signature %s failed: %s", name, error)
            if time.monotonic() - begin > MAX_SECS:
                log.warning("warm-up ended after %.0f s", MAX_SECS)
                break
    except DataError as error:
        log.warning("warm-up ended: %s", error)
    net = servable.program.moments.net if servable.program is not None else None
    if hasattr(net, "warm"):
        net.warm()
    return answered


def _recorded(servable: Servable, file: Path) -> Iterator[tuple[str, Any]]:
    for call in requests_in(file):
        name = call.spec.signature_name or "serving_default"
        signature = servable.signatures.get(name)
        if signature is None or signature.push or signature.waits:  # `waits`: it needs other servers
            log.info("skipping a warm-up request for signature %r", name)
            continue

        def run(call: PredictCall = call, signature: Signature = signature) -> None:
            inputs = call.tensors(lambda heads: signature.check("warm-up", heads))
            signature.run(signature.convert(inputs))

        yield name, run


def _made_up(servable: Servable) -> Iterator[tuple[str, Any]]:
    for name, signature in servable.signatures.items():
        if signature.push or signature.waits or servable.program is None:
            continue
        yield name, lambda signature=signature: signature.run(signature.convert(_empty(signature)))


def _empty(signature: Signature) -> dict[str, Any]:
    """One row without values."""
    if isinstance(signature, FeatureSignature):
        return {next(iter(signature.spec.inputs)): [None]}
    inputs = {}
    for alias, spec in signature.spec.inputs.items():
        dtype = torch_dtype(dtype_code(spec.dtype))
        if dtype is None or spec.shape is None:
            raise DataError(f"the signature does not fix the dtype and shape of input {alias!r}")
        fill = spec.padding if spec.padding is not None else 0
        inputs[alias] = torch.full(
            [1 if size is None else size for size in spec.shape], fill, dtype=dtype, device="cpu"
        )
    return inputs
