"""Processes that end, and replicas in trouble."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import textwrap
import urllib.error
import urllib.request
from typing import Any

from benchmarks.alert_scenes.common import TRAIN, clicks, export, many, predict, serve


def process_down(stage: Any) -> None:
    server = stage.shoal("ps", "--json")
    page = stage.ready(server)["http"]
    stage.watch(page)
    server.kill()
    stage.fires("ShoalProcessDown")
    stage.ready(stage.shoal("ps", "--http-port", page.rpartition(":")[2], "--json"))
    stage.ends("ShoalProcessDown")


def restarts(stage: Any) -> None:
    clicks(stage.folder / "log.csv", 2000)
    text = TRAIN.format(train='"log.csv"', format="csv")
    (stage.folder / "s.toml").write_text(
        f"{text}[replicas]\noptions = ['--threads', '1']\n[up]\nmax_restarts = 4\nbackoff_s = 0.1\n"
    )
    up = stage.shoal("up", "s.toml", "--json")
    page = ""
    assert up.stdout is not None
    for line in up.stdout:
        event = json.loads(line)
        page = event["url"] if event["event"] == "page" else page
        if event["event"] == "up":
            break
    stage.watch(page.split("/")[2])

    def kill() -> None:
        with urllib.request.urlopen(f"{page}status.json", timeout=10) as answer:
            row = next(each for each in json.load(answer)["processes"] if each["name"] == "replica-0")
        if row["pid"]:
            with contextlib.suppress(ProcessLookupError):  # the status page may be out of date
                os.kill(row["pid"], signal.SIGKILL)

    stage.fires("ShoalProcessRestarts", meanwhile=kill)
    stage.fires("ShoalProcessFailed", meanwhile=kill)
    assert stage.shoal("up", "restart", "s.toml", "replica-0").wait(120) == 0
    stage.ends("ShoalProcessFailed")


def not_ready(stage: Any) -> None:
    (stage.folder / "empty").mkdir()
    config = stage.folder / "models.txt"
    config.write_text(f'model_config_list {{ config {{ name: "m" base_path: "{stage.folder}/empty" }} }}')
    ready = stage.ready(stage.shoal("serve", "--config", config, "--port", 0, "--rest-port", 0, "--json"))
    stage.watch(ready["rest"])
    stage.fires("ShoalReplicaNotReady")
    model = export(stage)
    shutil.copytree(model / "exported_models" / "1", stage.folder / "empty" / "1")
    stage.ends("ShoalReplicaNotReady")


def wrong_requests(stage: Any) -> None:
    rest = serve(stage, export(stage))["rest"]
    stage.watch(rest)
    turn = iter(range(1 << 30))

    def ask() -> None:
        predict(rest, {"instances": [{"nobody": [1]}]} if next(turn) % 10 == 0 else None)

    stage.fires("ShoalReplicaErrors", meanwhile=ask)
    stage.ends("ShoalReplicaErrors", meanwhile=lambda: predict(rest))


def slow_and_overloaded(stage: Any) -> None:
    rest = serve(stage, export(stage, work=4), "--max-waiting", 2)["rest"]
    stage.watch(rest)
    end = many(lambda: predict(rest), 12)
    stage.fires("ShoalReplicaOverloaded")
    stage.fires("ShoalReplicaSlow")
    end()
    stage.ends("ShoalReplicaOverloaded")
    stage.ends("ShoalReplicaSlow")


def too_often(stage: Any) -> None:
    plain = serve(stage, export(stage), "--rate-limit", 2, "ipv4:127.0.0.1=20")
    stage.watch(plain["rest"])
    stage.fires("ShoalCallerLimited", meanwhile=lambda: [predict(plain["rest"]) for _ in range(30)])
    stage.ends("ShoalCallerLimited")


def strangers(stage: Any) -> None:
    # Prometheus has no token, and its scrapes would count as unknown callers, so it reads another port of the process.
    tokens = stage.folder / "tokens"
    tokens.write_text("shop s3cret\n")
    code = textwrap.dedent("""
        import json, sys, threading
        from pathlib import Path
        from shoal.observe.security import ServerSecurity, token_file
        from shoal.serving import ModelServer
        import prometheus_client
        security = ServerSecurity(tokens=token_file(Path(sys.argv[1])))
        server = ModelServer("127.0.0.1:0", "127.0.0.1:0", security=security).start()
        open_server, _ = prometheus_client.start_http_server(0, "127.0.0.1")
        print(json.dumps({"rest": server.rest_address, "open": f"127.0.0.1:{open_server.server_port}"}), flush=True)
        threading.Event().wait()
    """)
    ready = stage.ready(stage.python("-c", code, tokens))
    assert predict(ready["rest"], token="guess") == 401
    stage.watch(ready["open"])
    stage.fires("ShoalUnknownCallers", meanwhile=lambda: predict(ready["rest"], token="guess"))
    stage.ends("ShoalUnknownCallers", meanwhile=lambda: predict(ready["rest"], token="s3cret"))


def stale(stage: Any) -> None:
    stage.watch(serve(stage, export(stage))["rest"])  # nothing is pushed to it
    stage.fires("ShoalModelStale")
    versions = iter(range(2, 1 << 30))
    stage.ends("ShoalModelStale", meanwhile=lambda: export(stage, version=next(versions)))


def broken_version(stage: Any) -> None:
    model = export(stage)
    rest = serve(stage, model)["rest"]
    stage.watch(rest)
    good = next((model / "exported_models").glob("1"))
    shutil.copytree(good, good.with_name("2.part"))
    for path in good.with_name("2.part").rglob("*"):
        if path.is_file() and path.name != "manifest.json":
            path.write_bytes(path.read_bytes()[:-1] + b"\0")
    good.with_name("2.part").rename(good.with_name("2"))
    stage.fires("ShoalModelNotLoaded")
    assert predict(rest) == 200
    shutil.rmtree(good.with_name("2"))
    stage.ends("ShoalModelNotLoaded")
    assert predict(rest) == 200


def disagree(stage: Any) -> None:
    model = export(stage)
    first, second = serve(stage, model), serve(stage, model, "--poll-seconds", 0)
    stopped = stage.last
    stage.watch(first["rest"], second["rest"])
    export(stage, version=2)
    stage.fires("ShoalReplicasDisagree")
    stopped.kill()
    port = second["rest"].rpartition(":")[2]
    stage.ready(stage.shoal("serve", model, "--port", 0, "--rest-port", port, "--threads", 1, "--json"))
    stage.ends("ShoalReplicasDisagree")
