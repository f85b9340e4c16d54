"""`shoal up`: run a complete online system from one file, and control a running one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.cli.shared.arguments import Verbs, names_verb, parse, run_verb
from shoal.cli.shared.console import print_json, print_table
from shoal.cli.shared.stopping import stop_event
from shoal.errors import ConfigError, DeadlineError, UsageError
from shoal.up.config import load_online
from shoal.up.files import holder, log_path, only_one, read_state

ABOUT = """Run a complete online system on this machine from one file: parameter servers, trainer, replicas.

Example, with generated clicks:
  shoal up --init try
  shoal up try/online.toml

The file is a `shoal train` configuration with optional sections for the other processes:

  [data]
  train = ["days/*.csv"]       # files, or a stream
  format = "csv"
  label = "click"

  [features.user]
  [features.item]

  [servers]                    # parameter servers hold the rows; without it the trainer does
  count = 2

  [replicas]
  count = 2
  rest_port = 8501             # and 8502; without it the system chooses ports

  [serve.guard]                # stops pushes when the model gets worse
  min_auc = 0.6

By default checkpoints, exports, registry, logs and state are in online.run next to the file. Each process is an
ordinary command: --dry-run prints them. A process that dies is restarted after a delay that doubles each time; after
5 failures in a row ([up] max_restarts) it counts as failed. Ctrl-C or SIGTERM stops the trainer, which saves a
checkpoint, then replicas, then servers. If `shoal up` itself is killed, its processes end with it.

While it runs, from another shell:
  shoal up status online.toml            # processes, uptimes, restarts and reasons
  shoal up logs online.toml trainer      # the last lines; --follow keeps printing new ones
  shoal up restart online.toml replica-0
  shoal up stop online.toml
  shoal top --up online.toml             # rows, rates, lag, errors; the status page has their history
  shoal rollback online.toml             # return to a checkpoint from before the guard tripped

On other systems: --on ray runs the same processes on the Ray cluster at RAY_ADDRESS, or on a local one. --write compose
and --write k8s print files for Docker Compose and Kubernetes with the same commands, --write dockerfile one for the
image.

Exit codes: 0 stopped, 1 a process failed, 2 wrong usage or configuration."""


@dataclass(frozen=True, kw_only=True)
class _System:
    """The system of a command."""

    config: Path = Path("online.toml")
    """The file that describes the system."""


@dataclass(frozen=True, kw_only=True)
class Start(_System):
    """Flags of `shoal up`."""

    init: Path | None = None
    """Write a folder with generated clicks and a starter online.toml."""
    dry_run: bool = False
    """Print the commands and start nothing."""
    on: Literal["local", "ray"] = "local"
    """Where to run the processes."""
    write: Literal["", "compose", "k8s", "dockerfile"] = ""
    """Print a file for another system that runs the processes."""
    image: str = "shoal:latest"
    """With --write: the container image."""
    detach: bool = False
    """Run in the background; return when everything is ready."""
    json: bool = False
    """Print one JSON object per event on stdout."""


@dataclass(frozen=True, kw_only=True)
class Status(_System):
    """Show the processes of a system.

    Example: shoal up status online.toml
    """

    json: bool = False
    """Print the state as JSON."""


@dataclass(frozen=True, kw_only=True)
class Stop(_System):
    """Stop a running system: trainer, replicas, servers, in this order.

    Example: shoal up stop online.toml
    """

    timeout: float = 300.0
    """Seconds to wait for it to stop."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class Logs(_System):
    """Show the last lines of a process's log.

    Example: shoal up logs online.toml trainer
    """

    name: str = ""
    """Name of the process; all of them by default."""
    lines: int = 20
    """Number of lines per process."""
    follow: bool = False
    """Keep printing new lines until Ctrl-C."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class Restart(_System):
    """Stop a process and start it again.

    Example: shoal up restart online.toml trainer
    """

    name: str = ""
    """Name of the process."""
    timeout: float = 180.0
    """Seconds to wait for it to be ready again."""
    json: bool = False
    """Print JSON."""


def main(argv: list[str]) -> int:
    verbs: Verbs = {
        "status": (Status, status, ("config",)),
        "stop": (Stop, stop, ("config",)),
        "logs": (Logs, logs, ("config", "name")),
        "restart": (Restart, restart, ("config", "name")),
    }
    if names_verb(argv, verbs):
        return run_verb("up", "", verbs, argv)
    return up(parse(Start, argv, "up", ABOUT, positional="config"))


def up(options: Start) -> int:
    from shoal.up.plan import check, plan
    from shoal.up.supervisor import Supervisor

    if options.init is not None:
        from shoal.up.example import write_example

        print(f"Next:\n\n  shoal up {write_example(options.init)}\n", file=sys.stderr)
        return 0
    if options.write == "dockerfile":
        return _write(options, None)
    online = load_online(options.config)
    check(online)
    if options.write:
        return _write(options, online)
    if options.detach:
        return _detach(options, online)
    launcher = _launcher(options)
    try:
        if options.dry_run:
            commands = plan(online, launcher.places(online))
            if options.json:
                print_json([{"name": one.name, "command": one.command, "after": one.after} for one in commands])
            else:
                print("\n".join(f"# {one.name}\n{one.command}" for one in commands))
            return 0
        with only_one(online.dir), stop_event() as stopping:
            return Supervisor(online, launcher, _teller(options, online)).run(stopping)
    finally:
        launcher.close()


def _launcher(options: Start) -> Any:
    if options.on == "ray" and not options.dry_run:
        from shoal.up.ray import RayLauncher

        return RayLauncher()
    from shoal.up.local import LocalLauncher

    return LocalLauncher()


def _write(options: Start, online: Any) -> int:
    from shoal.up.write import compose, dockerfile, k8s

    makers: dict[str, Callable[[], str]] = {
        "compose": lambda: compose.text(online, options.image),
        "k8s": lambda: k8s.text(online, options.image),
        "dockerfile": dockerfile.text,
    }
    print(makers[options.write](), end="")
    return 0


def _teller(options: Start, online: Any) -> Callable[..., None]:
    def tell(event: str, name: str, text: str, **more: Any) -> None:
        if options.json:
            print(json.dumps({"event": event, "name": name, "text": text, "at": time.time(), **more}), flush=True)
            return
        if event == "plan":
            return
        print(f"{time.strftime('%H:%M:%S')}  {name or 'shoal up':<10} {text}", flush=True)
        for line in more.get("tail", ()):
            print(f"{'':10}{name:<10} | {line}", flush=True)
        if event == "up":
            print(f"\n  shoal predict {online.registry_url} --model {online.model} '{{…}}'\n"
                  f"  shoal top --up {online.file}\n", flush=True)  # fmt: skip

    return tell


def _detach(options: Start, online: Any) -> int:
    """Start the same command in the background and wait until it is ready."""

    if (pid := holder(online.dir)) is not None:
        raise UsageError(
            f"`shoal up` is already running in {online.dir} as process {pid}; stop it with `shoal up stop`"
        )
    path = log_path(online.dir, "up")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    begun = time.time()
    with open(path, "ab") as log:
        command = [sys.executable, "-m", "shoal", "up", online.file, "--on", options.on]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    end = time.monotonic() + online.up.start_s * 2 + online.replicas.wait_s
    while True:
        code = child.poll()
        if code is not None:
            print(f"shoal up ended with exit code {code}; its log {path} ends with:", file=sys.stderr)
            print("\n".join(Path(path).read_text(errors="replace").splitlines()[-12:]), file=sys.stderr)
            return code
        if holder(online.dir) == child.pid:
            with contextlib.suppress(ConfigError):  # until the state is written
                state = read_state(online.dir)
                if state.get("pid") == child.pid and state.get("ready"):
                    break
        if time.monotonic() > end:
            raise DeadlineError(f"not everything was ready in time; see {path} and `shoal up status {online.file}`")
        time.sleep(0.1)
    ready = {"pid": child.pid, "seconds": round(time.time() - begun, 2), "log": path}
    print(json.dumps(ready) if options.json else f"up as process {child.pid} after {ready['seconds']} s; log: {path}")
    return 0


# --- commands for a running system ------------------------------------------------------------------------------------


def status(options: Status) -> int:
    """Print the processes; return 0 if all are ready or done, else 1."""

    online = load_online(options.config)
    state = read_state(online.dir)
    runs = holder(online.dir) is not None
    guard = _guard(online.checkpoints)
    if not runs:
        for row in state["processes"]:
            row["phase"], row["pid"] = "stopped", None
    good = runs and all(row["phase"] in ("ready", "done") for row in state["processes"])
    if options.json:
        print_json({"running": runs, **state, "guard": guard})
        return 0 if good else 1
    rows = [
        (row["name"], row["phase"], str(row["pid"] or ""), _age(time.time() - row["since"]) if runs else "",
         str(row["restarts"]), row["metrics"], row["reason"])
        for row in state["processes"]
    ]  # fmt: skip
    title = f"{online.file}: " + (f"running as process {state['pid']}" if runs else "not running")
    print_table(title, ("process", "phase", "pid", "for", "restarts", "metrics", "reason"), rows, left=7)
    if runs and state.get("page"):
        print(f"status page {state['page']}")
    if guard is not None:
        print(f"ALERT: the guard stopped pushes at step {guard['step']:,}: {guard['reason']}", file=sys.stderr)
    return 0 if good else 1


def _guard(folder: str) -> dict[str, Any] | None:
    """Read why the run's guard tripped, without importing the trainer's libraries."""
    try:
        return json.loads(Path(folder, "guard.json").read_text())
    except (OSError, ValueError):
        return None


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def stop(options: Stop) -> int:

    folder = load_online(options.config).dir
    pid = holder(folder)
    if not pid:
        print(json.dumps({"stopped": False}) if options.json else f"`shoal up` is not running in {folder}")
        return 0
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + options.timeout
    while holder(folder) == pid:
        if time.monotonic() > end:
            raise DeadlineError(f"process {pid} did not end within {options.timeout:g} s; see `shoal up status`")
        time.sleep(0.05)
    print(json.dumps({"stopped": True, "pid": pid}) if options.json else "stopped")
    return 0


def restart(options: Restart) -> int:
    from shoal.up.control import restart_process

    if not options.name:
        raise UsageError("the process must be named: shoal up restart online.toml trainer")
    row = restart_process(load_online(options.config).dir, options.name, timeout_s=options.timeout)
    print(json.dumps(row) if options.json else f"{options.name} is {row['phase']}, process {row['pid']}")
    return 0


def logs(options: Logs) -> int:

    online = load_online(options.config)
    rows = {row["name"]: row["log"] for row in read_state(online.dir)["processes"]}
    if options.name and options.name not in rows:
        raise UsageError(f"there is no process {options.name!r}; there are {', '.join(rows)}")
    paths = {options.name: rows[options.name]} if options.name else rows
    if options.json:
        print_json({name: _last(path, options.lines) for name, path in paths.items()})
        return 0
    for name, path in paths.items():
        if len(paths) > 1:
            print(f"==> {name}: {path}")
        print("\n".join(_last(path, options.lines)))
    if options.follow:
        from shoal.up.control import follow

        try:
            for name, line in follow(paths):
                print(f"{name}: {line}" if len(paths) > 1 else line, flush=True)
        except KeyboardInterrupt:  # the normal end of --follow
            pass
    return 0


def _last(path: str, lines: int) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []
