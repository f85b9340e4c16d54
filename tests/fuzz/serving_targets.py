"""Readers of a model server, for nets and connections, with valid input to damage."""

from __future__ import annotations

import functools
import json
import socket
from typing import Any
from unittest import mock

import grpc
import h2.connection
import torch

import shoal
from shoal import _core
from shoal.serving import ModelServer
from shoal.serving.predict import PREDICT, decode_response, encode_request, model_spec
from shoal.serving.server.net import row_plan
from shoal.serving.server.net.native import NativeNet
from shoal.serving.tensors import encode_tensor
from shoal.testing.fuzz import Target

MOST = 1 << 16  # the number of values to run a damaged plan with
TRIED_EVERY = 16  # after this many connections, a good caller must be answered


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.ReLU(), torch.nn.LayerNorm(5))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        pairs = torch.bmm(rows, rows.transpose(1, 2)).flatten(1)[:, [1, 2, 5]]
        made = self.layers(torch.cat([x, pairs, rows.sum(1)], 1))
        return {"made": made.softmax(1), "most": made.amax(1)}


def net_plan() -> Target:
    """The description of a net, as the core is given it; the core alone sees to it that no step leaves its buffers."""
    told: list[Any] = []

    class Recorder:
        RowNet = _core.RowNet

        @staticmethod
        def RowPlan(*arguments: Any) -> Any:
            told.append(arguments)
            return _core.RowPlan(*arguments)

    any_size = {0: torch.export.Dim.AUTO}
    given = {"x": torch.zeros(4, 2), "rows": torch.zeros(4, 3, 4)}
    with torch.no_grad():
        program = torch.export.export(_Net().eval(), (), given, dynamic_shapes=dict.fromkeys(given, any_size))
    with mock.patch.object(row_plan, "_core", Recorder):
        NativeNet(program)

    def read(data: bytes) -> None:
        try:
            floats, inputs, outputs, constants, steps = json.loads(data)
            plan = _core.RowPlan(floats, inputs, outputs, constants, [_tuples(step) for step in steps])
        except (UnicodeDecodeError, RecursionError) as error:
            raise ValueError("it is not JSON") from error
        views = [view for step in steps for view in step[2:5] if view]
        values = sum(floats) + sum(constants) + sum(_count(view[2]) for view in views)
        if values > MOST or plan.multiplications > 16 * MOST:
            return
        kept = [torch.ones(size) for size in constants]
        net = _core.RowNet(plan, [(one.data_ptr(), one.numel()) for one in kept])
        buffers = [torch.ones(3, size) for size in floats[: inputs + outputs]]
        addresses = [one.data_ptr() for one in buffers]
        net.run(addresses[:inputs], 3, addresses[inputs:])

    seeds = [json.dumps(arguments).encode() for arguments in told]
    return Target("net_plan", seeds, read, (ValueError, TypeError, OverflowError, IndexError, RuntimeError))


def _tuples(given: Any, depth: int = 2) -> Any:
    return tuple(_tuples(each, depth - 1) if depth else each for each in given) if isinstance(given, list) else given


def _count(sizes: list[int]) -> int:
    count = 1
    for size in sizes:
        count *= max(size, 1)
    return count


@functools.cache
def _server() -> ModelServer:
    table = shoal.HashTable(4, name="fuzzed")
    table.assign(torch.arange(8), torch.ones(8, 4))
    server = ModelServer(front="native").start()
    server.serve_tables("m", {"user": table})
    return server


def http2() -> Target:
    """Bytes of a connection: after every few that were damaged, a good caller is still answered."""
    request = encode_request(model_spec("m", "lookup"), {"user": encode_tensor(torch.arange(3))})
    headers = [
        (":method", "POST"), (":scheme", "http"), (":path", PREDICT), (":authority", "x"), ("te", "trailers"),
        ("content-type", "application/grpc"), ("grpc-timeout", "5S"),
    ]  # fmt: skip
    client = h2.connection.H2Connection()
    client.initiate_connection()
    for stream in (1, 3):
        client.send_headers(stream, headers)
        client.send_data(stream, b"\0" + len(request).to_bytes(4, "big") + request, end_stream=True)
    client.ping(b"12345678")
    tried = [0]

    def read(data: bytes) -> None:
        server = _server()
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as link:
            link.settimeout(1.0)
            try:
                link.sendall(data)
                link.shutdown(socket.SHUT_WR)
                while link.recv(1 << 16):
                    pass
            except OSError:  # refused before it was read, or kept open
                pass
        tried[0] += 1
        if tried[0] % TRIED_EVERY == 1:
            with grpc.insecure_channel(server.address) as channel:
                answer = channel.unary_unary(PREDICT)(request, timeout=20)
            assert "user" in decode_response(answer)[1]

    return Target("http2", [client.data_to_send()], read)
