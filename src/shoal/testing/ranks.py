"""Ranks as real processes on gloo, with a deadline and the failing rank's traceback."""

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, DeadlineError, PeerError
from shoal.testing.calls import outcome, pack_call, unpack_call

PRELOADED = ["shoal.comm", "shoal.nn.bag", "shoal.sharded.all_to_all.table", "shoal.train.step"]
"""Modules that the fork server imports once, so that ranks need not import them.
Tests may add their own before the first `run_ranks`; importing such a module must not start a thread."""
STACK_S = 5.0  # how long a rank has after the deadline to write its stack


class RankFailed(PeerError):
    """A rank raised or died. ``rank`` is the first one that did; its own exception, if any, is the cause."""

    def __init__(self, rank: int, world_size: int, text: str) -> None:
        super().__init__(f"rank {rank} of {world_size} failed\n{text}")
        self.rank = rank


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    backend: str | None = "gloo",
    group_timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    lost: tuple[int, ...] = (),
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args, **kwargs)`` in ``world_size`` processes; return their results by rank.

    Args:
        fn: a module-level function. Its environment has torchrun's variables (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``
            ...) and those of ``env``, and the default process group is started on ``backend``.
        timeout_s: after this the ranks are killed and ``DeadlineError`` shows where each of them was.
        backend: None starts no process group; ``init_process_group()`` in ``fn`` then finds its rendezvous.
        group_timeout_s: timeout of the process group; ``timeout_s`` unless given.
        lost: ranks that are expected to die; they count as done, with the result None.

    Raises:
        RankFailed: a rank raised or died. The others are killed at once, and its traceback is in the message.

    Example:
        >>> run_ranks(2, my_module.add_ranks)  # doctest: +SKIP
        [1, 1]
    """
    from shoal.comm.ranks import collectives

    if world_size < 1:
        raise ConfigError(f"run_ranks: world_size must be at least 1, got {world_size}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = collectives.tcp_store()  # here, so that any rank may die
    call = pack_call(fn, args, kwargs)
    with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as folder:
        setup = {
            "port": store.port,
            "backend": backend,
            "timeout_s": timeout_s,
            "group_timeout_s": group_timeout_s or timeout_s,
            "folder": folder,
            "env": dict(os.environ),
            "own_env": dict(env or {}),
        }
        pipes, processes = [], []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(rank, world_size, setup, call, theirs), daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _collect(processes, pipes, time.monotonic() + timeout_s, timeout_s, set(lost), Path(folder))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process, pipe in zip(processes, pipes, strict=True):
                process.join(10)
                pipe.close()


def _collect(processes: list, pipes: list, end: float, timeout_s: float, lost: set[int], folder: Path) -> list[Any]:
    results: list[Any] = [None] * len(processes)
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready: list[Any] = wait(list(open_pipes), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            running = sorted(open_pipes.values())
            stacks = _stacks(processes, running, folder)
            raise DeadlineError(f"run_ranks: rank(s) {running} were still running after {timeout_s:g} s\n{stacks}")
        failed: list[tuple[float, int, str, BaseException | None]] = []
        while ready:
            for pipe in ready:
                rank = open_pipes.pop(pipe)
                try:
                    results[rank], error, text, when = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):  # ended before, or in the middle of, its result
                    processes[rank].join(60)
                    if rank not in lost:  # the errors of other ranks are consequences of it
                        ending = _ending(processes[rank].exitcode)
                        failed.append((0.0, rank, f"its process ended with {ending}", None))
                else:
                    if error is not None:
                        failed.append((when, rank, text, error))
            # A failure makes other ranks fail: by now a rank that failed earlier has reported it.
            ready = wait(list(open_pipes), timeout=0) if failed else []
        if failed:
            _, rank, text, error = min(failed, key=lambda f: f[:2])
            raise RankFailed(rank, len(pipes), text) from error
    return results


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _stacks(processes: list, running: list[int], folder: Path) -> str:
    for rank in running:
        with contextlib.suppress(OSError):
            os.kill(processes[rank].pid, signal.SIGUSR1)
    end, files = time.monotonic() + STACK_S, {rank: folder / f"stack-{rank}" for rank in running}
    while not all(_shown(files[rank]) or not processes[rank].is_alive() for rank in running):
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    return "\n".join(f"rank {rank} was at:\n{f.read_text()}" for rank, f in files.items() if f.exists())


def _shown(stack: Path) -> bool:
    """Whether the stack of the main thread, which is written last, is complete."""
    return stack.exists() and stack.read_text().endswith("in <module>\n")


def _child(rank: int, world_size: int, setup: dict[str, Any], call: bytes, pipe: Any) -> None:
    os.environ.clear()
    os.environ.update(setup["env"])
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(setup["port"]),
        TORCHELASTIC_USE_AGENT_STORE="True",  # env:// then joins the parent's store instead of opening one
    )
    os.environ.update(setup["own_env"])
    stack = open(f"{setup['folder']}/stack-{rank}", "w")  # noqa: SIM115 - faulthandler writes to it at any time
    faulthandler.register(signal.SIGUSR1, file=stack)
    pipe.send_bytes(outcome(lambda: _work(rank, world_size, setup, call)))
    pipe.close()
    util: Any = multiprocessing.util
    util._exit_function()  # flush data that was sent but not yet received
    os._exit(0)  # no destructors: gloo's abort the process after a failed collective


def _work(rank: int, world_size: int, setup: dict[str, Any], call: bytes) -> Any:
    import torch

    from shoal.comm.ranks import collectives

    torch.set_num_threads(1)
    if setup["backend"] is not None:
        patience = timedelta(seconds=setup["timeout_s"])  # one process may start much later than another
        timeout = timedelta(seconds=setup["group_timeout_s"])
        store = collectives.tcp_store(setup["port"], patience)

        def all_reach(place: str) -> None:
            part = collectives.part_of(store, f"run_ranks_{place}")
            part.set(str(rank), "")
            part.wait([str(r) for r in range(world_size)], patience)

        all_reach("start")
        store.set_timeout(timeout)
        collectives.start(
            setup["backend"],
            store=collectives.part_of(store, "run_ranks"),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        # A group starts on one rank before the others have finished connecting to it, and ending it then fails them.
        all_reach("started")
    fn, args, kwargs = unpack_call(call)
    return fn(rank, world_size, *args, **kwargs)
