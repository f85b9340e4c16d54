"""Joins of live streams: as a live source, and as the process `shoal join`, killed and restarted."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from shoal.data import JoinConfig, join
from shoal.data.joining.config import load_join
from shoal.data.joining.reference import Action, Advance, Impression, join_offline
from shoal.data.joining.sample_log import SampleLog
from shoal.data.live import open_reader, open_writer
from shoal.errors import ConfigError, DataError, MissingExtraError
from shoal.testing.brokers import RedisServer
from shoal.train.loop.trainer import trainer
from shoal.trainer import load_config
from tests.train.loop.helpers import Told

LIMIT_S = 60


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    pytest.importorskip("redis")
    try:
        server = RedisServer(tmp_path_factory.mktemp("redis"))
    except MissingExtraError as error:
        pytest.skip(str(error))
    with server:
        yield server


def settings(root, sources, **more):
    return {
        "impressions": {"from": sources[0], "key": "id", "lateness": 5},
        "actions": {"from": sources[1], "key": "id", "kind": "kind", "lateness": 5},
        "labels": {"click": {"kinds": ["click"]}}, "window": 30, "state": str(root / "state"), **more,
    }  # fmt: skip


def events(count, seed=0):
    """(impressions, actions) with times from 1000 on, each side a little out of order."""
    chance = random.Random(seed)
    shown = [Impression(f"k{n}", 1000 + n // 10, n) for n in range(count)]
    acts = [Action(one.key, one.time + chance.randrange(28), chance.choice(["click", "look"])) for one in shown[::3]]
    acts += chance.sample(acts, 5)
    return [sorted(side, key=lambda e: e.time + chance.random() * 4) for side in (shown, acts)]


def messages(side):
    return [
        json.dumps(
            {"id": e.key, "time": e.time, "n": e.payload} if isinstance(e, Impression) else
            {"id": e.key, "time": e.time, "kind": e.kind}
        ).encode()
        for e in side
    ]  # fmt: skip


def expected(sides, ended=True):
    ends = [Advance("impressions", 1 << 60), Advance("actions", 1 << 60)] if ended else []
    samples, counts = join_offline(
        [*sides[0], *sides[1], *ends], window=30, lateness=(5, 5), labels=[("any", frozenset({"click"}))]
    )
    return [(one.impression.payload, one.labels[0]) for one in samples], counts


def pairs(records):
    return [(row["n"], row["click"]) for row in map(json.loads, records)]


def write_folders(root, sides):
    sources = []
    for name, side in zip(("shown", "acts"), sides, strict=True):
        folder = root / name
        folder.mkdir(exist_ok=True)
        (folder / "1.jsonl").write_bytes(b"".join(one + b"\n" for one in messages(side)))
        sources.append(f"dir:{folder}")
    return sources


def drain(reader, most=10_000):
    records, deadline = [], time.monotonic() + LIMIT_S
    while not reader.ended and len(records) < most and time.monotonic() < deadline:
        for chunk in reader.poll(most - len(records), 0.1):
            records += chunk.records
    return records


def test_a_join_is_a_live_source_with_exact_positions(tmp_path):
    sides = events(600)
    made = settings(tmp_path, write_folders(tmp_path, sides))
    want, _ = expected(sides)
    with join(made, to_end=True) as reader:
        assert reader.positions() == {"joined": 0}
        first = drain(reader, 100)
        at = reader.positions()
        second = drain(reader, 50)
        reader.acknowledge(at)
    with join(made, to_end=True) as reader:  # like a trainer that was killed after its checkpoint at `at`
        reader.open(at)
        rest = drain(reader)
        assert reader.lag().records == 0
        with pytest.raises(DataError, match="must be a sample from 0 to 600, got 601"):
            reader.open({"joined": 601})
    assert len(first) == 100
    assert rest[:50] == second
    assert pairs(first + rest) == want


def test_the_address_of_a_join_is_its_file(tmp_path):
    sides = events(20)
    write_folders(tmp_path, sides)
    (tmp_path / "join.toml").write_text(
        """
        [impressions]
        from = "dir:shown"
        key = "id"
        [actions]
        from = "dir:acts"
        key = "id"
        [join]
        window = "1m"
        idle = "100ms"
        state = "state"
        memory = "16MiB"
        """
    )
    with closing(open_reader(f"join:{tmp_path}/join.toml")) as reader:
        assert len(drain(reader, 20)) == 20  # the streams are quiet and old, so the clock closes their windows
        assert reader.pump.joiner.native.counters()["positives"] == 7
    with pytest.raises(ConfigError, match="must have one reader"):
        open_reader(f"join:{tmp_path}/join.toml", world=2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"windows": 3}, r"no setting 'windows' \(did you mean 'window'\?\)"), ({"window": "soon"}, "window must be"),
        ({"impressions": {"key": "id"}}, r"\[impressions\] from is missing"), ({"memory": "lots"}, "memory must be"),
        ({"keep_negatives": 0}, "keep_negatives must be"), ({"labels": {"y": {"rule": "mean"}}}, "rule of a label"),
        ({"actions": {"from": "-", "key": "id"}}, "needs .actions. kind"), ({"close": "now"}, "close must be"),
        ({"labels": {"y": {"rule": "sum"}}}, "needs .actions. value"), ({"seed": "x"}, "seed must be a number"),
        ({"impressions": {"from": "-", "key": "i", "format": "csv", "columns": ["id", "t"]}}, "must be one of the col"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(tmp_path, change, why):
    with pytest.raises(ConfigError, match=why):
        join({**settings(tmp_path, ("-", "-")), **change})
    assert not (tmp_path / "state").exists()


def test_a_quiet_source_that_is_away_does_not_close_windows(tmp_path, redis_server):
    """Idle means that a source says that it has nothing; one that does not answer says nothing."""
    made = settings(tmp_path, [redis_server.address("q-shown"), redis_server.address("q-acts")], idle="50ms")
    now = int(time.time())
    with closing(open_writer(made["impressions"]["from"])) as writer:
        writer.append([json.dumps({"id": "a", "time": now - 100}).encode()])
    with join(made) as reader:
        while not reader.pump.joiner.native.open_impressions:
            reader.pump.step(0.01)
        redis_server.kill()
        try:
            begin = time.monotonic()
            while time.monotonic() < begin + 0.3:
                reader.pump.step(0.01)
            assert reader.pump.joiner.native.open_impressions == 1
        finally:
            redis_server.start()
        assert len(drain(reader, 1)) == 1


def test_a_log_of_samples_forgets_and_survives_a_torn_line(tmp_path):
    with closing(SampleLog(str(tmp_path))) as log:
        log.append(0, [b"a", b"b"])
        log.append(1, [b"b", b"c"])
        assert log.read(0, 10) == [b"a", b"b", b"c"]
        assert log.read(2, 1) == [b"c"]
        assert log.read(3, 9) == []
        with pytest.raises(DataError, match="next sample must be <= 3, got 5"):
            log.append(5, [b"x"])
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes() + b"torn")
    with closing(SampleLog(str(tmp_path))) as log:
        assert log.count == 3
        assert log.read(1, 9) == [b"b", b"c"]
        log.append(3, [b"x" * (1 << 24), b"y"])
        log.append(5, [b"z"])
        log.forget(4)
        assert log.first == 0
        log.forget(5)
        assert log.first == 5
        assert log.read(5, 9) == [b"z"]
        with pytest.raises(DataError, match=r"must be 5\.\.6"):
            log.read(4, 1)


def test_a_trainer_joins_what_it_learns(tmp_path):
    sides = events(300)
    write_folders(tmp_path, sides)
    (tmp_path / "run.toml").write_text(
        """
        [data]
        idle_s = 1.0
        sparse = ["id"]
        dense = ["n"]
        [data.join]
        window = 30
        state = "state"
        idle = "100ms"
        keep_negatives = 0.5
        [data.join.impressions]
        from = "dir:shown"
        key = "id"
        lateness = 5
        [data.join.actions]
        from = "dir:acts"
        key = "id"
        kind = "kind"
        lateness = 5
        [data.join.labels.click]
        kinds = ["click"]
        [model]
        hidden = [4]
        [train]
        batch_size = 32
        threads = 1
        [out]
        dir = "run"
        every_steps = 2
        """
    )
    told = Told()
    config = load_config(tmp_path / "run.toml")
    assert (config.data.label, config.data.keep_negatives, config.data.format) == ("click", 0.5, "json")
    with trainer(config, reporter=told) as one:
        one.run()
    clicks = sum(label for _, label in expected(sides)[0])
    state = json.loads((tmp_path / "state" / "join.manifest").read_text())["state"]
    assert state["positives"] == clicks
    assert told.ended["samples"] == state["emitted"] == clicks + state["negatives"] < 300
    again = Told()
    with trainer(config, reporter=again) as one:
        one.run()
    assert again.ended["samples"] == told.ended["samples"]  # it resumed after the last sample
    with pytest.raises(ConfigError, match="keep_negatives must be that of"):
        load_config(changed(tmp_path / "run.toml", "idle_s = 1.0", "keep_negatives = 0.1"))


def test_a_part_of_the_file_of_a_whole_system(tmp_path):
    parts = '[join.impressions]\nfrom = "dir:a"\nkey = "id"\n[join.actions]\nfrom = "dir:b"\nkey = "id"\n'
    path = tmp_path / "online.toml"
    path.write_text(f'[join]\nwindow = 5\nstate = "s"\n{parts}[data]\ntrain = ["x"]\n[out]\ndir = "run"\n[table]\n')
    made = load_join(path)
    assert (made.impressions.source, made.state, made.out) == (f"dir:{tmp_path}/a", f"{tmp_path}/s", "")
    path.write_text(f'[join]\nwindow = 5\nstate = "s"\n{parts}[tables]\n')
    with pytest.raises(ConfigError, match="no setting 'tables'"):
        load_join(path)


def changed(path, old, new):
    other = path.with_name("other.toml")
    other.write_text(path.read_text().replace(old, new))
    return other


class Process:
    """`shoal join` in a process of its own."""

    def __init__(self, path, *flags):
        self.lines = []
        environment = {**os.environ, "PYTHONPATH": str(Path(sys.modules["shoal"].__file__).parents[1])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal", "join", str(path), *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def end(self, number):
        self.process.send_signal(number)
        error = self.process.communicate(timeout=LIMIT_S)[1]
        return self.process.returncode, error


def test_killed_at_any_time_nothing_is_missing_and_nothing_twice(tmp_path, redis_server):
    sides = events(3000, seed=2)
    shown, acts, out = (redis_server.address(name) for name in ("shown", "acts", "out"))
    (tmp_path / "join.toml").write_text(
        f"""
        [impressions]
        from = "{shown}"
        key = "id"
        lateness = 5
        [actions]
        from = "{acts}"
        key = "id"
        kind = "kind"
        lateness = "5s"
        [labels.click]
        kinds = ["click"]
        [join]
        window = 30
        state = "state"
        out = "{out}"
        checkpoint_s = 0.1
        idle = "1d"
        """
    )
    writers = [open_writer(one) for one in (shown, acts)]
    want, counts = expected(sides, ended=False)
    texts = [messages(side) for side in sides]
    texts[1].insert(10, b"not json")
    reader = open_reader(out)
    records = []

    def read(least):
        deadline = time.monotonic() + LIMIT_S
        while len(records) < least and time.monotonic() < deadline:
            for chunk in reader.poll(1000, 0.05):
                records.extend(chunk.records)

    for part in range(3):
        running = Process(tmp_path / "join.toml")
        for writer, text in zip(writers, texts, strict=True):
            writer.append(text[part * len(text) // 3 : (part + 1) * len(text) // 3])
        read(len(records) + 300 if part < 2 else len(want))
        if part < 2:
            assert running.end(signal.SIGKILL)[0] == -signal.SIGKILL
    code, error = running.end(signal.SIGTERM)
    assert code == 0
    assert "resuming after" in error
    assert "1 broken actions" in error
    assert "stopped; " in error
    read(len(want) + 1) if len(records) > len(want) else None
    assert pairs(records) == want
    state = json.loads((tmp_path / "state" / "join.manifest").read_text())["state"]
    assert {name: state[name] for name in counts} == dict(counts)
    assert "not json" in (tmp_path / "state" / "dead_letters.jsonl").read_text()
    for one in (*writers, reader):
        one.close()


def test_wrong_use_of_the_command(tmp_path, capsys):
    from shoal.cli.main import main

    assert main(["join"]) == 2
    assert "shoal join join.toml" in capsys.readouterr().err
    assert main(["join", str(tmp_path / "none.toml")]) == 2
    (tmp_path / "a.toml").write_text("[join]\nwindow=3\n")
    assert main(["join", str(tmp_path / "a.toml")]) == 2
    assert "[impressions]" in capsys.readouterr().err
    made = JoinConfig(**vars_of(tmp_path))
    assert made.out == ""


def vars_of(root):
    from shoal.data import JoinInput

    one = JoinInput(source="-", key="id")
    return {"impressions": one, "actions": one, "window": 1, "state": str(root)}
