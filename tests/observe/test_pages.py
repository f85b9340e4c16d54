"""A complete system: its status pages in a real browser, its metrics, its alert rules."""

import json
import os
import re
import signal
import subprocess
import time
import urllib.request

import numpy as np
import pytest

from shoal.cli.main import main
from shoal.observe.monitoring import alert_rules, dashboard
from shoal.testing.commands import Command
from shoal.testing.programs.prometheus import Prometheus, prometheus_unavailable
from tests.observe.browser import DESKTOP, PHONE
from tests.serving.helpers import eventually

pytest.importorskip("zmq")
yaml = pytest.importorskip("yaml")
DEADLINE_S = 180
CONFIG = """
[data]
train = ["log.csv"]
format = "csv"
label = "click"
[features.user]
[features.item]
[table]
dim = 4
[model]
name = "deepfm"
hidden = [8]
[train]
batch_size = 100
epochs = 100000
threads = 1
[out]
log_steps = 5
every_s = 2
[servers]
threads = 1
[replicas]
options = ["--threads", "1"]
[serve]
push_every_s = 0.2
"""


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    """The status of a whole system that runs."""
    folder = tmp_path_factory.mktemp("system")
    rng = np.random.default_rng(0)
    lines = [f"{rng.integers(2)},u{rng.integers(50)},i{rng.integers(50)}" for _ in range(2000)]
    (folder / "log.csv").write_text("\n".join(["click,user,item", *lines, "yes,u1,i1"]))  # the last row is bad
    (folder / "online.toml").write_text(CONFIG)
    running = Command("up", folder / "online.toml", "--json", stdout=subprocess.PIPE)
    try:
        page, end = "", time.monotonic() + DEADLINE_S
        for line in running.stdout:
            event = json.loads(line)
            page = event["url"] if event["event"] == "page" else page
            assert event["event"] != "failed", event
            assert time.monotonic() < end
            if event["event"] == "up":
                break
        status = status_of(page)
        for one in status["processes"]:
            if one["kind"] == "trainer":
                os.setpriority(os.PRIO_PGRP, one["pid"], 19)  # it never ends, so others have priority
        yield page, status
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(DEADLINE_S)
        running.stdout.close()


def status_of(page):
    with urllib.request.urlopen(f"{page}status.json", timeout=60) as answer:
        return json.load(answer)


def page_of(system, kind):
    page, status = system
    return page if kind == "up" else f"http://{next(p for p in status['processes'] if p['kind'] == kind)['metrics']}/"


EXPECTED = {
    "up": ["Shoal system, online", "3 of 3", "model step", "server-0", "trainer", "replica-0", "started as process"],
    "trainer": ["Shoal trainer, deepfm", "samples per second", "step", "calibration", "checkpoint", "log.csv"],
    "server": ["Shoal parameter server, shard 0 of 1", "ids per request", "writes applied", "features", "find_initial"],
    "replica": ["Shoal model server", "model step", "age of the model", "rows per batch", "available", "features"],
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("kind", EXPECTED)
def test_a_page_shows_its_process_with_history_and_fits_the_window(kind, size, system, browser, tmp_path):
    browser.open(page_of(system, kind), size)
    browser.until("[...document.querySelectorAll('.chart path')].some(p => (p.getAttribute('d') || '').includes('L'))")
    for text in EXPECTED[kind]:
        browser.until(f"document.body.innerText.includes({json.dumps(text)})")
    assert browser.overflow() <= 0  # wide tables scroll separately
    assert browser.run("[...document.querySelectorAll('.tile')].every(t => t.scrollWidth <= t.clientWidth + 1)")
    assert "does not answer" not in browser.text()
    browser.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    if keep := os.environ.get("SHOAL_PICTURES"):
        browser.picture(f"{keep}/{kind}-{size[0]}.png")


def test_the_last_day_can_be_chosen_and_a_page_whose_process_is_gone_says_so(system, browser):
    browser.open(page_of(system, "up"))
    browser.run("document.querySelector('[data-span=day]').click()")
    browser.until("document.querySelector('[data-span=day]').getAttribute('aria-pressed') === 'true'")
    browser.until("document.querySelectorAll('.chart').length > 3")
    browser.run("fetch = () => Promise.reject(new Error('connection refused'))")
    browser.until("document.getElementById('stale').textContent.includes('does not answer (connection refused)')")


def test_pages_draw_text_that_others_sent_as_text(system, browser):
    address = page_of(system, "replica")
    body = json.dumps({"signature_name": "<img src=x onerror=window.bad=1>", "instances": [{"user": "u1"}]}).encode()
    request = urllib.request.Request(f"{address}v1/models/online:predict", body)
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=60)
    browser.open(address)
    browser.until("document.getElementById('errors').innerText.includes('<img src=x')")
    assert browser.run("window.bad") is None


# Metrics that exist only in some situations, or in processes that this system does not have.
ELSEWHERE = re.compile(
    r"join_\w+|shoal_ps_(archive|follower|followers|leads|registry)\w*|touched_key_set_dropped_total|"
    r"parameter_sync_(failures|failed_rounds)_total|shoal_serving_(unauthenticated|errors)_total|shoal_train_lag_s|ALERTS|up"
)


def test_prometheus_reads_the_system_and_its_rules_and_panels_mean_something_there(system, tmp_path):
    if why := prometheus_unavailable():
        pytest.skip(f"{why}; `make packages` does it as root")
    page, status = system
    assert main(["monitor", "--up", status["file"], "--write", str(tmp_path / "written"), "--json"]) == 0
    with Prometheus(tmp_path, discovered=[f"{page}targets.json"]) as prometheus:
        eventually(lambda: prometheus.query('count(up{job="shoal"} == 1) == 4'), what="all processes to be read")
        eventually(lambda: prometheus.query("rate(shoal_train_samples_total[10s])"), what="two readings")
        seen = {each["metric"]["__name__"] for each in prometheus.query('{__name__=~".+"}')}
        rules = [rule["expr"] for group in yaml.safe_load(alert_rules())["groups"] for rule in group["rules"]]
        panels = [each["expr"] for panel in json.loads(dashboard())["panels"] for each in panel.get("targets", ())]
        for expression in (*rules, *panels):
            asked = expression.replace("$__rate_interval", "10s").replace("$instance", ".*")
            prometheus.query(asked)  # a wrong expression raises
            names = set(
                re.findall(r"\b(?:shoal|join|parameter_sync|touched|process)_\w+", re.sub(r'"[^"]*"', "", asked))
            )
            missing = {name for name in names if name not in seen and not ELSEWHERE.fullmatch(name)}
            assert not missing, f"{asked}: no process has {missing}"
        assert "ShoalProcessDown" not in prometheus.firing()
        steps = prometheus.query('shoal_serving_model_step{role="replica"}')
        assert steps
        assert steps[0]["metric"]["name"] == "replica-0"
