"""`Machine`: gives commands in a test a stepped clock and a slow, failing or full disk.

A small library, loaded with ``LD_PRELOAD``, reads numbers that the test changes while the command runs. It moves the
wall clock in either direction (monotonic clocks are unchanged), and makes syncs and file writes slower, or fail with a
system error.

    with Machine() as machine:
        server = subprocess.Popen(["shoal", "ps", ...], env=os.environ | machine.environment())
        machine.set(clock_s=-3600)
        machine.set(sync_s=2.0)
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, UnsupportedError

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct numbers { volatile int64_t clock_ns, sync_ns, write_ns, sync_errno, write_errno, syncs, writes; };
static struct numbers none, *now = &none;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("SHOAL_MACHINE");
  int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void *at = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at != MAP_FAILED) now = at;
  close(fd);
}

static void rest(int64_t ns) {
  struct timespec left = {ns / 1000000000, ns % 1000000000};
  while (ns > 0 && nanosleep(&left, &left) && errno == EINTR) {}
}

static int a_file(int fd) {
  struct stat is;
  return !fstat(fd, &is) && S_ISREG(is.st_mode);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define SYNC(name)                                                                   \
  int name(int fd) {                                                                 \
    REAL(name);                                                                      \
    __atomic_add_fetch(&now->syncs, 1, __ATOMIC_RELAXED);                            \
    rest(now->sync_ns);                                                              \
    if (now->sync_errno) { errno = (int)now->sync_errno; return -1; }                \
    return real(fd);                                                                 \
  }
SYNC(fsync)
SYNC(fdatasync)

#define WRITE(name, given, passed)                                                   \
  ssize_t name given {                                                               \
    REAL(name);                                                                      \
    if ((now->write_ns || now->write_errno) && a_file(fd)) {                         \
      __atomic_add_fetch(&now->writes, 1, __ATOMIC_RELAXED);                         \
      rest(now->write_ns);                                                           \
      if (now->write_errno) { errno = (int)now->write_errno; return -1; }            \
    }                                                                                \
    return real passed;                                                              \
  }
WRITE(write, (int fd, const void *data, size_t size), (fd, data, size))
WRITE(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
WRITE(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
WRITE(writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
WRITE(pwritev, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
WRITE(pwritev64, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))
WRITE(pwritev2, (int fd, const struct iovec *parts, int count, off_t at, int how), (fd, parts, count, at, how))
WRITE(pwritev64v2, (int fd, const struct iovec *parts, int count, off64_t at, int how), (fd, parts, count, at, how))

int clock_gettime(clockid_t clock, struct timespec *at) {
  REAL(clock_gettime);
  int failed = real(clock, at);
  if (!failed && now->clock_ns && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    int64_t ns = (int64_t)at->tv_sec * 1000000000 + at->tv_nsec + now->clock_ns;
    at->tv_sec = ns / 1000000000;
    at->tv_nsec = ns % 1000000000;
  }
  return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
  struct timespec is;
  clock_gettime(CLOCK_REALTIME, &is);
  if (at) { at->tv_sec = is.tv_sec; at->tv_usec = is.tv_nsec / 1000; }
  return 0;
}

time_t time(time_t *at) {
  struct timespec is;
  clock_gettime(CLOCK_REALTIME, &is);
  if (at) *at = is.tv_sec;
  return is.tv_sec;
}
"""
_NAMES = ("clock_s", "sync_s", "write_s", "sync_errno", "write_errno")


def machine_unavailable() -> str | None:
    """Why `Machine` cannot be used here; None if it can."""
    return None if shutil.which("cc") else "cc, a C compiler, is not on the PATH; install gcc"


class Machine:
    """The clock and the disk of the commands that are started with its ``environment()``."""

    def __init__(self) -> None:
        if why := machine_unavailable():
            raise UnsupportedError(why)
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-machine-")
        root = Path(self._folder.name)
        (root / "machine.c").write_text(_SOURCE)
        self._library = root / "machine.so"
        built = subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", "-o", self._library, root / "machine.c", "-ldl"], capture_output=True,
            text=True,
        )  # fmt: skip
        if built.returncode:
            raise UnsupportedError(f"Machine: the preload library cannot be built: {built.stderr.strip()}")
        self._numbers = root / "numbers"
        self._numbers.write_bytes(bytes(4096))
        with open(self._numbers, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 4096)

    def environment(self) -> dict[str, str]:
        """The environment variables that apply this machine to a command."""
        return {"LD_PRELOAD": str(self._library), "SHOAL_MACHINE": str(self._numbers)}

    def set(self, **numbers: Any) -> None:
        """Change some of the numbers, with immediate effect on all commands.

        ``clock_s``: seconds by which the wall clock is ahead (negative: behind). ``sync_s``, ``write_s``: additional
        seconds per sync and per write. ``sync_errno``, ``write_errno``: the error with which they fail (`errno.EIO`,
        `errno.ENOSPC`); 0: none.
        """
        for name, value in numbers.items():
            if name not in _NAMES:
                raise ConfigError(f"Machine.set takes only {', '.join(_NAMES)}, got {name!r}")
            place = _NAMES.index(name)
            self._memory[8 * place : 8 * place + 8] = struct.pack(
                "q", int(value * 1e9 if name.endswith("_s") else value)
            )

    def heal(self) -> None:
        """Restore the correct clock and the fast disk."""
        self.set(**dict.fromkeys(_NAMES, 0))

    @property
    def syncs(self) -> int:
        """The number of syncs so far."""
        return ctypes.c_int64.from_buffer(self._memory, 8 * len(_NAMES)).value

    def close(self) -> None:
        self._memory.close()
        self._folder.cleanup()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
