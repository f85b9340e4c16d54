"""History and recent errors, without a socket."""

import logging

import pytest

from shoal.metrics import PrometheusSink
from shoal.observe.history import History
from shoal.observe.recent import RecentErrors, forget_log, watch_log


def test_counters_become_rates_and_gauges_stay_as_they_are():
    figures = iter([{"n": 0, "level": 5.0}, {"n": 20, "level": None}, {"n": 20, "level": float("nan")}, {"n": 3}])
    history = History(lambda: next(figures), ["n"])
    for now in (0.0, 2.0, 4.0, 6.0):
        history.sample(now)
    found = history.read()
    assert found["times"] == [0.0, 2.0, 4.0, 6.0]
    assert found["series"]["n"] == [None, 10.0, 0.0, None]  # a counter that fell was restarted
    assert found["series"]["level"] == [5.0, None, None, None]


def test_the_day_has_means_and_the_recent_past_is_bounded():
    values = iter(range(100))
    history = History(lambda: {"level": next(values)}, length=10, coarse=5, coarse_length=3)
    for now in range(20):
        history.sample(float(now))
    assert history.read()["series"]["level"] == list(range(10, 20))
    assert history.read("day")["series"]["level"] == [7.0, 12.0, 17.0]
    assert history.read("day")["every_s"] == 10.0


def test_repeated_errors_are_counted_and_warnings_make_room_first():
    errors = RecentErrors(kept=3)
    errors.note("disk is full", where="log")
    errors.note("disk is full", where="log")
    for number in range(5):
        errors.note(f"request {number} is wrong", level="warning")
    found = errors.read()
    assert [each["text"] for each in found] == ["request 4 is wrong", "request 3 is wrong", "disk is full"]
    assert (found[-1]["count"], errors.total) == (2, 7)


def test_what_the_library_logs_is_seen_and_still_reaches_others(caplog):
    errors = RecentErrors()
    watch_log(errors)
    try:
        try:
            raise ValueError("no room")
        except ValueError:
            logging.getLogger("shoal.some.module").exception("%s failed", "a save")
        logging.getLogger("shoal.some.module").info("nothing to see")
        logging.getLogger("elsewhere").error("not ours")
    finally:
        forget_log(errors)
    logging.getLogger("shoal.some.module").error("later")
    (found,) = errors.read()
    assert (found["level"], found["where"]) == ("error", "shoal.some.module")
    assert found["text"] == "a save failed: ValueError('no room')"
    assert "a save failed" in caplog.text


def test_timers_in_seconds_are_histograms_and_others_are_summaries():
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    sink = PrometheusSink(registry)
    for value in (0.0003, 0.02, 99.0):
        sink.emit_timer("request_seconds", value, "model=m|kind=a")
    sink.emit_timer("latency", 7.0, "model=m")
    text = prometheus.generate_latest(registry).decode()
    assert 'request_seconds_bucket{kind="a",le="0.0005",model="m"} 1.0' in text
    assert 'request_seconds_bucket{kind="a",le="+Inf",model="m"} 3.0' in text
    assert 'request_seconds_sum{kind="a",model="m"} 99.0203' in text
    assert "# TYPE latency summary" in text
