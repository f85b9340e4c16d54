"""The status pages of `shoal up`, `train`, `ps` and `serve` in a real browser, on desktop and phone."""

import json
import os
import signal
import subprocess
import time
import urllib.request

import numpy as np
import pytest

from shoal.testing.commands import Command
from tests.observe.browser import DESKTOP, PHONE

pytest.importorskip("zmq")
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
        yield page, status_of(page)
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
    assert browser.overflow() <= 0  # wide tables scroll by themselves
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
