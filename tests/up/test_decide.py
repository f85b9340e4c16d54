"""The next action of a supervisor, as plain values: starts, restarts, deadlines, the order of a stop."""

import pytest

from shoal.up.config import Up
from shoal.up.decide import (
    Phase,
    State,
    asked,
    backoff_s,
    blocked,
    exit_code,
    exited,
    how_it_ended,
    next_actions,
    ready,
    started,
)
from shoal.up.plan import Process

RULES = Up(max_restarts=3, backoff_s=1.0, max_backoff_s=5.0, start_s=10.0, stop_s=20.0, stable_s=60.0)


def process(name, kind, **more):
    return Process(name=name, kind=kind, arguments=(kind,), probe="http://h:1/", metrics="h:1", **more)


SERVER = process("server-0", "server")
TRAINER = process("trainer", "trainer", after=("server-0",), finishes=True)
REPLICA = process("replica-0", "replica", patience_s=30.0)
ALL = [SERVER, TRAINER, REPLICA]


def actions(states, *, terminated=(), stopping=False, now=100.0):
    given = {one.name: states.get(one.name, State(phase=Phase.READY)) for one in ALL}
    return [(one.do, one.name) for one in next_actions(RULES, ALL, given, terminated, stopping, now)]


def test_a_process_starts_when_those_that_it_needs_are_ready():
    fresh = {one.name: State() for one in ALL}
    assert actions(fresh) == [("start", "server-0"), ("start", "replica-0")]
    assert blocked(ALL, fresh) == {"trainer": "waits for server-0"}
    starting = fresh | {"server-0": State(phase=Phase.STARTING, since=99.0), "replica-0": State(phase=Phase.READY)}
    assert actions(starting) == []
    assert actions({"trainer": State()}) == [("start", "trainer")]
    assert actions({"trainer": State(), "server-0": State(phase=Phase.DONE)}) == [("start", "trainer")]


def test_a_server_that_comes_back_does_not_hold_up_the_trainer():
    again = {"server-0": State(phase=Phase.STARTING, since=99.0, restarts=1), "trainer": State()}
    assert actions(again) == [("start", "trainer")]


def test_waits_before_restarts_double_up_to_a_limit():
    assert [backoff_s(RULES, n) for n in (1, 2, 3, 4, 99, 10**9)] == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    state = State(phase=Phase.READY, since=0.0)
    for failures, wait in ((1, 1.0), (2, 2.0), (3, 4.0)):
        state = exited(RULES, SERVER, state, -9, 50.0)
        assert (state.phase, state.due, state.failures) == (Phase.WAITING, 50.0 + wait, failures)
        assert f"ended with SIGKILL; restart {failures} of at most 3 in {wait:g} s" in state.reason
        assert actions({"server-0": state}, now=50.0) == []
        assert actions({"server-0": state}, now=50.0 + wait) == [("start", "server-0")]
        state = started(state, 50.0 + wait)
    state = exited(RULES, SERVER, state, 1, 60.0)
    assert (state.phase, state.restarts) == (Phase.FAILED, 3)
    assert "it failed 4 times in a row and is not restarted" in state.reason
    assert actions({"server-0": state}, now=10**6) == []


def test_a_process_that_was_ready_for_long_begins_to_count_anew():
    state = State(phase=Phase.READY, since=0.0, failures=3)
    assert exited(RULES, SERVER, state, 1, 59.0).phase == Phase.FAILED
    assert exited(RULES, SERVER, state, 1, 60.0).failures == 1
    assert exited(RULES, SERVER, State(phase=Phase.STARTING, since=0.0, failures=3), 1, 999.0).phase == Phase.FAILED


@pytest.mark.parametrize(
    ("one", "code", "phase", "reason"),
    [
        (TRAINER, 0, Phase.DONE, "it has finished"),
        (TRAINER, 2, Phase.FAILED, "its configuration is wrong"),
        (SERVER, 2, Phase.FAILED, "its configuration is wrong"),
        (TRAINER, 3, Phase.FAILED, "shoal rollback"),
        (TRAINER, 1, Phase.WAITING, "exit code 1"),
        (TRAINER, 143, Phase.WAITING, "exit code 143"),
        (SERVER, 0, Phase.WAITING, "exit code 0"),
        (SERVER, 3, Phase.WAITING, "exit code 3"),
        (SERVER, -11, Phase.WAITING, "SIGSEGV"),
    ],
)
def test_what_an_exit_code_means(one, code, phase, reason):
    state = exited(RULES, one, State(phase=Phase.READY, since=1.0), code, 2.0)
    assert state.phase == phase
    assert reason in state.reason


def test_the_exit_code_of_a_system_tells_a_wrong_configuration_from_other_failures():
    tired = State(phase=Phase.STARTING, failures=RULES.max_restarts)
    crashed, wrong = (exited(RULES, SERVER, tired, code, 1.0) for code in (255, 2))
    assert exit_code([State(phase=Phase.STOPPED), State(phase=Phase.DONE)]) == 0
    assert exit_code([State(phase=Phase.STOPPED), crashed]) == exit_code([exited(RULES, SERVER, tired, 20, 1.0)]) == 1
    assert exit_code([crashed, wrong]) == 2


def test_signals_that_have_no_name_are_numbers():
    assert how_it_ended(-250) == "signal 250"


def test_a_process_that_is_not_ready_in_time_is_killed():
    assert actions({"server-0": State(phase=Phase.STARTING, since=90.0)}) == []
    assert actions({"server-0": State(phase=Phase.STARTING, since=89.0)}) == [("kill", "server-0")]
    assert actions({"replica-0": State(phase=Phase.STARTING, since=89.0)}) == []  # still waiting for an export
    assert actions({"replica-0": State(phase=Phase.STARTING, since=59.0)}) == [("kill", "replica-0")]


def test_a_stop_goes_from_the_trainer_to_the_servers():
    states = {one.name: State(phase=Phase.READY) for one in ALL}
    order = []
    for now in range(200, 230):
        for do, name in actions(
            states, terminated=[n for n, s in states.items() if s.phase == Phase.STOPPING], stopping=True, now=now
        ):
            order.append((do, name))
            states[name] = asked(states[name], "stop", "the system is stopped", now)
        for name, state in states.items():
            if state.phase == Phase.STOPPING and now - state.since > 2:
                states[name] = exited(RULES, ALL[0], state, 0, now)
    assert order == [("terminate", "trainer"), ("terminate", "replica-0"), ("terminate", "server-0")]
    assert {state.phase for state in states.values()} == {Phase.STOPPED}


def test_nothing_is_started_while_the_system_stops():
    states = {"server-0": State(), "trainer": State(phase=Phase.STOPPED), "replica-0": State(phase=Phase.FAILED)}
    assert actions(states, stopping=True) == []


def test_what_does_not_end_after_sigterm_is_killed_once():
    state = asked(State(phase=Phase.READY), "stop", "x", 70.0)
    assert actions({"trainer": state}, now=71.0) == [("terminate", "trainer")]
    assert actions({"trainer": state}, terminated=["trainer"], now=90.0) == []
    assert actions({"trainer": state}, terminated=["trainer"], now=90.1) == [("kill", "trainer")]


def test_a_restart_that_was_asked_for_is_no_failure():
    state = asked(State(phase=Phase.READY, since=1.0, restarts=1), "start", "somebody asked", 5.0)
    assert state.phase == Phase.STOPPING
    state = exited(RULES, TRAINER, state, 143, 6.0)
    assert (state.phase, state.failures, state.due) == (Phase.WAITING, 0, 6.0)
    again = ready(started(state, 7.0), 8.0)
    assert (again.phase, again.since, again.restarts, again.reason) == (Phase.READY, 8.0, 2, "")


def test_a_process_that_is_held_stays_down_until_it_is_released():
    state = exited(RULES, TRAINER, asked(State(phase=Phase.READY), "hold", "rollback", 1.0), 143, 2.0)
    assert state.phase == Phase.HELD
    assert actions({"trainer": state}) == []
    assert asked(State(phase=Phase.DONE), "hold", "rollback", 1.0).phase == Phase.HELD
    assert actions({"trainer": asked(state, "start", "rolled back", 3.0)}) == [("start", "trainer")]
    assert actions({"trainer": asked(State(phase=Phase.FAILED), "start", "again", 3.0)}) == [("start", "trainer")]
