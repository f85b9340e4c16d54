"""Fetching one share: times, retries, deadlines, limits, objects that change meanwhile, spill files and restarts."""

import asyncio
import gc
import json
import threading
import time
import types

import numpy as np
import pytest
import torch

from shoal.errors import ConfigError
from shoal.gather import (
    GatherConfig,
    GatherPlan,
    MemoryObject,
    MemoryStore,
    RankReport,
    StoreError,
    agather,
    assign,
    chunk_ranges,
    dump_payload,
    gather,
    select_reserves,
)
from shoal.gather.protocol.fetch import Fetcher
from tests.gather.helpers import (
    BAD_SHIFT,
    PRIMARIES,
    QUICK,
    REASONS,
    WINDOW,
    payload,
    result_fields,
    small_plan,
    small_spec,
    small_store,
)

SPEC = small_spec()
DATA = {uid: dump_payload(payload(SPEC, uid)) for uid in range(1, 9)}


def store_of(*uids, mtime=0, **kwargs):
    return MemoryStore({(WINDOW, uid): MemoryObject(DATA[uid], mtime) for uid in uids}, **kwargs)


def run(store, uids, reserves=(), config=QUICK, **kwargs):
    return gather(GatherPlan(WINDOW, uids, reserves, **({"timeout_s": 100.0} | kwargs)), SPEC, store, config=config)


# ---- plan and partition


def test_partition_example():
    assert assign([14, 3, 9, 3, 27, 8, 20], 3) == [[3, 14], [8, 20], [9, 27]]
    assert assign([1, 2, 3], 4, fetch_ranks=[1, 3]) == [[], [1, 3], [], [2]]
    assert assign([], 2) == [[], []]


def test_plan_normalises_and_round_trips():
    plan = GatherPlan(4, [9, 3, 3], [7, 9, 7], time_min=5, timeout_s=2, version="1.2+a", key="grad")
    assert plan.intended == [3, 9]
    assert plan.reserves == [7, 9]
    assert plan == GatherPlan(4, np.array([9, 3, 3]), iter([7, 9, 7]), 5, None, 2.0, "1.2+a", "grad")
    assert len({plan, GatherPlan.from_json(plan.to_json())}) == 1
    assert (plan.time_min_us, plan.time_max_us) == (5, None)
    assert GatherPlan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["timeout_s"] == 2.0


def test_naive_datetimes_are_utc():
    from datetime import UTC, datetime, timedelta, timezone

    naive = GatherPlan(0, [], time_max=datetime(2026, 1, 2, 3, 4, 5, 678901))
    aware = GatherPlan(0, [], time_max=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC))
    east = GatherPlan(0, [], time_max=datetime(2026, 1, 2, 5, 4, 5, 678901, tzinfo=timezone(timedelta(hours=2))))
    assert naive.time_max_us == aware.time_max_us == east.time_max_us == 1767323045678901


@pytest.mark.parametrize(
    "kwargs",
    [
        {"window": -1}, {"window": True}, {"window": "3"}, {"gather_uids": [-1]}, {"gather_uids": [2**31]},
        {"gather_uids": ["1"]}, {"gather_uids": [np.True_]}, {"gather_uids": [np.array([1, 2])]},
        {"window": torch.ones(2, dtype=torch.int64)}, {"reserve_uids": [1.5]},
        {"version": "a/b"}, {"version": ""}, {"version": "x" * 33},
        {"version": "a_b"}, {"key": ".."}, {"timeout_s": 0}, {"time_min": "now"}, {"gather_uids": 5},
        {"reserve_uids": None},
    ],
)  # fmt: skip
def test_bad_plans_are_config_errors(kwargs):
    with pytest.raises(ConfigError):
        GatherPlan(**({"window": 1, "gather_uids": [1]} | kwargs))


@pytest.mark.parametrize("plan", [None, {"window": 1}], ids=["None", "a dict"])
def test_what_is_not_a_plan_is_refused(plan):
    with pytest.raises(ConfigError, match=f"plan must be a GatherPlan on rank 0, got {type(plan).__name__}"):
        gather(plan, SPEC, small_store())


def test_reserves_are_taken_in_order_and_sorted():
    plan = GatherPlan(0, [3, 8, 9, 14, 20, 27], [9, 30, 5, 30, 41])
    assert select_reserves(plan, {3, 8, 9, 14, 20, 27}, {3, 9, 27}) == [5, 30, 41]
    assert select_reserves(plan, {3, 8, 9, 14, 20, 27}, {3, 8, 9, 14, 27}) == [30]
    assert select_reserves(plan, {3, 8, 9, 14, 20, 27, 30}, {3, 8, 9, 14, 27}) == [5]
    assert select_reserves(plan, set(plan.intended), set(plan.intended)) == []


def test_chunk_ranges_are_balanced():
    assert chunk_ranges(7, 3) == [(0, 3), (3, 5), (5, 7)]
    assert chunk_ranges(1, 3) == [(0, 1), (1, 1), (1, 1)]


# ---- one peer


def test_time_bounds_are_inclusive():
    store = store_of(mtime=0)
    for uid, mtime in {1: 99, 2: 100, 3: 200, 4: 201}.items():
        store.objects[WINDOW, uid] = MemoryObject(DATA[uid], mtime)
    result = run(store, [1, 2, 3, 4], time_min=100, time_max=200)
    assert result.uids == [2, 3]
    assert result.skip_reasons == {1: "too_early", 4: "too_late"}
    assert result.timestamps == {2: 100, 3: 200}


def test_an_absent_object_is_waited_for():
    store = store_of(1)
    late = MemoryObject(DATA[2])

    def appear(op, uid, n):
        if uid == 2 and n == 3:
            store.objects[WINDOW, 2] = late
        return

    store.fail = appear
    assert run(store, [1, 2]).uids == [1, 2]
    assert store.head_calls[2] == 4


def test_absence_is_final_one_try_after_the_window_closed():
    store = store_of(1)
    begin = time.monotonic()
    result = run(store, [1, 2], time_max=10**6, timeout_s=300)
    assert result.skip_reasons == {2: "not_found"}
    assert store.head_calls[2] == 2
    assert time.monotonic() - begin < 200


def test_absence_is_final_after_the_limit():
    store = store_of(1)
    result = run(store, [2], config=GatherConfig(retry_interval_s=0.001, not_found_limit=3))
    assert result.skip_reasons == {2: "not_found"}
    assert store.head_calls[2] == 3


def test_at_the_deadline_the_last_try_is_the_reason():
    store = store_of(1, 2, 3)
    store.fail = lambda op, uid, n: StoreError("down") if uid == 2 else None

    async def stall(*args, **kwargs):
        if args[1] == 3:
            await asyncio.sleep(60)
        return await MemoryStore.head(store, *args, **kwargs)

    store.head = stall
    result = run(store, [1, 2, 3, 4], timeout_s=0.3)
    assert result.uids == [1]
    assert result.skip_reasons == {2: "store_error", 3: "timeout", 4: "not_found"}


def test_store_errors_are_retried_and_permanent_ones_are_not():
    store = store_of(1, 2)
    store.fail = lambda op, uid, n: (
        StoreError("no rights", permanent=True) if uid == 2 else StoreError("503") if n < 2 else None
    )
    result = run(store, [1, 2])
    assert result.uids == [1]
    assert result.skip_reasons == {2: "store_error"}
    assert store.head_calls == {1: 5, 2: 1}
    assert store.stream_calls[1] == 3


def test_fewer_bytes_than_announced_are_retried_and_more_are_oversize():
    store = store_of(1, 2)
    store.objects[WINDOW, 1].size = len(DATA[1]) + 1
    store.objects[WINDOW, 2].size = len(DATA[2]) - 1

    def heal(op, uid, n):
        if uid == 1 and op == "head" and n == 2:
            store.objects[WINDOW, 1].size = None
        return

    store.fail = heal
    result = run(store, [1, 2])
    assert result.uids == [1]
    assert result.skip_reasons == {2: "oversize"}
    assert store.stream_calls == {1: 3, 2: 1}


@pytest.mark.parametrize(("times", "accepted"), [(1, True), (2, False)])
def test_an_object_that_changes_is_read_again_once(times, accepted):
    store = store_of(1)

    def replace(op, uid, n):
        if op == "stream" and n < times:
            store.objects[WINDOW, 1] = MemoryObject(DATA[2 + n], 5 + n)
        return

    store.fail = replace
    result = run(store, [1])
    if accepted:
        assert result.uids == [1]
        assert result.timestamps == {1: 5}
    else:
        assert result.skip_reasons == {1: "changed_during_read"}


def test_a_payload_that_fails_validation_is_not_fetched_again():
    store = small_store()
    gather(small_plan(), SPEC, store, config=QUICK)
    assert store.stream_calls[BAD_SHIFT] == 1


def test_who_waits_in_the_queue_past_the_deadline_still_gets_a_try(monkeypatch):
    from shoal.gather.protocol import fetch

    late = 0.0

    def let_the_deadline_pass(op, uid, n):
        nonlocal late
        late = 1000.0

    clock = types.SimpleNamespace(
        monotonic=lambda: time.monotonic() + late, time=time.time, perf_counter=time.perf_counter
    )
    monkeypatch.setattr(fetch, "time", clock)
    store = store_of(*range(1, 9), latency_s=0.001, fail=let_the_deadline_pass)
    result = run(store, range(1, 9), config=GatherConfig(max_concurrent_fetches=1))
    assert result.uids == list(range(1, 9))
    assert late


def test_objects_that_stall_one_after_the_other_end_before_the_other_ranks_give_up():
    class Stalled(MemoryStore):
        async def head(self, window, uid, **names):
            await asyncio.sleep(600)

    config = GatherConfig(max_concurrent_fetches=1)
    fetcher = Fetcher(GatherPlan(WINDOW, range(3), timeout_s=200.0), SPEC, Stalled({}), config, patience_s=1.0)
    begin = time.monotonic()
    outcomes = asyncio.run(fetcher.round(range(3)))
    fetcher.close()
    assert [outcome.reason for outcome in outcomes] == ["timeout"] * 3
    assert 2.9 < time.monotonic() - begin < 150  # three short tries, not three times the timeout


def test_downloads_wait_for_room_in_flight():
    store = store_of(1, 2, 3, 4)
    size = len(DATA[1])
    config = GatherConfig(max_inflight_bytes=size, max_concurrent_fetches=4)
    assert run(store, [1, 2, 3, 4], config=config).uids == [1, 2, 3, 4]


def test_an_exception_that_is_not_the_stores_is_a_local_error():
    store = store_of(1, 2, 3, 4, fail=lambda op, uid, n: KeyError("bug") if uid == 2 and op == "stream" else None)
    result = run(store, [1, 2, 3, 4], config=GatherConfig(max_concurrent_fetches=1))
    assert result.uids == [1]
    assert result.skip_reasons == dict.fromkeys([2, 3, 4], "local_error")


def test_version_and_key_reach_the_store():
    seen = []

    class Spy(MemoryStore):
        async def head(self, window, uid, *, version, key):
            seen.append((version, key))
            return await super().head(window, uid, version=version, key=key)

    gather(GatherPlan(WINDOW, [1], version="7.1", key="delta"), SPEC, Spy(store_of(1).objects))
    assert seen == [("7.1", "delta")]


def test_a_caller_with_a_loop_is_not_blocked(monkeypatch):
    from shoal.gather.protocol import fetch
    from shoal.gather.protocol import gather as protocol

    turns, calls = threading.Semaphore(0), []

    def while_the_loop_turns(name, call):
        def wait(*args, **kwargs):
            while turns.acquire(blocking=False):
                pass
            calls.append((name, turns.acquire(timeout=60)))  # the caller's loop keeps running during this call
            return call(*args, **kwargs)

        return wait

    async def main():
        async def turn():
            while True:
                turns.release()
                await asyncio.sleep(0.001)

        task = asyncio.create_task(turn())
        with monkeypatch.context() as patch:
            patch.setattr(fetch, "validate_payload", while_the_loop_turns("validate", fetch.validate_payload))
            patch.setattr(protocol, "Control", while_the_loop_turns("control", protocol.Control))
            patch.setattr(protocol._Gather, "_agree", while_the_loop_turns("collective", protocol._Gather._agree))
            result = await agather(GatherPlan(WINDOW, [1, 2]), SPEC, store_of(1, 2))
        task.cancel()
        nested = gather(GatherPlan(WINDOW, [1]), SPEC, store_of(1))  # also in a thread that runs an event loop
        return result.uids, nested.uids

    assert asyncio.run(main()) == ([1, 2], [1])
    assert sorted(calls) == [("collective", True), ("control", True), ("validate", True), ("validate", True)]


# ---- reserves


def test_reserves_pass_the_same_checks():
    result = gather(small_plan(), SPEC, small_store(), config=QUICK)
    assert result.skip_reasons == REASONS


def test_more_reserve_rounds_fill_what_is_still_short():
    config = GatherConfig(retry_interval_s=0.02, reserve_rounds=3)
    store = store_of(1, 2, 3)
    result = run(store, [7, 8, 1], [7, 5, 6, 2, 3], config=config, time_max=10**6)
    assert result.uids == [1, 2, 3]
    assert result.skipped_uids == [7, 8, 5, 6]
    assert result.reserve_used_uids == [2, 3]
    assert result.success_rate == 1.0
    once = run(store_of(1, 2, 3), [7, 8, 1], [7, 5, 6, 2, 3], time_max=10**6)
    assert once.uids == [1]
    assert once.skipped_uids == [7, 8, 5, 6]


def test_min_peers_decides():
    assert run(store_of(1), [1]).decision == "APPLY"
    short = run(store_of(1), [1], config=GatherConfig(min_peers=2))
    assert short.decision == "SKIP"
    assert short.or_none() is short
    nothing = run(store_of(), [1], time_max=1)
    assert nothing.decision == "SKIP"
    assert nothing.skip_reasons == {1: "not_found"}
    assert nothing.or_none() is None


# ---- reports


def test_reports_are_small_and_round_trip():
    result = gather(small_plan(), SPEC, small_store(), config=QUICK)
    report = result.partial.report()
    data = report.to_bytes()
    attempted, accepted = len(report.uids) + len(report.skipped_uids), len(report.uids)
    assert len(data) <= 256 * (attempted + 1) + 4 * len(SPEC.params) * accepted
    assert RankReport.from_bytes(data) == report
    assert RankReport.from_bytes(RankReport().to_bytes()) == RankReport()
    sparse = RankReport(rank=2, uids=[3, 4], tiers={4: 1}, digests={3: "d"}, skipped_uids=[9], assigned_uids=[3, 4, 9])
    assert RankReport.from_bytes(sparse.to_bytes()) == sparse
    assert result.partial.success_rate_part == accepted / attempted
    assert report.norms.shape == (accepted, 3)


def test_one_record_per_window_has_every_field():
    record = gather(small_plan(), SPEC, small_store(), config=QUICK).record
    assert set(record) == {
        "window",
        "rank",
        "assigned",
        "accepted",
        "skipped_by_reason",
        "bytes",
        "fetch_s",
        "validate_s",
        "report_s",
        "overlap_s",
        "exchange_s",
        "accumulate_s",
        "step_s",
        "peak_bytes",
        "retries",
        "duplicates_dropped",
        "conflicts",
        "repaired",
    }


# ---- spill


@pytest.mark.parametrize("spill", ["memory", "disk", "auto"])
def test_where_payloads_lie_does_not_matter(spill, tmp_path):
    config = GatherConfig(retry_interval_s=0.02, spill=spill, max_resident_bytes=3000)
    result = gather(small_plan(), SPEC, small_store(), config=config)
    base = gather(small_plan(), SPEC, small_store(), config=QUICK)
    assert result_fields(result) == result_fields(base)
    on_disk = [ref.path is not None for ref in result.payloads.values()]
    assert any(on_disk) == (spill != "memory")
    assert all(on_disk) == (spill == "disk")
    for key in result.state_dict:
        if not key.endswith("quant_params"):
            assert all(torch.equal(a, b) for a, b in zip(result.state_dict[key], base.state_dict[key], strict=True))


def test_temporary_spill_files_go_with_the_result():
    result = gather(small_plan(), SPEC, small_store(), config=GatherConfig(retry_interval_s=0.02, spill="disk"))
    folder = next(iter(result.payloads.values())).path.parent
    assert len(list(folder.iterdir())) == len(result.uids)
    del result
    deadline = time.monotonic() + 100  # a worker thread may hold the last reference for a moment
    while folder.exists() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not folder.exists()


def test_a_restart_uses_validated_spill_files_again(tmp_path):
    config = GatherConfig(retry_interval_s=0.02, spill="disk", spill_dir=tmp_path)
    first = gather(small_plan(), SPEC, small_store(), config=config)
    store = small_store()
    damaged, replaced = first.uids[0], first.uids[1]
    path = first.payloads[damaged].path
    del first
    path.write_bytes(path.read_bytes()[:-5] + b"12345")
    store.objects[WINDOW, replaced].mtime_us += 1
    again = gather(small_plan(), SPEC, store, config=config)
    assert again.uids == gather(small_plan(), SPEC, small_store(), config=QUICK).uids
    streamed = {uid for uid, n in store.stream_calls.items() if n}
    assert streamed & set(again.uids) == {damaged, replaced}
    assert len(PRIMARIES) == 12


@pytest.mark.parametrize(
    "kwargs",
    [{"spill": "tape"}, {"max_concurrent_fetches": 0}, {"retry_interval_s": -1}, {"validate_workers": 0},
     {"not_found_limit": 0}, {"control_timeout_s": 0}, {"validate_workers": 1.5}, {"min_peers": True},
     {"max_abs_value": float("nan")}, {"max_inflight_bytes": "1"}, {"min_peers": None}, {"fetch_ranks": 1},
     {"fetch_ranks": [-1]}, {"fetch_ranks": [0.5]}],
)  # fmt: skip
def test_bad_settings_are_config_errors(kwargs):
    with pytest.raises(ConfigError):
        GatherConfig(**kwargs)
