"""`Command`: a `shoal` command in a forked process, which need not import torch again."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import reduction
from pathlib import Path
from typing import IO, Any

from shoal.testing import ranks

PRELOADED = ["shoal.cli.main", "shoal.cli.serve", "shoal.serving.server.server", "torch.export"]
"""Modules that are imported before commands are forked, besides those of `shoal.testing.ranks`."""


class Command:
    """``shoal ARGUMENTS`` as a process, with the attributes and methods of a ``subprocess.Popen`` in text mode.

    It runs in a fork of a server that has already imported the library, and is killed with the program that started it.

    Args:
        arguments: as on the command line; turned into text.
        stdout, stderr: ``subprocess.PIPE``, ``subprocess.DEVNULL``, or None for those of this process.
        env: the environment; that of this process unless given. Variables that libraries read when they are imported
            have no effect.
        module: the module to run, as with ``python -m``.

    Example:
        >>> with Command("--version", stdout=subprocess.PIPE) as command:  # doctest: +SKIP
        ...     print(command.communicate()[0])
    """

    def __init__(
        self,
        *arguments: object,
        stdout: int | None = None,
        stderr: int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        module: str = "shoal",
    ) -> None:
        self.args = [module, *map(str, arguments)]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*ranks.PRELOADED, *PRELOADED])
        self.stdout, out = _stream(stdout, 1)
        self.stderr, err = _stream(stderr, 2)
        given = (self.args, dict(os.environ if env is None else env), str(cwd or Path.cwd()), _Fd(out), _Fd(err))
        self._process = context.Process(target=_run, args=given, daemon=True)
        try:
            self._process.start()
        finally:
            for fd in {out, err} - {1, 2}:
                os.close(fd)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; minus the number of the signal that ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for it to exit and return its output since the last read."""
        texts = ["", ""]

        def read(i: int, stream: IO[str]) -> None:
            with stream:
                texts[i] = stream.read()

        streams = [(i, stream) for i, stream in enumerate((self.stdout, self.stderr)) if stream and not stream.closed]
        readers = [threading.Thread(target=read, args=one, daemon=True) for one in streams]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return texts[0], texts[1]

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *exc: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


class _Fd:
    """A file descriptor to pass to a process that is being started."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.fd)

    def __setstate__(self, given: Any) -> None:
        self.fd = given.detach()


def _stream(wanted: int | None, own: int) -> tuple[IO[str] | None, int]:
    """Return our end of a stream, if there is one, and the descriptor that the command gets."""
    if wanted is None:
        return None, own
    if wanted == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_WRONLY)
    ours, theirs = os.pipe()
    return open(ours, encoding="utf-8"), theirs


def _run(args: list[str], env: dict[str, str], cwd: str, out: _Fd, err: _Fd) -> None:
    os.setsid()
    os.dup2(out.fd, 1)
    os.dup2(err.fd, 2)
    for fd in {out.fd, err.fd}:
        os.close(fd)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = args
    runpy.run_module(args[0], run_name="__main__", alter_sys=False)
