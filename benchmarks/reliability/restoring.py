"""5 M rows from an S3 API on loopback, against a restore from the disk."""

from __future__ import annotations

import logging
import os
import time
from argparse import Namespace
from pathlib import Path

import torch

from benchmarks.harness import Report
from benchmarks.reliability.group import LONG, tell
from shoal.sharded import Engine, ParameterServer, PsClient, Shard, ps_table
from shoal.sharded.ps.archive.restoring import restore
from shoal.sharded.ps.archive.store import Archive
from shoal.sharded.ps.archive.uploading import Uploading


def restoring(report: Report, options: Namespace, folder: Path) -> None:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
    s3 = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    s3.start()
    try:
        host, port = s3.get_host_and_port()
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_REGION": "us-east-1",
        }  # fmt: skip
        import urllib.request

        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT"), timeout=60).close()
        archive = Archive("s3://bucket/p", 0)
        with ParameterServer(Engine(Shard(0, 1), "log", folder / "a")) as server:
            with PsClient([server.address], deadline=LONG) as client:
                table = ps_table(client, 16, name="wide", optimizer="sgd", lr=0.1)
                for begin in range(0, options.rows, 500_000):
                    table.assign(
                        torch.arange(begin, min(options.rows, begin + 500_000)),
                        torch.ones(500_000, 16)[: options.rows - begin],
                    )
                client.checkpoint()
            log = server.engine.log
            assert log is not None
            Uploading(archive, folder / "a", durable=lambda: log.durable_number).round()
        begin = time.perf_counter()
        _recover(folder / "a")
        local = time.perf_counter() - begin
        begin = time.perf_counter()
        data = sum(len(archive.get(f"checkpoints/checkpoint-{n.number:016d}/{f}")) for n in archive.checkpoints()[-1:]
                   for f in archive.files(n.number))  # fmt: skip
        transfer = time.perf_counter() - begin
        begin = time.perf_counter()
        restore(archive, folder / "b")
        _recover(folder / "b")
        whole = time.perf_counter() - begin
    finally:
        s3.stop()
    tell(report, f"{options.rows / 1e6:g} M rows ({data >> 20} MB): transfer alone", transfer, "s")
    tell(report, "local restore", local, "s")
    report.add(
        "restored from S3, against 2 local restores + the transfer", f"{whole:.2f} s", f"{2 * local + transfer:.2f} s",
        whole / (2 * local + transfer), 1, at_most=True,
    )  # fmt: skip


def _recover(folder: Path) -> None:
    engine = Engine(Shard(0, 1), "log", folder)
    engine.lock()
    engine.recover()
    engine.close()
