"""Real gloo processes for tests: a deadline, everybody's end when one fails, and that rank's traceback."""

import faulthandler
import importlib.util
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KILLED = "killed"


def _server():
    context = multiprocessing.get_context("forkserver")
    # torch.optim imports torch._dynamo on first use, which takes seconds: once here, not once per process.
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "shoal.gather"])
    return context


def _child(rank, world, file, name, kwargs, folder, connection, timeout_s):
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(0.8 * timeout_s)
    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        if world > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world,
                timeout=timedelta(seconds=timeout_s),
            )  # fmt: skip
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        connection.send_bytes(pickle.dumps((True, getattr(module, name)(rank, world, **kwargs))))
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        faulthandler.cancel_dump_traceback_later()
        if world > 1 and dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception:
                traceback.print_exc()


def run_ranks(world, fn, *, timeout_s=60.0, may_die=(), **kwargs):
    """``fn(rank, world, **kwargs)`` in ``world`` processes on gloo; the list of results. Ranks in ``may_die`` may end
    without a result, which is then ``KILLED``."""
    context = _server()
    deadline = time.monotonic() + timeout_s
    file, name = fn.__code__.co_filename, fn.__name__
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(
                target=_child, args=(rank, world, file, name, kwargs, folder, pairs[rank][1], timeout_s), daemon=True
            )
            for rank in range(world)
        ]
        try:
            for process in processes:
                process.start()
            for _, ours in pairs:
                ours.close()
            results = [None] * world
            waiting = {pairs[rank][0]: rank for rank in range(world)}
            while waiting:
                ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"ranks {sorted(waiting.values())} of {world} did not end in {timeout_s} s")
                for connection in ready:
                    rank = waiting.pop(connection)
                    try:
                        ok, value = pickle.loads(connection.recv_bytes())
                    except EOFError:
                        if rank not in may_die:
                            raise RuntimeError(f"rank {rank} of {world} died") from None
                        ok, value = True, KILLED
                    if not ok:
                        raise RuntimeError(f"rank {rank} of {world} failed:\n{value}")
                    results[rank] = value
            return results
        finally:
            for process in processes:
                process.join(timeout=2)
                if process.is_alive():
                    process.kill()
                    process.join()
