"""`Supervisor`: starts, watches and restarts the processes of a system, and stops them in order."""

from __future__ import annotations

import json
import os
import shlex
import signal
import ssl
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from shoal.durable import write_whole
from shoal.up import decide, files
from shoal.up.config import Online
from shoal.up.decide import ALIVE, ENDED, Action, Phase, State
from shoal.up.local import Launcher, Running
from shoal.up.page import open_page
from shoal.up.plan import Process, plan

TICK_S = 0.1
PROBE_S = 1.0
SIGNAL_LINES = 3
"""Log lines to show for a process that a signal ended, because its log does not contain the reason."""

Report = Callable[..., None]
"""Receives every event: its name, the process, a sentence, and further fields."""


class Supervisor:
    """Keeps a system running until it is stopped. Call `run` on the main thread: children end with that thread.

    Args:
        online: the system.
        launcher: starts the processes.
        report: receives each start, restart and failure, with its reason.
    """

    def __init__(self, online: Online, launcher: Launcher, report: Report) -> None:
        self._online, self._launcher, self._report = online, launcher, report
        self._rules, self.folder = online.up, online.dir
        self.processes = plan(online, launcher.places(online))
        self._by_name = {process.name: process for process in self.processes}
        self.states = {process.name: State() for process in self.processes}
        self._running: dict[str, Running] = {}
        self._terminated: set[str] = set()
        self._logs = {
            name: files.Log(files.log_path(self.folder, name), self._rules.log_bytes, self._rules.log_files)
            for name in self._by_name
        }
        self._begun = time.time()
        self.ready_at: float | None = None
        self._written: Any = None
        self._why_stopping = ""
        self.events: deque[dict[str, Any]] = deque(maxlen=200)
        self.page_url = ""

    def run(self, stop: threading.Event) -> int:
        """Run until stopped. Returns 0 after an orderly stop, 1 if a process failed, 2 for a wrong configuration."""
        files.clear_requests(self.folder)
        end_leftovers(self.folder, self._report)
        for process in self.processes:
            self._report("plan", process.name, process.command)
        page = open_page(self, self._online)
        self.page_url = page.url if page is not None else ""
        if page is not None:
            self._report("page", "", f"status page {page.url}", url=page.url)
        try:
            while not self._over(stop):
                self._look()
                self._answer()
                stopping = stop.is_set() or bool(self._why_stopping)
                for action in decide.next_actions(
                    self._rules, self.processes, self.states, self._terminated, stopping, time.monotonic()
                ):
                    self._do(action)
                self._write()
                stop.wait(TICK_S) if not stopping else time.sleep(TICK_S)
        finally:
            for one in self._running.values():
                one.kill()
            if page is not None:
                page.stop()
            self._write()
            for log in self._logs.values():
                log.close()
        return decide.exit_code(self.states.values())

    def _over(self, stop: threading.Event) -> bool:
        stopping = stop.is_set() or bool(self._why_stopping)
        return stopping and not any(state.phase in ALIVE for state in self.states.values())

    # --- checks -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Check which processes have exited and which are ready."""
        for name, one in list(self._running.items()):
            code = one.poll()
            if code is not None:
                self._ended(name, code)
        for name, state in self.states.items():
            if state.phase == Phase.STARTING and self._answers(name):
                now = time.monotonic()
                self.states[name] = decide.ready(state, now)
                self._say("ready", name, f"ready after {now - state.since:.1f} s", metrics=self._by_name[name].metrics)
        if self.ready_at is None and all(s.phase in (Phase.READY, Phase.DONE) for s in self.states.values()):
            self.ready_at = time.time()
            self._say("up", "", f"all {len(self.states)} processes are ready after {self.ready_at - self._begun:.1f} s")

    def _ended(self, name: str, code: int) -> None:
        now, before = time.monotonic(), self.states[name]
        del self._running[name]
        self._terminated.discard(name)
        after = decide.exited(self._rules, self._by_name[name], before, code, now)
        self.states[name] = after
        tail = []
        if after.phase in (Phase.FAILED, Phase.WAITING) and before.then != "start":
            tail = self._logs[name].tail()[-SIGNAL_LINES if code < 0 else 0 :]
        event = {Phase.FAILED: "failed", Phase.WAITING: "restart"}.get(after.phase, "ended")
        self._say(event, name, after.reason, exit=decide.how_it_ended(code), tail=tail)
        if after.phase == Phase.FAILED and self.ready_at is None:
            self._why_stopping = f"{name} failed before everything was ready"
            self._say("stop", "", self._why_stopping)

    def _answers(self, name: str) -> bool:
        try:
            url = self._by_name[name].probe
            tls = ssl._create_unverified_context() if url.startswith("https:") else None  # our own process
            with urllib.request.urlopen(url, timeout=PROBE_S, context=tls) as answer:
                return answer.status == 200
        except (OSError, ValueError):
            return False

    # --- actions ------------------------------------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        name, now = action.name, time.monotonic()
        state = self.states[name]
        if action.do == "start":
            self._logs[name].forget()
            self._logs[name].write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {self._by_name[name].command}")
            try:
                self._running[name] = self._launcher.start(self._by_name[name], self._logs[name])
            except OSError as error:
                self.states[name] = replace(state, phase=Phase.FAILED, reason=f"could not be started: {error}")
                self._say("failed", name, self.states[name].reason)
                self._why_stopping = self._why_stopping or f"{name} could not be started"
                return
            self.states[name] = decide.started(state, now)
            self._say("start", name, f"started as process {self._running[name].pid}", pid=self._running[name].pid)
        elif action.do == "terminate":
            if state.phase != Phase.STOPPING:
                self.states[name] = decide.asked(state, "stop", action.reason, now)
            self._terminated.add(name)
            self._running[name].terminate()
            self._say("stopping", name, f"stopping: {action.reason}")
        else:
            self.states[name] = replace(state, killed=state.phase == Phase.STOPPING)
            self._running[name].kill()
            self._say("kill", name, action.reason)

    def _answer(self) -> None:
        """Handle the requests of other commands."""
        for request, answer in files.requests(self.folder):
            verb, name = request.get("do"), request.get("name")
            reason = str(request.get("reason") or "another command")
            response: dict[str, Any] = {}
            if name not in self.states:
                response["error"] = f"there is no process {name!r}; there are {', '.join(self.states)}"
            elif verb == "restart" or (verb == "release" and self.states[name].phase in ENDED):
                self.states[name] = decide.asked(self.states[name], "start", reason, time.monotonic())
            elif verb == "hold":
                self.states[name] = decide.asked(self.states[name], "hold", reason, time.monotonic())
            elif verb != "release":
                response["error"] = f"requests must be restart, hold or release, got {verb!r}"
            if "error" not in response:
                wanted = {"hold": "stop", "release": "start"}.get(str(verb), verb)
                self._say("asked", str(name), f"asked to {wanted} by {reason}")
            self._write()
            write_whole(answer, json.dumps(response))

    def _say(self, event: str, name: str, text: str, **more: Any) -> None:
        """Report an event, after writing the state so that other commands can already read it."""
        self._write()
        self.events.append({"at": time.time(), "event": event, "name": name, "text": text})
        self._report(event, name, text, **more)

    def _write(self) -> None:
        """Write the state for other commands if it has changed."""
        blocked = decide.blocked(self.processes, self.states)
        rows = {
            name: (state.phase, state.reason or blocked.get(name, ""), state.restarts, self._pid(name))
            for name, state in self.states.items()
        }
        now = self.ready_at, rows
        if now == self._written:
            return
        self._written = now
        files.write_state(self.folder, {
            "file": os.path.abspath(self._online.file), "pid": os.getpid(), "begun": self._begun,
            "ready": self.ready_at, "page": self.page_url, "registry": self._online.registry_url,
            "model": self._online.model, "processes": self.rows(),
        })  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """The state of each process, for other commands."""
        blocked = decide.blocked(self.processes, self.states)
        return [self._row(process, blocked) for process in self.processes]

    def _pid(self, name: str) -> int | None:
        return self._running[name].pid if name in self._running else None

    def _row(self, process: Process, blocked: dict[str, str]) -> dict[str, Any]:
        state = asdict(self.states[process.name])
        age = time.monotonic() - state["since"] if state["since"] else 0.0
        return {
            "name": process.name, "kind": process.kind, "phase": state["phase"], "pid": self._pid(process.name),
            "reason": state["reason"] or blocked.get(process.name, ""), "restarts": state["restarts"],
            "failures": state["failures"], "since": time.time() - age, "metrics": process.metrics,
            "page": process.page, "ports": dict(process.ports), "command": process.command,
            "log": self._logs[process.name].path,
        }  # fmt: skip


def end_leftovers(folder: str, report: Report) -> None:
    """End processes that outlived an earlier `shoal up` that was killed; usually there are none."""
    try:
        state = files.read_state(folder)
    except Exception:
        return
    for row in state.get("processes", ()):
        pid = row.get("pid")
        if isinstance(pid, int) and _is_ours(pid, row.get("command", "")):
            report("leftover", row["name"], f"ending process {pid}, which an earlier `shoal up` left")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            end = time.monotonic() + 10
            while time.monotonic() < end and _is_ours(pid, row["command"]):
                time.sleep(0.05)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def _is_ours(pid: int, command: str) -> bool:
    """Whether the process ``pid`` runs ``command``."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            given = file.read().decode(errors="replace").split("\0")
        with open(f"/proc/{pid}/stat") as file:
            zombie = file.read().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False
    wanted = shlex.split(command)[1:]
    return not zombie and bool(wanted) and [each for each in given if each][-len(wanted) :] == wanted
