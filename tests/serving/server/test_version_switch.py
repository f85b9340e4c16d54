"""Which pushed rows a new version of a model keeps: the log of pushes, hand-overs in memory, then real replicas."""

import logging
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.serving import Manifest, ModelServer
from shoal.serving.server.hand_over import hand_over
from shoal.serving.server.push_log import Mark, PushLog
from shoal.serving.server.servable import Servable, TableView
from shoal.serving.server.table_signatures import table_signatures
from shoal.serving.sync.monolith.push_client import PushClient
from shoal.serving.sync.push import PushInfo
from shoal.serving.sync.split import Delta, DeltaBatch
from shoal.stamps import Stamp
from shoal.table import MultiHashTable, test_hash_table
from tests.serving.server.test_server import Client, config_of, export
from tests.serving.sync.test_sync_client import instance

# --- the log of pushes ------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.lists(st.integers(-3, 12), max_size=6, unique=True), st.integers(0, 9)), max_size=8),
    st.integers(0, 10),
    st.booleans(),
)
def test_a_log_knows_the_latest_push_of_each_id(pushes, since, merge_between):
    log, model = PushLog(), {}
    for ids, at in pushes:
        log.add(torch.tensor(ids, dtype=torch.int64), Mark.at(float(at)))
        model.update({each: max(at, model.get(each, at)) for each in ids})
        if merge_between:
            log.pushed()
    assert pushed_since(log, since) == {k: v for k, v in model.items() if v >= since}
    older = log.older(torch.arange(-3, 13), Mark.at(float(since)))
    want = [model.get(each, since) <= since for each in range(-3, 13)]
    assert want == ([True] * 16 if older is None else older.tolist())


def test_a_log_that_took_over_nothing_can_be_read():
    one, other = PushLog(), PushLog()
    one.add(torch.tensor([1]), Mark.at(1.0))
    other.extend(one.pushed().where(lambda mark: False))
    assert len(other.pushed().ids) == 0
    assert len(other.pushed().where(lambda mark: True).ids) == 0


def pushed_since(log, since):
    found = log.pushed().where(lambda mark: mark.read_at >= since)
    return {int(each): found.marks[number].read_at for each, number in zip(found.ids, found.of, strict=True)}


def test_a_log_has_few_marks_however_much_is_pushed(monkeypatch):
    monkeypatch.setattr("shoal.serving.server.push_log.MARKS", 10)
    log = PushLog()
    log._most_marks = 10
    for at in range(200):
        log.add(torch.arange(8), Mark.at(float(at)))
        log.add(torch.arange(100 * at, 100 * at + 50), Mark(Stamp(1, at), float(at), "other"))
    found = log.pushed()
    assert len(found.ids) == 200 * 50
    assert {int(each): found.marks[number].read_at for each, number in zip(found.ids, found.of, strict=True)} == {
        **{100 * at + each: float(at) for at in range(200) for each in range(50)}, **dict.fromkeys(range(8), 199.0),
    }  # fmt: skip
    assert len(log._marks) < 420


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.lists(st.integers(0, 20), max_size=9, unique=True),
                  st.booleans()),
        max_size=12,
    )
)  # fmt: skip
def test_sources_are_compared_by_run_and_step(pushes):
    log, model = PushLog(), {}
    for step, (source, run, ids, gone) in enumerate(pushes):
        mark = Mark(Stamp(run, step), float(step), source)
        older = log.older(torch.arange(21), mark)
        want = [each not in model or model[each][0] <= mark.stamp for each in range(21)]
        assert want == ([True] * 21 if older is None else older.tolist())
        log.add(torch.tensor(ids, dtype=torch.int64), mark, gone)
        for each in ids:
            if each not in model or model[each][0] <= mark.stamp:
                model[each] = (mark.stamp, gone)
    copy = PushLog()
    copy.extend(log.pushed())
    for one in (log.pushed(), copy.pushed()):
        found = {int(i): (one.marks[of].stamp, bool(g)) for i, of, g in zip(one.ids, one.of, one.gone, strict=True)}
        assert found == model


def test_a_push_says_when_its_rows_were_read_and_never_too_early():
    said = PushInfo(touched_at=1.9999, read_at=2.0001, codec="abc")
    heard = PushInfo.of(said.metadata())
    assert (heard.touched_at, heard.read_at, heard.codec) == (1.999, 2.001, "abc")
    assert PushInfo().metadata() == []
    for wrong in ("", "-5", "1e3", "x", "9" * 17):
        assert PushInfo.of([("shoal-read-at-ms", wrong), ("shoal-touched-at-ms", wrong)]) == PushInfo()


# --- hand-overs in memory ---------------------------------------------------------------------------------------------


def servable_of(name="T", dim=1, rows_read_at=None):
    table = test_hash_table(dim, name_suffix=f"{name}{time.monotonic_ns()}")
    table.name = name
    return Servable({}, {name: TableView(table)}, rows_read_at)


def fates(metrics):
    found = {}
    for name, value, tags in metrics.counters:
        if name == "serving_handed_over_rows":
            fate = tags.rpartition("=")[2]
            found[fate] = found.get(fate, 0) + value
    return found


def rows(servable, ids, name="T"):
    return servable.tables[name].lookups[0](torch.tensor(ids))[:, 0].tolist()


def test_any_number_of_pushed_rows_is_carried_over(metrics):
    total = 2_097_152 + 70_000
    old, new = servable_of(rows_read_at=10.0), servable_of(rows_read_at=20.0)
    for begin in range(0, total, 300_000):
        ids = torch.arange(begin, min(begin + 300_000, total))
        old.tables["T"].assign_sub(0, ids, ids.float()[:, None] % 1000, 30.0)
    hand_over(old, new)
    assert new.tables["T"].rows() == total
    ids = torch.arange(0, total, 997)
    assert torch.equal(new.tables["T"].lookups[0](ids)[:, 0], ids.float() % 1000)
    assert fates(metrics) == {"carried": total}


def test_rows_are_told_apart_by_when_they_were_read(metrics, caplog):
    old, new = servable_of(), servable_of(rows_read_at=20.0)
    new.tables["T"].table.assign(torch.tensor([1, 2, 3]), torch.full((3, 1), 7.0))
    old.tables["T"].assign_sub(0, torch.tensor([1, 2, 4]), torch.full((3, 1), 5.0), 19.9)
    old.tables["T"].assign_sub(0, torch.tensor([2, 5]), torch.full((2, 1), 6.0), 20.0)
    with caplog.at_level(logging.INFO):
        hand_over(old, new)
    assert rows(new, [1, 2, 3, 4, 5]) == [7.0, 6.0, 7.0, 0.0, 6.0]
    assert fates(metrics) == {"carried": 2, "superseded": 2}
    assert "2 rows pushed after the export are kept, 2 pushed before it are not" in caplog.text


def test_rows_that_were_carried_keep_their_time_for_the_next_switch():
    first, second = servable_of(rows_read_at=10.0), servable_of(rows_read_at=20.0)
    for each, at in ((1, 25.0), (2, 35.0)):
        first.tables["T"].assign_sub(0, torch.tensor([each]), torch.full((1, 1), 5.0), at)
    hand_over(first, second)
    third = servable_of(rows_read_at=30.0)
    hand_over(second, third)
    assert rows(second, [1, 2]) == [5.0, 5.0]
    assert rows(third, [1, 2]) == [0.0, 5.0]


def test_pushes_that_come_during_a_hand_over_end_up_in_both_versions():
    old, new = servable_of(rows_read_at=1.0), servable_of(rows_read_at=2.0)
    view, ids = old.tables["T"], torch.arange(300_000)
    view.assign_sub(0, ids, torch.zeros(len(ids), 1), 3.0)
    assign = table_signatures([view], lambda: old)["hashtable_assign"].run
    done, pushes = threading.Event(), []

    def push():
        while not done.is_set() or len(pushes) < 10:
            some = torch.randint(0, len(ids), (500,)).unique()
            pushes.append(assign({"T_id": some, "T_value": torch.full((len(some), 1), len(pushes) + 1.0)}))

    thread = threading.Thread(target=push)
    thread.start()
    try:
        hand_over(old, new)
    finally:
        done.set()
        thread.join(60)
    assert len(pushes) >= 10
    assert torch.equal(new.tables["T"].lookups[0](ids), view.lookups[0](ids))
    assert pushed_since(new.tables["T"].push_logs[0], 0) == pushed_since(view.push_logs[0], 0)


def test_an_export_that_does_not_say_its_time_is_counted_and_logged(metrics, caplog):
    old, new = servable_of(), servable_of()
    old.tables["T"].assign_sub(0, torch.tensor([1]), torch.ones(1, 1), 5.0)
    hand_over(old, new)
    assert rows(new, [1]) == [1.0]
    assert fates(metrics) == {"undecided": 1}
    assert "does not say when its rows were read" in caplog.text


@pytest.mark.parametrize("other", [{"name": "U"}, {"dim": 2}], ids=["gone", "other dim"])
def test_rows_that_fit_nowhere_are_counted_and_logged(metrics, caplog, other):
    old, new = servable_of(), servable_of(rows_read_at=1.0, **other)
    old.tables["T"].assign_sub(0, torch.tensor([1, 2]), torch.ones(2, 1), 5.0)
    hand_over(old, new)
    assert fates(metrics) == {"dropped": 2}
    assert "the next version has no table T of dim 1; 2 pushed rows are dropped" in caplog.text


def test_sub_tables_are_matched_by_name(metrics):
    def multi(*names):
        table = MultiHashTable.from_configs({name: instance(2) for name in names}, name_suffix="_".join(names))
        table.name = "M"
        return Servable({}, {"M": TableView(table)}, 1.0)

    old, new = multi("a", "b"), multi("b", "c")
    for number in (0, 1):
        old.tables["M"].assign_sub(number, torch.tensor([number]), torch.full((1, 2), number + 1.0), 5.0)
    hand_over(old, new)
    assert new.tables["M"].sub_rows() == [1, 0]
    assert new.tables["M"].lookups[0](torch.tensor([1])).tolist() == [[2.0, 2.0]]
    assert fates(metrics) == {"carried": 1, "dropped": 1}


def test_a_hand_over_that_fails_leaves_the_old_version_on_its_own():
    old, new = servable_of(), servable_of(rows_read_at=1.0)
    old.tables["T"].assign_sub(0, torch.tensor([1]), torch.ones(1, 1), 5.0)

    def full(*args):
        raise MemoryError("no room")

    new.tables["T"].copy_sub = full
    with pytest.raises(MemoryError):
        hand_over(old, new)
    assert old.successor is None


# --- replicas ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def replica(tmp_path):
    started = []

    def start():
        server = ModelServer(config=config_of(m=(tmp_path, "latest")), poll_wait_seconds=0).start()
        started.append(server)
        return server, Client(server)

    yield start
    for server in started:
        server.stop(0)


def lookup(client, *ids):
    return client.predict("m", "lookup", {"u": torch.tensor(ids)})["u"][:, 0].tolist()


def push(client, ids, value):
    rows = torch.full((len(ids), 2), value)
    client.predict("m", "hashtable_assign", {"T_id": torch.tensor(ids), "T_value": rows})


def test_replicas_of_one_version_answer_alike_whether_they_were_there_before_it(replica, tmp_path):
    export(tmp_path, 1, 1)
    server, client = replica()
    push(client, [1, 7], 50.0)  # long ago
    export(tmp_path, 2, 2)
    server.refresh()
    _, other = replica()
    assert lookup(client, 1, 7) == lookup(other, 1, 7) == [2.0, 0.0]


def test_rows_that_were_pushed_after_an_export_survive_the_switch_to_it(replica, tmp_path):
    export(tmp_path, 1, 1)
    server, client = replica()
    export(tmp_path, 2, 2)
    push(client, [1, 7], 50.0)
    server.refresh()
    assert client.status("m")[2] == 30
    assert lookup(client, 1, 7) == [50.0, 50.0]


def test_the_time_that_counts_is_when_the_trainer_was_read_not_when_the_push_arrived(replica, tmp_path):
    export(tmp_path, 1, 1)
    server, client = replica()
    before = time.time() - 1
    export(tmp_path, 2, 2)
    pusher = PushClient(f"127.0.0.1:{server.port}")
    for ids, read_at in (([1], before), ([7], time.time())):
        delta = Delta("T", 2, np.array(ids), np.full((1, 2), 50.0, np.float32))
        batch = DeltaBatch("m", "hashtable_assign", 60_000, False, [delta], read_at)
        assert pusher.push(batch).status_code == 0
    pusher.close()
    assert lookup(client, 1, 7) == [50.0, 50.0]
    server.refresh()
    assert lookup(client, 1, 7) == [2.0, 50.0]


def test_a_row_that_was_erased_by_a_push_stays_erased(replica, tmp_path):
    export(tmp_path, 1, 1, skip_zero=True)
    server, client = replica()
    export(tmp_path, 2, 2, skip_zero=True)
    push(client, [1], 0.0)
    server.refresh()
    assert client.status("m")[2] == 30
    assert lookup(client, 1) == [0.0]


def test_an_export_says_when_it_began_to_read_its_rows(tmp_path):
    before = time.time()
    export(tmp_path, 1, 1)
    read_at = Manifest.read(tmp_path / "1").rows_read_at
    assert before <= read_at <= time.time()
