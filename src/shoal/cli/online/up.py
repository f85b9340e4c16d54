"""`shoal up`: a whole online system from one file, and what can be asked of one that runs."""

from __future__ import annotations

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

from shoal.cli.shared.arguments import Verbs, parse, run_verb
from shoal.cli.shared.console import print_json, print_table
from shoal.cli.shared.stopping import stop_event
from shoal.errors import DeadlineError, UsageError

ABOUT = """Run a whole online system on this machine: parameter servers, trainer, replicas, from one file.

Example, with clicks that are generated:

  shoal up --init try

  shoal up try/online.toml

The file is a configuration of `shoal train` with sections for the other processes, all of them optional:

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

  [serve.guard]                # pushes stop by themselves when the model turns bad
  min_auc = 0.6

Checkpoints, exports, registry, logs and state are in online.run next to the file, unless the file says otherwise.
Each process is a command that you could type: --dry-run prints them. A process that dies is started again after a while
that doubles each time; after 5 failures in a row ([up] max_restarts) it counts as failed. Ctrl-C or SIGTERM stops the
trainer, which saves, then replicas, then servers. If `shoal up` itself is killed, its processes end with it.

While it runs, from another shell:

  shoal up status online.toml            # who runs, since when, how often it was restarted, why

  shoal up logs online.toml trainer      # the last lines; --follow for more as they come

  shoal up restart online.toml replica-0

  shoal up stop online.toml

  shoal top --up online.toml             # rows, rates, lag, errors; the status page has their history

  shoal rollback online.toml             # back to a checkpoint from before the guard tripped

Elsewhere: --on ray places the same processes on the Ray cluster that RAY_ADDRESS names, else a local one;
--write compose and --write k8s print files for Docker Compose and Kubernetes that name the same commands,
--write dockerfile the image.

Exit codes: 0 stopped, 1 a process failed, 2 wrong usage or configuration."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Flags of `shoal up`."""

    config: Path = Path("online.toml")
    """The file that describes the system."""
    init: Path | None = None
    """Write a folder with generated clicks and an online.toml to begin with."""
    dry_run: bool = False
    """Print the commands and start nothing."""
    on: Literal["local", "ray"] = "local"
    """Where the processes run."""
    write: Literal["", "compose", "k8s", "dockerfile"] = ""
    """Print a file for somebody else who runs the processes."""
    image: str = "shoal:latest"
    """Of --write: the container image."""
    detach: bool = False
    """Return when everything is ready, and leave it running."""
    json: bool = False
    """One JSON object per event on stdout."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """Shows the processes of a system.

    Example: shoal up status online.toml
    """

    config: Path = Path("online.toml")
    json: bool = False
    """Print the state as JSON."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stops a system that runs: trainer, replicas, servers, in this order.

    Example: shoal up stop online.toml
    """

    config: Path = Path("online.toml")
    timeout: float = 300.0
    """Seconds to wait for its end."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Logs:
    """Shows the last lines that a process wrote.

    Example: shoal up logs online.toml trainer
    """

    config: Path = Path("online.toml")
    name: str = ""
    """The process; without it those of all."""
    lines: int = 20
    follow: bool = False
    """Show more as it comes, until Ctrl-C."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Stops a process and starts it again.

    Example: shoal up restart online.toml trainer
    """

    config: Path = Path("online.toml")
    name: str = ""
    timeout: float = 180.0
    """Seconds that it may take to be ready again."""
    json: bool = False


def main(argv: list[str]) -> int:
    verbs: Verbs = {
        "status": (Status, status, ("config",)),
        "stop": (Stop, stop, ("config",)),
        "logs": (Logs, logs, ("config", "name")),
        "restart": (Restart, restart, ("config", "name")),
    }
    if argv[:1] and argv[0] in verbs:
        return run_verb("up", "", verbs, argv)
    options = parse(Start, argv, "up", ABOUT, positional="config")
    return options if isinstance(options, int) else up(options)


def up(options: Start) -> int:
    from shoal.up.config import load_online
    from shoal.up.files import only_one
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
    """Starts the same command in the background and waits until it is ready."""
    from shoal.up.files import holder, log_path, read_state

    if (pid := holder(online.dir)) is not None:
        raise UsageError(f"`shoal up` runs in {online.dir} already, as process {pid}; stop it with `shoal up stop`")
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
            state = _state_of(read_state, online.dir)
            if state.get("pid") == child.pid and state.get("ready"):
                break
        if time.monotonic() > end:
            raise DeadlineError(f"not everything was ready in time; see {path} and `shoal up status {online.file}`")
        time.sleep(0.1)
    ready = {"pid": child.pid, "seconds": round(time.time() - begun, 2), "log": path}
    print(json.dumps(ready) if options.json else f"up as process {child.pid} after {ready['seconds']} s; log: {path}")
    return 0


def _state_of(read: Callable[[str], dict[str, Any]], folder: str) -> dict[str, Any]:
    """The state; empty until there is one."""
    try:
        return read(folder)
    except Exception:
        return {}


# --- of a system that runs --------------------------------------------------------------------------------------------


def status(options: Status) -> int:
    """0 where all processes are ready or done, 1 where not."""
    from shoal.up.config import load_online
    from shoal.up.files import holder, read_state

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
    """What the run's guard has to say; read without the trainer's libraries."""
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
    from shoal.up.config import load_online
    from shoal.up.files import holder

    folder = load_online(options.config).dir
    pid = holder(folder)
    if not pid:
        print(json.dumps({"stopped": False}) if options.json else f"`shoal up` does not run in {folder}")
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
    from shoal.up.config import load_online
    from shoal.up.control import restart_process

    if not options.name:
        raise UsageError("name the process: shoal up restart online.toml trainer")
    row = restart_process(load_online(options.config).dir, options.name, timeout_s=options.timeout)
    print(json.dumps(row) if options.json else f"{options.name} is {row['phase']}, process {row['pid']}")
    return 0


def logs(options: Logs) -> int:
    from shoal.up.config import load_online
    from shoal.up.files import read_state

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
        except KeyboardInterrupt:  # how one leaves it
            pass
    return 0


def _last(path: str, lines: int) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []
