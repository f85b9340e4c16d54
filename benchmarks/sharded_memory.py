"""A parameter server's resident memory over millions of small mixed requests.

    python -m benchmarks.sharded_memory [--requests 10000000] [--json FILE]

Requests are lookups, updates, assigns, inserting lookups, `contains`, `info` and malformed messages, many in flight at
once; a new worker replaces the old one every 50,000 requests. The ids are always the same few, so the table does not
grow: any growth is in the rest of the server.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
import uuid

import torch

DIM, IDS = 8, 4096
WINDOW = 256
NEW_WORKER_EVERY = 50_000


def _serve(pipe):
    from shoal.sharded import Engine, ParameterServer, Shard

    server = ParameterServer(Engine(Shard(0, 1)), http_port=None).start()
    pipe.send(server.address)
    pipe.recv()
    server.stop()


def resident(pid: int) -> float:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024


class Worker:
    """Sends requests without waiting for each."""

    def __init__(self, address: str, seed: int) -> None:
        import zmq

        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.RCVTIMEO = 60_000
        self.socket.connect(address)
        self.stream, self.seq, self.random = uuid.uuid4().bytes, 0, random.Random(seed)
        self.ids = [torch.randint(0, IDS, (8,)) for _ in range(64)]
        self.values = torch.randn(8, DIM).contiguous()

    def request(self, number: int):
        from shoal.sharded.ps.protocol import Op, Request

        dice = self.random.random()
        ids = self.random.choice(self.ids)
        fields = {"request": number, "counts": [8], "names": ("t",), "ids": ids}
        if dice < 0.5:
            return Request(Op.LOOKUP, **fields)
        if dice < 0.85:
            self.seq += 1
            op = Op.APPLY if dice < 0.7 else Op.ASSIGN if dice < 0.8 else Op.ASSIGN_ADD
            rates = [0.1] if op == Op.APPLY else ()
            return Request(
                op, stream=self.stream, seq=self.seq, acked=self.seq - 1, values=self.values, rates=rates, **fields
            )
        if dice < 0.9:
            return Request(Op.INSERT, **fields)
        if dice < 0.95:
            return Request(Op.CONTAINS, **fields)
        if dice < 0.97:
            return Request(Op.INFO, request=number)
        return Request(Op.LOOKUP, request=number, counts=[9], names=("t",), ids=ids)  # a wrong number of ids

    def run(self, count: int) -> int:
        """Sends the requests; returns how many were answered with an error."""
        from shoal.sharded.ps.protocol import parse_reply

        errors = under_way = 0
        for number in range(count):
            self.socket.send_multipart(self.request(number + 1).frames(), copy=False)
            under_way += 1
            while under_way >= WINDOW or (number == count - 1 and under_way):
                frames = self.socket.recv_multipart(copy=False)
                errors += parse_reply([f.buffer for f in frames]).status != 0
                under_way -= 1
        return errors

    def close(self) -> None:
        self.context.destroy(0)


def measure(requests: int, points: int = 40) -> list[tuple[int, float]]:
    """(requests so far, resident MB) at regular intervals."""
    from shoal.sharded import PsClient, ps_table

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    address = ours.recv()
    with PsClient([address]) as client:
        ps_table(client, DIM, name="t", optimizer="adagrad").assign(torch.arange(IDS), torch.zeros(IDS, DIM))
    done, found, errors, begin = 0, [], 0, time.monotonic()
    step = max(1, requests // points)
    while done < requests:
        chunk = min(NEW_WORKER_EVERY, step, requests - done)
        worker = Worker(address, done)
        errors += worker.run(chunk)
        worker.close()
        done += chunk
        if done // step != (done - chunk) // step or done == requests:
            found.append((done, resident(process.pid)))
            print(f"{done:10d} requests {found[-1][1]:8.1f} MB {done / (time.monotonic() - begin):8.0f}/s", flush=True)
    print(f"{errors} were answered with an error ({errors / requests:.1%})")
    ours.send("end")
    process.join(10)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000_000)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = measure(args.requests)
    warm = next(mb for n, mb in found if n >= args.requests / 10)
    ratio = max(mb for n, mb in found if n >= args.requests / 10) / warm
    print(f"largest / after a tenth: {ratio:.3f}   last / after a tenth: {found[-1][1] / warm:.3f}   wanted: flat")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"resident_mb": found, "largest_to_tenth": ratio}, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
