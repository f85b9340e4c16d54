"""The native joiner against the offline join: plain values, then Hypothesis, then crashes and broken files."""

import json
import os
import random
import shutil
from collections import Counter
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.data.joining.config import JoinConfig, JoinInput, JoinLabel
from shoal.data.joining.joiner import ACTIONS, FOREVER, IMPRESSIONS, Joiner
from shoal.data.joining.reference import Action, Advance, Impression, join_offline
from shoal.errors import CapacityError, ConfigError, DataError

SIDE = {"impressions": IMPRESSIONS, "actions": ACTIONS}


def config(folder, *, window=10, lateness=(0, 0), before=0, labels=None, **more):
    us = lambda n: timedelta(microseconds=n)  # noqa: E731
    made = {
        name: JoinLabel(rule=rule, kinds=tuple(kinds)) for name, (rule, kinds) in (labels or {"y": ("any", ())}).items()
    }
    return JoinConfig(
        impressions=JoinInput(source="-", key="id", time="t", time_unit="us", lateness=us(lateness[0])),
        actions=JoinInput(
            source="-", key="id", time="t", time_unit="us", kind="kind", value="v", lateness=us(lateness[1])
        ),
        window=us(window), before=us(before), labels=made, state=str(folder), **more,
    )  # fmt: skip


def message(event):
    if isinstance(event, Impression):
        return json.dumps({"id": event.key, "t": event.time, "x": event.payload}).encode()
    return json.dumps({"id": event.key, "t": event.time, "kind": event.kind, "v": event.value}).encode()


def offer(joiner, event, position=None):
    if isinstance(event, Advance):
        joiner.advance(SIDE[event.side], event.time, position)
    else:
        side = IMPRESSIONS if isinstance(event, Impression) else ACTIONS
        assert joiner.offer(side, [message(event)], position, now=1e6) == []


def rows(samples, names=("y",)):
    """Samples as they are written, to compare with those of the reference."""
    return [
        {
            "id": one.impression.key,
            "t": one.impression.time,
            "x": one.impression.payload,
            **dict(zip(names, one.labels, strict=False)),
        }
        for one in samples
    ]


def offline(events, *, labels=None, **options):
    labels = labels or {"y": ("any", ())}
    samples, counts = join_offline(
        events, labels=[(rule, frozenset(kinds)) for rule, kinds in labels.values()], **options
    )
    return rows(samples, list(labels)), counts


class Out:
    """Keeps samples by number; what comes twice must be the same."""

    def __init__(self):
        self.rows = []

    def __call__(self, first, samples):
        assert first <= len(self.rows)
        for number, sample in enumerate(map(json.loads, samples), first):
            if number < len(self.rows):
                assert self.rows[number] == sample
            else:
                self.rows.append(sample)


def end(events):
    return [*events, Advance("impressions", FOREVER), Advance("actions", FOREVER)]


def joined(folder, events, block_bytes=0, **options):
    out = Out()
    with Joiner(config(folder, **options), out, block_bytes=block_bytes) as joiner:
        for event in events:
            offer(joiner, event)
        counts = Counter(joiner.native.counters())
        assert joiner.native.spilled <= joiner.native.open_impressions + joiner.native.waiting_actions
        assert (joiner.native.open_impressions, joiner.native.waiting_actions) == (0, 0) or events[-1] != Advance(
            "actions", FOREVER
        )
    return out.rows, +counts


def test_clicks_before_and_after_their_impression_and_none(tmp_path):
    events = end([
        Action("b", 3), Action("x", 5), Impression("a", 0, 1), Impression("b", 2, 2), Impression("c", 4, 3),
        Action("a", 9), Action("a", 10), Action("c", 15),
    ])  # fmt: skip
    rows, counts = joined(tmp_path, events)
    assert [(row["id"], row["y"]) for row in rows] == [("a", 1), ("b", 1), ("c", 0)]
    assert counts == offline(events, window=10)[1]
    assert counts["unmatched_actions"] == 2
    assert counts["joined_actions"] == 3


def test_each_rule_of_a_label(tmp_path):
    labels = {
        "click": ("any", ["click"]), "n": ("count", []), "dwell": ("sum", ["dwell"]), "most": ("max", ["dwell"]),
        "first": ("first", ["dwell"]), "last": ("last", ["dwell"]),
    }  # fmt: skip
    actions = [
        Action("a", 5, "dwell", 2.5),
        Action("a", 3, "dwell", -4),
        Action("a", 4, "click"),
        Action("a", 4, "click"),
    ]
    events = end([Impression("a", 0), *actions, Impression("b", 1)])
    rows, counts = joined(tmp_path, events, labels=labels)
    assert rows == offline(events, window=10, labels=labels)[0]
    want = {"click": 1, "n": 3, "dwell": -1.5, "most": 2.5, "first": -4, "last": 2.5}
    assert {name: rows[0][name] for name in labels} == want
    assert all(rows[1][name] == 0 for name in labels)
    assert counts["duplicate_actions"] == 1
    assert counts["positives"] == counts["negatives"] == 1


def test_samples_are_the_message_with_its_labels(tmp_path):
    out = []
    with Joiner(config(tmp_path), lambda _, samples: out.extend(samples)) as joiner:
        texts = [b' {"id": "a\\u0041",\n"t": 1, "n": {"y": [1, "}"]}} \n', b'{"t":2e0,"id":17 }', b'{"id":"aA","t":3}']
        assert joiner.offer(IMPRESSIONS, texts, None) == []
        joiner.offer(ACTIONS, [b'{"id":"17","t":2,"v":0}'], None)
        joiner.advance(IMPRESSIONS, FOREVER)
        joiner.advance(ACTIONS, FOREVER)
        assert joiner.native.counters()["duplicate_impressions"] == 1  # two spellings of one key
    assert out == [b'{"id": "a\\u0041", "t": 1, "n": {"y": [1, "}"]},"y":0}', b'{"t":2e0,"id":17,"y":1}']


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "not a JSON object"), (b"[]", "not a JSON object"), (b'{"id":"a"', "',' or '}'"),
        (b'{"id":"a}', "string"),
        (b'{"id":"a","t":1} x', "bytes after"), (b'{"t":1}', "no member 'id'"), (b'{"id":"a"}', "no member 't'"),
        (b'{"id":"","t":1}', "empty key"), (b'{"id":null,"t":1}', "empty key"), (b'{"id":"a","t":"soon"}', "time"),
        (b'{"id":"a","t":1e300}', "time"), (b'{"id":"a","t":99999999999999}', "future"),
        (b'{"id":"\\q","t":1}', "escape"), (b'{"id":"a","t":1,"y":3}', "must not have a member 'y'"),
        (b'{"id":"a","t":1,"z":}', "malformed"), (b'{"id":"a","t":1,"z":nul}', "malformed"),
        (b'{"id":"' + b"k" * 5000 + b'","t":1}', "4096"), (b"\xff\xfe\x00", "not a JSON object"),
    ],
)  # fmt: skip
def test_a_broken_message_is_told_and_counted(tmp_path, text, why):
    with Joiner(config(tmp_path), Out()) as joiner:
        broken = joiner.offer(IMPRESSIONS, [b'{"id":"a","t":1}', text], None, now=1e6)
        assert [index for index, _ in broken] == [1]
        assert why in broken[0][1]
        assert joiner.native.counters()["broken_impressions"] == 1
        assert joiner.native.open_impressions == 1


def test_text_with_columns(tmp_path):
    columns = ("id", "item", "t", "kind")
    both = {"key": ("id", "item"), "time": "t", "time_unit": "iso", "columns": columns, "lateness": 0}
    made = JoinConfig(
        impressions=JoinInput(source="-", format="csv", **both),
        actions=JoinInput(source="-", format="tsv", kind="kind", **both),
        window="1m", labels={"y": JoinLabel(kinds=("buy",))}, state=str(tmp_path),
    )  # fmt: skip
    out = []
    with Joiner(made, lambda _, samples: out.extend(samples)) as joiner:
        lines = [b"u1,i1,2026-01-01T00:00:00Z,", b"u1,i2,2026-01-01T01:00:30+01:00,", b"u1,i3", b"u1,i3,2026-13-01,"]
        assert [index for index, _ in joiner.offer(IMPRESSIONS, lines, None)] == [2, 3]
        joiner.offer(ACTIONS, [b"u1\ti2\t2026-01-01 00:01:30.000\tbuy", b"u1\ti1\t2026-01-01 00:00:01\tlook"], None)
        for side in (IMPRESSIONS, ACTIONS):
            joiner.advance(side, FOREVER)
        assert joiner.native.counters()["ignored_actions"] == 1
    assert out == [lines[0] + b",0", lines[1] + b",1"]


def test_the_negatives_that_are_kept_are_the_same_everywhere(tmp_path):
    events = end([*(Impression(f"k{n}", 0) for n in range(2000)), Action("k7", 1)])
    kept = joined(tmp_path, events, keep_negatives=0.1, seed=3)
    assert kept == offline(events, window=10, keep_negatives=0.1, seed=3)
    assert 140 < len(kept[0]) < 260
    assert sum(row["y"] for row in kept[0]) == 1
    assert [row["id"] for row in kept[0]][:3] == ["k3", "k7", "k10"]  # must never change: files and docs depend on it


EVENTS = st.lists(
    st.one_of(
        st.builds(Impression, st.sampled_from("abcd"), st.integers(0, 40), st.integers(0, 9)),
        st.builds(
            Action, st.sampled_from("abcde"), st.integers(0, 40), st.sampled_from(["click", "see"]),
            st.sampled_from([0.0, 1.5, -2.0]),
        ),
        st.builds(Advance, st.sampled_from(["impressions", "actions"]), st.integers(0, 60)),
    ),
    max_size=40,
)  # fmt: skip
OPTIONS = st.fixed_dictionaries(
    {
        "window": st.integers(1, 15), "before": st.integers(0, 3),
        "lateness": st.tuples(st.integers(0, 8), st.integers(0, 8)),
        "close_on_action": st.booleans(), "max_actions": st.sampled_from([1, 3, 1000]),
        "keep_negatives": st.sampled_from([1.0, 0.5]),
        "labels": st.sampled_from(
            [{"y": ("any", ["click"]), "n": ("sum", [])}, {"y": ("last", []), "n": ("count", ["see"])}]
        ),
    }
)  # fmt: skip


def native_options(options):
    own = dict(options)
    own["close"] = "action" if own.pop("close_on_action") else "window"
    return own


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(EVENTS, OPTIONS, st.data())
def test_equal_to_the_offline_join_with_crashes_and_checkpoints_at_any_time(tmp_path_factory, events, options, data):
    folder = tmp_path_factory.mktemp("state")
    events = end(events)
    want, counts = offline(events, **options)
    own = native_options(options)
    block = data.draw(st.sampled_from([0, 100, 400]), label="block")  # 100: nearly every record goes to disk
    out = Out()
    joiner = Joiner(config(folder, **own), out, block_bytes=block)
    try:
        for number, event in enumerate(events):
            offer(joiner, event, number)
            what = data.draw(st.sampled_from(["", "", "", "checkpoint", "crash"]), label="then")
            if what == "checkpoint":
                joiner.checkpoint()
            elif what == "crash":
                joiner.close()
                written = data.draw(st.integers(0, len(out.rows)), label="written")
                before, out.rows = out.rows, out.rows[:]
                del out.rows[max(written, int(_emitted_at_checkpoint(folder))) :]  # not stored by the sink yet
                joiner = Joiner(config(folder, **own), out, block_bytes=block)
                assert out.rows == before
                side = SIDE[event.side] if isinstance(event, Advance) else int(isinstance(event, Action))
                assert joiner.position(side) == number
        assert out.rows == want
        assert +Counter(joiner.native.counters()) == counts
    finally:
        joiner.close()
        shutil.rmtree(folder)


def _emitted_at_checkpoint(folder):
    path = folder / "join.manifest"
    return json.loads(path.read_text())["state"]["emitted"] if path.exists() else 0


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(EVENTS, OPTIONS, st.randoms(use_true_random=False))
def test_how_the_sides_interleave_changes_nothing(tmp_path_factory, events, options, chance):
    """Each side keeps its order. With windows that an action closes, the order of samples may differ."""
    options = {**options, "max_actions": 1000, "close_on_action": False}
    sides = [[e for e in events if isinstance(e, kind)] for kind in (Impression, Action)]

    def mixed():
        left = [list(side) for side in sides]
        while any(left):
            yield chance.choice([side for side in left if side]).pop(0)

    one, other = list(mixed()), list(mixed())
    assert offline(end(one), **options) == offline(end(other), **options)


def test_records_in_any_order_with_little_memory(tmp_path):
    """Many records, segments and checkpoints; memory and disk follow what is open."""
    chance = random.Random(1)
    events = []
    for n in range(20_000):
        at = n + chance.randrange(2000)
        events.append(Impression(f"k{n}", at, n))
        if n % 5 == 0:
            events.append(Action(f"k{n}", at + chance.randrange(500), "click", 1.0))
    events.sort(key=lambda e: e.time + chance.randrange(300))
    made = config(tmp_path, window=1000, lateness=(3000, 3000), memory_bytes=1 << 20)
    out, most = Out(), 0
    with Joiner(made, out, block_bytes=1 << 14) as joiner:
        for begin in range(0, len(events), 500):
            for side, kind in enumerate((Impression, Action)):
                batch = [message(e) for e in events[begin : begin + 500] if isinstance(e, kind)]
                joiner.offer(side, batch, begin, now=1e6)
            most = max(most, joiner.native.memory)
            if begin % 5000 == 0:
                joiner.checkpoint()
        assert most < 1 << 20
        assert joiner.native.spilled > 1000
        for side in (IMPRESSIONS, ACTIONS):
            joiner.advance(side, FOREVER)
        joiner.checkpoint()
        assert sorted(os.listdir(tmp_path)) == ["join.manifest", "lock", f"tail-{joiner.checkpoints}.log"]
        assert joiner.native.counters()["positives"] == 4000
        assert joiner.native.counters()["late_impressions"] == 0
    assert sorted(row["x"] for row in out.rows) == list(range(20_000))
    assert [row["t"] for row in out.rows] == sorted(row["t"] for row in out.rows)


def test_keys_beyond_the_budget_are_refused_and_nothing_is_lost(tmp_path):
    small = config(tmp_path, window=100, memory_bytes=1 << 20)
    with Joiner(small, Out()) as joiner:
        offered = iter(range(200))

        def fill():
            for n in offered:
                joiner.offer(IMPRESSIONS, [message(Impression(f"{n}-{i}", 5)) for i in range(500)], n, now=1e6)

        with pytest.raises(CapacityError, match="raise the budget"):
            fill()
        last = next(offered) - 1
    out = Out()
    with Joiner(config(tmp_path, window=100, memory_bytes=1 << 24), out) as joiner:
        assert joiner.position(IMPRESSIONS) == last
        for side in (IMPRESSIONS, ACTIONS):
            joiner.advance(side, FOREVER)
    assert len(out.rows) == (last + 1) * 500


def test_a_tail_that_was_torn_is_told_and_damage_in_the_middle_is_refused(tmp_path):
    events = [Impression(f"k{n}", n) for n in range(20)]
    with Joiner(config(tmp_path), Out()) as joiner:
        for number, event in enumerate(events):
            offer(joiner, event, number)
    tail = tmp_path / "tail-0.log"
    whole = tail.read_bytes()
    tail.write_bytes(whole[:-5])
    notes = []
    with Joiner(config(tmp_path), Out(), note=notes.append) as joiner:
        assert joiner.position(IMPRESSIONS) == 18
        assert "ends inside a batch" in notes[0]
    tail.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(DataError, match="damaged at byte"):
        Joiner(config(tmp_path), Out())


def test_a_damaged_segment_stops_the_joiner_or_is_counted(tmp_path):
    def fill(folder, **more):
        out = Out()
        joiner = Joiner(config(folder, window=1000, **more), out, block_bytes=400)
        joiner.offer(IMPRESSIONS, [message(Impression(f"k{n}", n)) for n in range(40)], 1, now=1e6)
        for path in sorted(folder.glob("*.seg"))[2:3]:
            data = bytearray(path.read_bytes())
            data[-9] ^= 1
            path.write_bytes(data)
        return joiner, out

    joiner, _ = fill(tmp_path / "stop")
    with joiner:
        joiner.advance(IMPRESSIONS, FOREVER)
        with pytest.raises(DataError, match=r"segment-0000000002.seg is damaged at byte .*on_damage"):
            joiner.advance(ACTIONS, FOREVER)
    joiner, out = fill(tmp_path / "skip", on_damage="skip")
    with joiner:
        joiner.advance(IMPRESSIONS, FOREVER)
        joiner.advance(ACTIONS, FOREVER)
        lost = joiner.native.counters()["lost_records"]
        assert lost > 0
        assert len(out.rows) + lost == 40


def test_a_folder_belongs_to_one_joiner_with_one_set_of_settings(tmp_path):
    with Joiner(config(tmp_path), Out()) as joiner:
        with pytest.raises(ConfigError, match="another joiner"):
            Joiner(config(tmp_path), Out())
        joiner.checkpoint()
    with pytest.raises(ConfigError, match="window_us = 10, but the setting is 11"):
        Joiner(config(tmp_path, window=11), Out())
    (tmp_path / "join.manifest").write_text("{}")
    with pytest.raises(DataError):
        Joiner(config(tmp_path), Out())


def test_a_full_disk_is_told_and_work_goes_on_when_there_is_room(tmp_path):
    import resource

    out = Out()
    with Joiner(config(tmp_path, window=1000), out) as joiner:
        joiner.offer(IMPRESSIONS, [message(Impression(f"k{n}", n, "x" * 50)) for n in range(100)], 0, now=1e6)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # larger writes fail, as on a full disk
        try:
            with pytest.raises(OSError, match="File too large"):
                joiner.checkpoint()
            with pytest.raises(OSError, match=r"tail-0\.log"):
                joiner.offer(IMPRESSIONS, [message(Impression("late", 5))], 1, now=1e6)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert joiner.position(IMPRESSIONS) == 0
        joiner.offer(IMPRESSIONS, [message(Impression("late", 5))], 1, now=1e6)
        joiner.checkpoint()
        for side in (IMPRESSIONS, ACTIONS):
            joiner.advance(side, FOREVER)
    assert len(out.rows) == 101
