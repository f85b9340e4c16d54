"""A supervisor's decisions: pure functions of its state and the time, which return their reasons."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from shoal.up.config import Up
from shoal.up.plan import STOP_ORDER, Process


class Phase(StrEnum):
    """The phase of a process."""

    WAITING = "waiting"
    """It starts when the processes it depends on are ready, or after the delay that follows a failure."""
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    HELD = "held"
    """It was stopped on request; it starts again when the request is withdrawn."""
    DONE = "done"
    """It finished successfully."""
    FAILED = "failed"
    """It will not be restarted."""
    STOPPED = "stopped"


ALIVE = frozenset({Phase.STARTING, Phase.READY, Phase.STOPPING})
ENDED = frozenset({Phase.DONE, Phase.FAILED, Phase.STOPPED, Phase.HELD})


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of one process."""

    phase: Phase = Phase.WAITING
    since: float = 0.0
    """When it entered this phase."""
    due: float = 0.0
    """WAITING: it starts at this time or later."""
    failures: int = 0
    """The number of consecutive failures."""
    restarts: int = 0
    """The total number of restarts."""
    reason: str = ""
    """Why it is in this phase."""
    then: Literal["stop", "start", "hold"] = "stop"
    """STOPPING: what to do afterwards."""
    killed: bool = False
    """STOPPING: SIGKILL was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An action on one process."""

    do: Literal["start", "terminate", "kill"]
    name: str
    reason: str


NOT_AGAIN = {2: "its configuration is wrong", 3: "[serve.guard] ended the run; `shoal rollback` restarts it"}
"""Exit codes after which a restart cannot help."""


def how_it_ended(code: int) -> str:
    """``exit code 1``, ``SIGKILL``.

    >>> how_it_ended(1), how_it_ended(-9), how_it_ended(137)
    ('exit code 1', 'SIGKILL', 'exit code 137')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def backoff_s(rules: Up, failures: int) -> float:
    """The wait before the restart after ``failures`` consecutive failures."""
    return min(rules.max_backoff_s, rules.backoff_s * 2 ** min(60, max(0, failures - 1)))


def exited(rules: Up, process: Process, state: State, code: int, now: float) -> State:
    """The state of a process that has exited."""
    how = how_it_ended(code)
    if state.phase == Phase.STOPPING:
        after = {"stop": Phase.STOPPED, "start": Phase.WAITING, "hold": Phase.HELD}[state.then]
        how = f"killed, because it did not end within {rules.stop_s:g} s" if state.killed else how
        return State(
            phase=after, since=now, due=now, restarts=state.restarts, reason=f"stopped ({how}): {state.reason}"
        )
    if code == 0 and process.finishes:
        return State(phase=Phase.DONE, since=now, restarts=state.restarts, reason="it has finished")
    stable = state.phase == Phase.READY and now - state.since >= rules.stable_s
    failures = 1 if stable else state.failures + 1
    if (code in NOT_AGAIN and process.finishes) or code == 2:
        return replace(
            state, phase=Phase.FAILED, since=now, failures=failures, reason=f"ended with {how}: {NOT_AGAIN[code]}"
        )
    if failures > rules.max_restarts:
        reason = f"ended with {how}; it failed {failures} times in a row and is not restarted"
        return replace(state, phase=Phase.FAILED, since=now, failures=failures, reason=reason)
    wait = backoff_s(rules, failures)
    reason = f"ended with {how}; restart {failures} of at most {rules.max_restarts} in {wait:g} s"
    return replace(state, phase=Phase.WAITING, since=now, due=now + wait, failures=failures, reason=reason)


def started(state: State, now: float) -> State:
    """The state of a process that was just started."""
    return replace(
        state, phase=Phase.STARTING, since=now, restarts=state.restarts + (state.since > 0 and bool(state.reason)),
        then="stop", killed=False,
    )  # fmt: skip


def ready(state: State, now: float) -> State:
    """The state of a process that answers."""
    return replace(state, phase=Phase.READY, since=now, reason="")


def asked(state: State, then: Literal["stop", "start", "hold"], reason: str, now: float) -> State:
    """The state of a process after a request to stop, restart or hold it."""
    if state.phase in ALIVE:
        since = state.since if state.phase == Phase.STOPPING else now
        return replace(state, phase=Phase.STOPPING, since=since, then=then, reason=reason, failures=0)
    after = {"stop": Phase.STOPPED, "start": Phase.WAITING, "hold": Phase.HELD}[then]
    return replace(state, phase=after, since=now, due=now, reason=reason, failures=0)


def next_actions(
    rules: Up,
    processes: Sequence[Process],
    states: Mapping[str, State],
    terminated: Collection[str],
    stopping: bool,
    now: float,
) -> list[Action]:
    """The actions to take now.

    Args:
        terminated: processes that have already been sent SIGTERM.
        stopping: whether to stop the system, one kind of process after the other, in `STOP_ORDER`.
    """
    actions: list[Action] = []
    turn = _whose_turn(processes, states) if stopping else None
    for process in processes:
        state = states[process.name]
        if state.phase == Phase.STOPPING:
            late = now - state.since > rules.stop_s
            if process.name not in terminated:
                actions.append(Action(do="terminate", name=process.name, reason=state.reason))
            elif late and not state.killed:
                reason = f"it did not end within {rules.stop_s:g} s of SIGTERM"
                actions.append(Action(do="kill", name=process.name, reason=reason))
        elif stopping and process.kind == turn and state.phase in ALIVE:
            actions.append(Action(do="terminate", name=process.name, reason="the system is stopping"))
        elif state.phase == Phase.STARTING and now - state.since > rules.start_s + process.patience_s:
            reason = f"it was not ready within {rules.start_s + process.patience_s:g} s"
            actions.append(Action(do="kill", name=process.name, reason=reason))
        elif state.phase == Phase.WAITING and not stopping and now >= state.due:
            missing = [name for name in process.after if not _allows_dependents(states[name])]
            if not missing:
                actions.append(Action(do="start", name=process.name, reason=state.reason))
    return actions


def exit_code(states: Iterable[State]) -> int:
    """The exit code of the system: 0 after an orderly stop, 1 if a process failed, 2 if a configuration is wrong."""
    reasons = [state.reason for state in states if state.phase == Phase.FAILED]
    return 2 if any(NOT_AGAIN[2] in reason for reason in reasons) else int(bool(reasons))


def _allows_dependents(state: State) -> bool:
    """Whether dependent processes may start. A process that restarts does not delay them."""
    return state.phase in (Phase.READY, Phase.DONE) or state.restarts > 0


def _whose_turn(processes: Sequence[Process], states: Mapping[str, State]) -> str | None:
    alive = {process.kind for process in processes if states[process.name].phase in ALIVE}
    return next((kind for kind in STOP_ORDER if kind in alive), None)


def blocked(processes: Sequence[Process], states: Mapping[str, State]) -> dict[str, str]:
    """The processes that wait for others, with the reason."""
    found = {}
    for process in processes:
        if states[process.name].phase == Phase.WAITING:
            missing = [name for name in process.after if not _allows_dependents(states[name])]
            if missing:
                found[process.name] = f"waits for {', '.join(missing)}"
    return found
