"""A CPU that cannot multiply bfloat16 matrices gets an error that says what to do; ports that are held stay free."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from shoal.host import HeldPorts
from shoal.sharded import Engine, ParameterServer, PsClient, Shard

PROGRAM = """
import torch
from shoal.errors import UnsupportedError
from shoal.serving.server.net.placement import Placement
try:
    Placement(precision="bf16")
except UnsupportedError as error:
    print("refused:", error)
else:
    a = torch.ones(256, 64, dtype=torch.bfloat16)
    print("works:", float((a @ a.t()).sum()))
"""


@pytest.mark.parametrize("limit", ["", "AVX512_CORE_FP16"], ids=["all instructions", "without AMX"])
def test_products_in_bfloat16_work_or_the_error_says_what_to_set(limit):
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    if limit:
        environment["ONEDNN_MAX_CPU_ISA"] = limit
    command = [sys.executable, "-c", PROGRAM]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout
    if limit or out.startswith("works"):
        assert out == f"works: {256 * 256 * 64.0}\n"
    else:
        assert "set the environment variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in out


def test_no_other_program_gets_a_port_that_is_held_but_servers_can_use_it():
    held = HeldPorts(3)
    for port in held.numbers:
        with socket.socket() as other:
            for _ in range(2):  # again after a restart
                with pytest.raises(OSError, match="in use"):
                    other.bind(("127.0.0.1", port))
                with ParameterServer(Engine(Shard(0, 1)), port=port) as server, PsClient([server.address]) as client:
                    assert client.info()[0]["shard"] == 0
                with socket.create_server(("127.0.0.1", port)) as server:
                    socket.create_connection(server.getsockname()).close()
            served = grpc.server(ThreadPoolExecutor(1))
            assert served.add_insecure_port(f"127.0.0.1:{port}") == port
            served.start()
            assert served.stop(None).wait(60)
    held.close()
    for port in held.numbers:
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))
