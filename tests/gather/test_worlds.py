"""The same window for every world size, failing ranks, sharded parameters; on gloo processes."""

import asyncio
import os
import time
from pathlib import Path

import pytest
import torch

from shoal.gather import (
    AlreadyApplied,
    ArtifactReader,
    GatherConfig,
    GatherPlan,
    MemoryObject,
    MemoryStore,
    PlanMismatch,
    RankFailure,
    UpdateLedger,
    dump_payload,
    gather,
    index_overlap,
    merge,
    outer_update,
    param_norms,
    quality_metrics,
    run_window,
    write_artifact,
)
from tests.gather.helpers import (
    ABSENT,
    PRIMARIES,
    QUICK,
    REASONS,
    WINDOW,
    group_of,
    model_of,
    payload,
    result_fields,
    sgd,
    small_plan,
    small_spec,
    small_store,
)

pytestmark = pytest.mark.timeout(1500)


def everything(rank, world, *, folder):
    spec, store, group = small_spec(), small_store(), group_of(world)
    result = gather(small_plan() if rank == 0 else None, spec, store, group=group, config=QUICK)
    out = {"fields": result_fields(result), "norms": result.norms, "manifest": result.hash}
    overlap = index_overlap(result, spec=spec, group=group)
    tight = index_overlap(result.partial, spec=spec, group=group, budget_bytes=4000)
    assert tight == overlap
    out["overlap"] = overlap
    hashes = []
    for wave_peers in (1, 4, 7):
        for budget in (1 << 30, 60_000, 24_000):
            model = model_of()
            report = outer_update(
                model,
                sgd(model),
                result,
                spec=spec,
                group=group,
                wave_peers=wave_peers,
                budget_bytes=budget,
                verify=True,
            )
            assert report.peak_bytes <= budget
            hashes.append(report.update_hash)
    out["hashes"] = hashes
    out["model"] = [p.detach().clone() for p in model.values()]
    out["norms_of_update"] = report.param_norms
    out["bytes_exchanged"] = report.bytes_exchanged
    out["sha"] = write_artifact(result, f"{folder}/{world}.pga", spec=spec, group=group, budget_bytes=4096)
    out["streams"] = dict(store.stream_calls)
    out["held"] = [x is not None for x in result.state_dict["p0idxs"]]
    out["parts"] = result.partial.success_rate_part
    return out


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    from tests.gather.ranks import run_ranks

    folder = tmp_path_factory.mktemp("artifacts")
    return folder, {w: run_ranks(w, everything, folder=str(folder)) for w in (1, 2, 3, 4)}


def test_every_field_is_equal_for_every_world_size(worlds):
    _, runs = worlds
    base = runs[1][0]["fields"]
    for ranks in runs.values():
        for out in ranks:
            assert out["fields"] == base
    assert {uid: base["skip_reasons"][uid] for uid in base["skipped_uids"]} == REASONS
    assert base["reserve_used_uids"] == [43, 53, 59]
    assert base["success_rate"] == 10 / 12


def test_norms_overlap_and_update_are_bit_equal_for_every_world_size(worlds):
    _, runs = worlds
    base = runs[1][0]
    assert len(set(base["hashes"])) == 1
    for ranks in runs.values():
        for out in ranks:
            assert torch.equal(out["norms"], base["norms"])
            assert out["overlap"] == base["overlap"]
            assert out["hashes"] == base["hashes"]
            assert out["norms_of_update"] == base["norms_of_update"]
            assert out["manifest"] == base["manifest"]
            assert all(torch.equal(a, b) for a, b in zip(out["model"], base["model"], strict=True))
    assert runs[1][0]["bytes_exchanged"] == 0 < runs[2][0]["bytes_exchanged"]


def test_artifact_bytes_are_equal_for_every_world_size(worlds):
    folder, runs = worlds
    shas = {ranks[0]["sha"] for ranks in runs.values()}
    assert len(shas) == 1
    assert all(out["sha"] is None for ranks in runs.values() for out in ranks[1:])
    reader = ArtifactReader(folder / "3.pga")
    model = model_of()
    report = outer_update(model, sgd(model), reader, spec=small_spec())
    assert report.update_hash == runs[1][0]["hashes"][0]


def test_no_peer_is_streamed_twice(worlds):
    _, runs = worlds
    for ranks in runs.values():
        total = {}
        for out in ranks:
            for uid, n in out["streams"].items():
                total[uid] = total.get(uid, 0) + n
        assert set(total.values()) == {1}
        assert set(total) == set(PRIMARIES) - {ABSENT, 11} | {43, 47, 53, 59}


def test_payloads_stay_where_they_were_fetched(worlds):
    _, runs = worlds
    for ranks in runs.values():
        held = torch.tensor([out["held"] for out in ranks]).sum(0)
        assert held.tolist() == [1] * len(held)


# ---- other numbers


def other_numbers(rank, world, *, seed, folder):
    """A random model, quantization, peers, faults, reserves, waves and budget; everything that must not depend on W."""
    import random

    from shoal.gather import GradientSpec, QuantSpec, as_partials

    draw = random.Random(seed)
    shapes = [tuple(draw.randint(1, 40) for _ in range(draw.randint(0, 3))) for _ in range(5)]
    quant = draw.choice([None, QuantSpec(4, 6), QuantSpec(23, 4.5)])
    spec = GradientSpec.from_model(
        model_of(shapes), target_chunk=draw.randint(3, 20), topk=draw.randint(1, 12), quant=quant
    )
    uids = draw.sample(range(2**31), 17)
    primaries, reserves = uids[:11], [*uids[3:6], *uids[11:]]
    objects = {}
    for uid in uids:
        data = dump_payload(payload(spec, uid), format=draw.choice(["pt", "safetensors"]))
        fault = draw.choice(["", "", "", "absent", "late", "cut", "early"])
        times = {"late": 10**6 + 1, "early": 9}
        if fault != "absent":
            cut = draw.randrange(len(data)) if fault == "cut" else len(data)
            objects[WINDOW, uid] = MemoryObject(data[:cut], times.get(fault, draw.choice([10, 500, 10**6])))
    plan = GatherPlan(WINDOW, primaries, reserves, time_min=10, time_max=10**6, timeout_s=20.0, version="3.1+x")
    wave_peers, prefetch = draw.randint(1, 5), draw.randint(1, 3)
    budget = draw.choice([1 << 30, 150_000])
    store, group = MemoryStore(objects), group_of(world)
    config = GatherConfig(retry_interval_s=0.02, reserve_rounds=2, spill=draw.choice(["disk", "memory"]))
    result = gather(plan, spec, store, group=group, config=config)
    again = merge(as_partials(result), plan)
    assert again.manifest == result.manifest
    assert (again.owners, again.norms.tolist()) == (result.owners, result.norms.tolist())
    assert merge([result, again, *as_partials(again)], plan).manifest == result.manifest
    model = model_of(shapes)
    report = outer_update(
        model, sgd(model), result.partial if rank % 2 else result, spec=spec, group=group, budget_bytes=budget,
        wave_peers=wave_peers, prefetch=prefetch, verify=True,
    )  # fmt: skip
    overlap = index_overlap(result, spec=spec, threshold=0.05, group=group)
    sha = write_artifact(result, f"{folder}/{seed}-{world}.pga", spec=spec, group=group)
    return {
        "fields": result_fields(result), "norms": result.norms.tolist(), "hash": report.update_hash,
        "peak": report.peak_bytes, "tiles": report.tiles, "waves": report.waves, "norm": report.global_l2_norm,
        "means": report.param_means, "overlap": (overlap.counts.tolist(), overlap.pairs_over_thresh,
        overlap.uids_over_thresh), "streams": set(store.stream_calls.values()) | {1},
    }, sha  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_windows_are_equal_for_every_world_size(run_ranks, seed, tmp_path):
    ((base, sha),) = run_ranks(1, other_numbers, seed=seed, folder=str(tmp_path))
    assert base["fields"]["uids"]
    assert base["streams"] == {1}
    runs = run_ranks(2 + seed, other_numbers, seed=seed, folder=str(tmp_path))
    assert [out for out, _ in runs] == [base] * (2 + seed)
    assert [s for _, s in runs] == [sha] + [None] * (1 + seed)


# ---- the worked example


def example(rank, world):
    spec = small_spec()
    bad = payload(spec, 8)
    bad["state_dict"]["p0idxs"][:3] = 255
    bad["state_dict"]["p2idxs"][:] = 255
    objects = {(WINDOW, uid): MemoryObject(dump_payload(payload(spec, uid)), 100) for uid in (3, 9, 27, 5, 41)}
    objects[WINDOW, 8] = MemoryObject(dump_payload(bad), 100)
    objects[WINDOW, 20] = MemoryObject(dump_payload(payload(spec, 20)), 10**7)
    objects[WINDOW, 30] = MemoryObject(b"", 100)
    plan = GatherPlan(WINDOW, [3, 8, 9, 14, 20, 27], [9, 30, 5, 30, 41], time_max=10**6)
    result = gather(plan, spec, MemoryStore(objects), group=group_of(world), config=QUICK)
    scores = {3: 0.9, 8: 0.1, 9: 0.5, 14: 0.3, 20: 0.2, 27: 0.4, 5: 0.6, 41: 0.8}
    return result_fields(result), result.partial.report(), quality_metrics(result, plan, scores)


def test_worked_example_of_three_ranks(run_ranks):
    runs = run_ranks(3, example)
    for fields, _, quality in runs:
        assert fields["uids"] == [3, 9, 27, 5, 41]
        assert fields["skipped_uids"] == [8, 14, 20, 30]
        assert fields["skip_reasons"] == {
            8: "index_out_of_range", 14: "not_found", 20: "too_late", 30: "corrupt_container"
        }  # fmt: skip
        assert fields["success_rate"] == 5 / 6
        assert fields["missing_uids"] == [8, 14, 20]
        assert fields["reserve_used_uids"] == [5, 41]
        assert quality["intended_mean_final"] == pytest.approx(0.4)
        assert quality["actual_mean_final"] == pytest.approx(0.64)
        assert quality["n_reserve_used"] == 2
        assert quality["successful_peers"] == [3, 9, 27]
    assert [report.success_rate_part for _, report, _ in runs] == [2 / 3, 0, 1]
    assert runs[1][1].uids == []


# ---- failures


def broken_loop(rank, world, *, repair_rounds):
    def fail(op, uid, n):
        return RuntimeError("boom") if rank == 1 and op == "stream" and uid != first else None

    first = PRIMARIES[1]  # absent: the only peer of rank 1 that is settled before the loop fails
    store = small_store(fail=fail)
    config = GatherConfig(retry_interval_s=0.02, repair_rounds=repair_rounds, max_concurrent_fetches=1)
    result = gather(small_plan(), small_spec(), store, group=group_of(world), config=config)
    return result_fields(result), result.record["repaired"], result.partial.skip_reasons


def test_another_rank_repairs_what_a_broken_rank_left(run_ranks, worlds):
    base = worlds[1][1][0]["fields"]
    for fields, repaired, _ in run_ranks(3, broken_loop, repair_rounds=1):
        assert fields == base
        assert repaired > 0


def test_without_repair_the_peers_of_a_broken_rank_are_local_errors(run_ranks):
    runs = run_ranks(3, broken_loop, repair_rounds=0)
    reasons = runs[0][0]["skip_reasons"]
    assert list(reasons.values()).count("local_error") >= 3
    assert all(fields == runs[0][0] for fields, _, _ in runs)


def dies(rank, world):
    class Deadly(MemoryStore):
        async def head(self, *args, **kwargs):
            if rank == 1:
                os._exit(1)
            return await super().head(*args, **kwargs)

    model = model_of()
    before = [p.detach().clone() for p in model.values()]
    begin = time.monotonic()
    config = GatherConfig(retry_interval_s=0.02, control_timeout_s=200.0)
    with pytest.raises(RankFailure) as caught:
        run_window(
            model, sgd(model), small_plan(), spec=small_spec(), store=Deadly(small_store().objects),
            group=group_of(world), config=config,
        )  # fmt: skip
    unchanged = all(torch.equal(a, b) for a, b in zip(before, model.values(), strict=True))
    return caught.value.ranks, time.monotonic() - begin, unchanged


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_dies_while_fetching_is_named_by_all_others(run_ranks, world):
    runs = run_ranks(world, dies, may_die=(1,))
    assert runs[1] is None
    for ranks, seconds, unchanged in (r for r in runs if r is not None):
        assert ranks == [1]
        assert seconds < 200.0
        assert unchanged


def dies_beside_a_slow_rank(rank, world):
    """Rank 2 is still fetching when rank 0, which waits for all, sees that rank 1 died; neither is in a hurry."""
    import torch.distributed as dist

    shared = dist.distributed_c10d._get_default_store()

    class Deadly(MemoryStore):
        async def head(self, *args, **kwargs):
            if rank == 1:
                os._exit(1)
            while rank == 2 and not shared.check(["told"]):
                await asyncio.sleep(0.05)
            return await super().head(*args, **kwargs)

    config = GatherConfig(retry_interval_s=0.02, control_timeout_s=200.0)
    with pytest.raises(RankFailure) as caught:
        gather(
            small_plan(timeout_s=200.0), small_spec(), Deadly(small_store().objects), group=group_of(world),
            config=config,
        )  # fmt: skip
    shared.set("told", "1")
    return caught.value.ranks


def test_a_rank_that_only_takes_long_is_not_named_with_the_dead(run_ranks):
    assert run_ranks(3, dies_beside_a_slow_rank, may_die=(1,)) == [[1], None, [1]]


def unreadable(rank, world, *, at):
    """Rank 1's own payloads cannot be read from its ``at``-th read of the update on."""
    from shoal.gather import UpdateInterrupted
    from shoal.gather.payload.payload_ref import PayloadRef

    model = model_of()
    before = [p.detach().clone() for p in model.values()]
    config = GatherConfig(retry_interval_s=0.02, spill="disk")
    result = gather(small_plan(), small_spec(), small_store(), group=group_of(world), config=config)
    reads = 0

    def check(self):
        nonlocal reads
        reads += 1
        if rank == 1 and reads > at:
            raise OSError("the disk is gone")

    PayloadRef.check_readable = check
    with pytest.raises(UpdateInterrupted) as caught:
        outer_update(model, sgd(model), result, spec=small_spec(), group=group_of(world), snapshot="cpu", wave_peers=2)
    restored = all(torch.equal(a, b) for a, b in zip(before, model.values(), strict=True))
    return caught.value.applied_params, restored


@pytest.mark.parametrize(("at", "params"), [(0, []), (3, ["p0"])])
def test_all_ranks_leave_an_update_together_when_one_cannot_read(run_ranks, at, params):
    runs = run_ranks(3, unreadable, at=at)
    assert runs == [(params, True)] * 3


def unreadable_for_an_artifact(rank, world, *, broken, path):
    from shoal.gather import GatherError
    from shoal.gather.payload.payload_ref import PayloadRef

    result = gather(small_plan(), small_spec(), small_store(), group=group_of(world), config=QUICK)
    reads = 0

    def check(self):
        nonlocal reads
        reads += 1
        if rank == broken and reads == 2:
            raise OSError("the disk is gone")

    PayloadRef.check_readable = check
    with pytest.raises(GatherError, match="the artifact was not written") as caught:
        write_artifact(result, path, spec=small_spec(), group=group_of(world), budget_bytes=4096)
    return str(caught.value).partition("written: ")[2]


@pytest.mark.parametrize("broken", [0, 1])
def test_all_ranks_are_told_at_once_when_one_cannot_read_for_an_artifact(run_ranks, tmp_path, broken):
    first, second = run_ranks(2, unreadable_for_an_artifact, broken=broken, path=str(tmp_path / "a.pga"))
    assert ("the disk is gone" if broken == 0 else "rank 1 could not read peer") in first
    assert second == "another rank failed"
    assert not list(tmp_path.iterdir())


def dies_in_update(rank, world):
    from shoal.gather import UpdateInterrupted
    from shoal.gather.payload.payload_ref import PayloadRef

    result = gather(small_plan(), small_spec(), small_store(), group=group_of(world), config=QUICK)
    if rank == 1:
        PayloadRef.check_readable = lambda self: os._exit(1)
    model = model_of()
    with pytest.raises(UpdateInterrupted):
        outer_update(model, sgd(model), result, spec=small_spec(), group=group_of(world), control_timeout_s=200.0)
    return True


def test_survivors_of_a_death_in_the_update_are_interrupted(run_ranks):
    assert run_ranks(3, dies_in_update, may_die=(1,)) == [True, None, True]


def dies_after_the_update(rank, world):
    from shoal.gather.protocol import window

    if rank == 1:
        window.write_artifact = lambda *args, **kwargs: os._exit(9)
    model, ledger = model_of(), UpdateLedger()
    report = run_window(
        model, sgd(model), small_plan(), spec=small_spec(), store=small_store(), group=group_of(world),
        config=GatherConfig(retry_interval_s=0.02, control_timeout_s=200), ledger=ledger,
    )  # fmt: skip
    return report.decision, ledger.step, report.artifact_sha256, report.update.update_hash


def test_an_update_stands_when_a_rank_dies_before_its_artifact_is_written(run_ranks, worlds):
    first, _, last = run_ranks(3, dies_after_the_update, may_die=(1,))
    assert first == last == ("APPLY", 1, None, worlds[1][1][0]["hashes"][0])


def replay_in_group(rank, world, *, path):
    spec, group = small_spec(), group_of(world)
    model = model_of()
    report = outer_update(model, sgd(model), ArtifactReader(path), spec=spec, group=group, verify=True)
    overlap = index_overlap(ArtifactReader(path), spec=spec, group=group)
    sha = write_artifact(ArtifactReader(path), f"{path}.{world}", spec=spec, group=group, artifact_rank=1)
    return report.update_hash, report.bytes_exchanged, overlap.counts.tolist(), sha


def test_an_artifact_on_every_rank_needs_no_exchange(run_ranks, worlds):
    folder, runs = worlds
    base = runs[1][0]
    for rank, (digest, moved, counts, sha) in enumerate(run_ranks(2, replay_in_group, path=str(folder / "2.pga"))):
        assert (digest, moved, counts) == (base["hashes"][0], 0, base["overlap"].counts.tolist())
        assert sha == (base["sha"] if rank == 1 else None)


def budgets(rank, world):
    from shoal.gather import BudgetTooSmall

    result = gather(small_plan(), small_spec(), small_store(), group=group_of(world), config=QUICK)
    model = model_of()
    with pytest.raises(BudgetTooSmall) as caught:
        outer_update(model, sgd(model), result, spec=small_spec(), group=group_of(world), budget_bytes=100)
    with pytest.raises(BudgetTooSmall) as whole:
        run_window(
            model, sgd(model), small_plan(), spec=small_spec(), store=small_store(), group=group_of(world),
            config=QUICK, budget_bytes=100,
        )  # fmt: skip
    return caught.value.needed, whole.value.needed


def test_a_budget_that_is_too_small_is_told_to_all_ranks(run_ranks):
    needed = {n for world in (1, 2) for pair in run_ranks(world, budgets) for n in pair}
    assert needed == {64 * 48 * 4 + 8 * 256 + 12 * 8 + 2 * 4 * 20}


def damaged(rank, world, *, folder, lone):
    """Rank 1's spill file goes bad between the gather and the overlap."""
    from shoal.gather.protocol import window

    overlap = window.index_overlap

    def meddle(result, **kwargs):
        if rank == 1:
            path = next(iter(result.payloads.values())).path
            path.write_bytes(path.read_bytes()[:100])
        return overlap(result, **kwargs)

    window.index_overlap = meddle
    spec, model, ledger = small_spec(), model_of(), UpdateLedger()
    before = [p.detach().clone() for p in model.values()]
    config = GatherConfig(retry_interval_s=0.02, spill="disk", spill_dir=f"{folder}/{rank}", control_timeout_s=200)
    report = run_window(
        model, sgd(model), small_plan() if rank == 0 else None, spec=spec, store=small_store(), group=group_of(world),
        config=config, ledger=ledger,
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(before, model.values(), strict=True))
    result = gather(small_plan(), spec, small_store(), group=group_of(world), config=QUICK)
    again = outer_update(model, sgd(model), [result.partial] if lone else result, spec=spec, group=group_of(world))
    return report.decision, list(report.unready), ledger.step, again.decision, again.update_hash


@pytest.mark.parametrize("lone", [False, True])
def test_a_spill_file_that_goes_bad_on_one_rank_skips_the_window_on_all(run_ranks, worlds, lone, tmp_path):
    runs = run_ranks(2, damaged, folder=str(tmp_path), lone=lone)
    assert runs == [("SKIP", [1], 0, "APPLY", worlds[1][1][0]["hashes"][0])] * 2


def broken_step(rank, world):
    from shoal.gather import UpdateInterrupted

    spec, model = small_spec(), model_of()
    result = gather(small_plan(), spec, small_store(), group=group_of(world), config=QUICK)
    optimizer, begin = sgd(model), time.monotonic()
    if rank == 1:
        optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    before = [p.detach().clone() for p in model.values()]
    with pytest.raises(UpdateInterrupted):
        outer_update(model, optimizer, result, spec=spec, group=group_of(world), snapshot="cpu")
    assert all(torch.equal(a, b) for a, b in zip(before, model.values(), strict=True))
    return time.monotonic() - begin


def test_a_step_that_fails_on_one_rank_interrupts_all_at_once(run_ranks):
    assert max(run_ranks(3, broken_step)) < 150  # much less than the 240 s that they would wait for each other


def fetch_ranks(rank, world):
    config = GatherConfig(
        retry_interval_s=0.02, fetch_ranks=(1,) if rank == 0 else (0,), min_peers=1 if rank == 0 else 99
    )
    store = small_store()
    result = gather(small_plan(), small_spec(), store, group=group_of(world), config=config)
    model = model_of()
    report = outer_update(model, sgd(model), result, spec=small_spec(), group=group_of(world))
    return result_fields(result), sum(store.head_calls.values()) > 0, report.update_hash


def test_only_rank_0s_fetch_ranks_fetch(run_ranks, worlds):
    base = worlds[1][1][0]
    runs = run_ranks(2, fetch_ranks)
    assert [fields for fields, _, _ in runs] == [base["fields"]] * 2
    assert [asked for _, asked, _ in runs] == [False, True]
    assert {digest for _, _, digest in runs} == set(base["hashes"])


def all_bad(rank, world):
    spec, model = small_spec(), model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = MemoryStore({(WINDOW, uid): MemoryObject(b"junk", 5) for uid in PRIMARIES})
    before = [p.detach().clone() for p in model.values()]
    ledger = UpdateLedger()
    report = run_window(
        model, optimizer, small_plan(), spec=spec, store=store, group=group_of(world), config=QUICK, ledger=ledger
    )
    assert all(torch.equal(a, b) for a, b in zip(before, model.values(), strict=True))
    assert not optimizer.state
    assert not store.artifacts
    assert report.result.or_none() is None
    return report.decision, report.result.skip_reasons, ledger.step, ledger.last, report.artifact_sha256


def test_nothing_happens_when_every_peer_is_bad(run_ranks):
    for decision, reasons, step, last, sha in run_ranks(2, all_bad):
        assert decision == "SKIP"
        assert set(reasons) == {*PRIMARIES, 43, 47, 53, 59}
        assert (step, last, sha) == (0, None, None)


def empty_plan(rank, world):
    model = model_of()
    report = run_window(
        model, sgd(model), GatherPlan(1, []), spec=small_spec(), store=MemoryStore({}), group=group_of(world)
    )
    return report.decision, report.result.uids, report.overlap.pairs_checked


def test_an_empty_plan_skips_at_once_on_all_ranks(run_ranks):
    assert run_ranks(2, empty_plan) == [("SKIP", [], 0)] * 2


def other_plan(rank, world):
    plan = [small_plan(), GatherPlan(99, [1, 2, 3], version="9"), {"window": 99}][rank]
    return result_fields(gather(plan, small_spec(), small_store(), group=group_of(world), config=QUICK))


def other_spec(rank, world):
    store = small_store()
    spec = small_spec() if rank == 0 else small_spec(topk=4)
    with pytest.raises(PlanMismatch):
        gather(small_plan(), spec, store, group=group_of(world), config=QUICK)
    return sum(store.head_calls.values())


def test_another_plan_on_another_rank_has_no_effect(run_ranks, worlds):
    assert run_ranks(3, other_plan) == [worlds[1][1][0]["fields"]] * 3


def test_another_spec_on_another_rank_stops_all_before_any_fetch(run_ranks):
    assert run_ranks(3, other_spec) == [0, 0, 0]


def window_twice(rank, world):
    model, ledger, store = model_of(), UpdateLedger(), small_store()
    kwargs = {"spec": small_spec(), "store": store, "group": group_of(world), "config": QUICK, "ledger": ledger}
    first = run_window(model, sgd(model), small_plan(), verify=True, **kwargs)
    assert first.upload is None or first.upload.wait(200)
    heads = sum(store.head_calls.values())
    with pytest.raises(AlreadyApplied):
        run_window(model, sgd(model), small_plan(), **kwargs)
    assert sum(store.head_calls.values()) == heads
    return first.decision, ledger.step, ledger.last, first.artifact_sha256, sorted(store.artifacts), first.result.hash


def test_a_window_is_applied_once(run_ranks):
    runs = run_ranks(2, window_twice)
    assert [r[:2] for r in runs] == [("APPLY", 1)] * 2
    assert runs[0][2] == (WINDOW, runs[0][5])
    assert runs[0][3] is not None
    assert runs[1][3] is None
    assert [r[4] for r in runs] == [[(WINDOW, "0")], []]


# ---- sharded parameters

UNEVEN = ((50, 48), (34,), (7,), (6, 4, 3), (1, 8))


def sharded(rank, world, *, placement, budget):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    from shoal.gather import GradientSpec

    whole = model_of(UNEVEN)
    spec = GradientSpec.from_model(whole, target_chunk=16, topk=8)
    objects = {(WINDOW, uid): MemoryObject(dump_payload(payload(spec, uid)), uid) for uid in PRIMARIES}
    result = gather(GatherPlan(WINDOW, PRIMARIES), spec, MemoryStore(objects), group=group_of(world), config=QUICK)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = model_of(UNEVEN)

    mesh = init_device_mesh("cpu", (world,))
    net = Net()
    if placement == "fsdp":
        net.weights = model_of(UNEVEN)
        fully_shard(net, mesh=mesh)
        net = net.weights
    else:
        net = model_of(UNEVEN)
        for name, p in list(net.items()):
            if p.ndim > 1:
                dim = min(placement, p.ndim - 1)
                net[name] = torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(dim)]))
    momentum = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    report = outer_update(
        net, torch.optim.SGD(net.parameters(), **momentum), result, spec=spec, group=group_of(world),
        budget_bytes=budget, verify=True,
    )  # fmt: skip
    plain = outer_update(
        whole, torch.optim.SGD(whole.parameters(), **momentum), result, spec=spec, group=group_of(world)
    )
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.values()]
    for name, a, b in zip(whole, full, whole.values(), strict=True):
        assert torch.equal(a, b), name
    assert report.peak_bytes <= budget
    assert report.param_norms == pytest.approx(plain.param_norms, rel=1e-12)
    return report.bytes_exchanged, plain.bytes_exchanged


@pytest.mark.parametrize("placement", ["fsdp", 0, 1, 2])
def test_sharded_model_ends_with_the_same_tensors_as_the_replicated_one(run_ranks, placement):
    for sharded_bytes, whole_bytes in run_ranks(2, sharded, placement=placement, budget=20_000):
        assert 0 < sharded_bytes < whole_bytes


MANY = ((64, 40), *(((24, 12), (24,), (5, 3, 4)) * 2))


def many_small(rank, world, *, dim, budget, wave_peers, prefetch):
    """Staged bytes against ``prefetch * wave_peers`` slots of the largest tile."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from shoal.gather import GradientSpec, tile_plan
    from shoal.gather.protocol.waves import Waves
    from shoal.gather.update.regions import region_of

    whole = model_of(MANY)
    spec = GradientSpec.from_model(whole, target_chunk=8, topk=6)
    objects = {(WINDOW, uid): MemoryObject(dump_payload(payload(spec, uid)), uid) for uid in range(7)}
    config = GatherConfig(retry_interval_s=0.02, spill="disk")
    result = gather(GatherPlan(WINDOW, range(7)), spec, MemoryStore(objects), group=group_of(world), config=config)
    mesh = init_device_mesh("cpu", (world,))
    net = torch.nn.ParameterDict(
        {n: torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(min(dim, p.ndim - 1))]))
         for n, p in model_of(MANY).items()}
    )  # fmt: skip
    alive = []
    start = Waves.start

    def counted(self, *args, **kwargs):
        alive.append(pending := start(self, *args, **kwargs))
        held = sum(len(b) for wave in alive for b in [*wave.buffers.values(), *wave.keep] if not mapped(self, b))
        assert held <= self.staged_bytes, (held, self.staged_bytes)
        return pending

    def mapped(waves, tensor):
        storages = {data.untyped_storage().data_ptr() for ref in waves.holding.refs.values()
                    for p in ref.params for data in (p.idxs, p.vals)}  # fmt: skip
        return tensor.untyped_storage().data_ptr() in storages

    Waves.start = counted
    report = outer_update(
        net, sgd(net), result, spec=spec, group=group_of(world), budget_bytes=budget, wave_peers=wave_peers,
        prefetch=prefetch,
    )  # fmt: skip
    Waves.start = start
    plain = outer_update(whole, sgd(whole), result, spec=spec, group=group_of(world))
    for name in whole:
        assert torch.equal(net[name].full_tensor(), whole[name]), name
    bound, head = 0, 16 + 4 + 8 + 4 + 4 * 4 + len("float32") + 1
    for param, tensor in zip(spec.params, net.values(), strict=True):
        region = region_of(param, tensor)
        raw = param.index_bytes + param.k
        plan = tile_plan(
            numel=region.numel, itemsize=4, chunks=len(region.chunks), totalk=param.totalk, k=param.k,
            raw_per_chunk=raw, budget_bytes=budget, wave_peers=wave_peers, prefetch=prefetch,
        )  # fmt: skip
        bound = max(bound, prefetch * wave_peers * (plan.tile_chunks * raw + head))
    assert 0 < report.staged_bytes <= bound, (report.staged_bytes, bound)
    return report.staged_bytes, plain.staged_bytes


@pytest.mark.parametrize(("dim", "budget"), [(0, 1 << 30), (1, 8_000)])
def test_staging_of_sharded_parameters_does_not_grow_with_ranks(run_ranks, dim, budget):
    for staged, _ in run_ranks(4, many_small, dim=dim, budget=budget, wave_peers=3, prefetch=2):
        assert staged > 0


def two_dimensional(rank, world):
    """FSDP over tensor parallelism on the same dimension, which is ``_StridedShard``."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    from shoal.errors import ConfigError, UnsupportedError
    from shoal.gather import GradientSpec

    shapes = ((48, 20), (36, 20), (33,), (20, 4, 3))  # 12 rows per rank, in chunks of 8
    whole = model_of(shapes)
    spec = GradientSpec.from_model(whole, target_chunk=8, topk=6)
    objects = {(WINDOW, uid): MemoryObject(dump_payload(payload(spec, uid)), uid) for uid in range(5)}
    result = gather(GatherPlan(WINDOW, range(5)), spec, MemoryStore(objects), group=group_of(world), config=QUICK)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = (
        [_StridedShard(0, split_factor=2), Shard(0)],
        [Shard(0), Shard(1)],
        [Replicate(), Shard(0)],
        [_StridedShard(0, split_factor=2), Shard(0)],
    )
    net = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(distribute_tensor(p.detach(), mesh, placed))
         for (name, p), placed in zip(model_of(shapes).items(), placements, strict=True)}
    )  # fmt: skip
    report = outer_update(net, sgd(net), result, spec=spec, group=group_of(world), verify=True)
    plain = outer_update(whole, sgd(whole), result, spec=spec, group=group_of(world))
    for name in whole:
        assert torch.equal(net[name].full_tensor(), whole[name]), name
    assert report.param_norms == pytest.approx(plain.param_norms, rel=1e-12)
    pieces = torch.nn.ParameterDict(net.items())
    pieces["p0"] = torch.nn.Parameter(
        distribute_tensor(whole["p0"].detach(), mesh, [Replicate(), _StridedShard(0, split_factor=3)])
    )
    before = pieces["p1"].to_local().clone()
    with pytest.raises((UnsupportedError, ConfigError), match="redistribute"):
        outer_update(pieces, sgd(pieces), result, spec=spec, group=group_of(world))
    assert torch.equal(pieces["p1"].to_local(), before)
    return True


def test_fsdp_over_tensor_parallel_ends_with_the_same_tensors(run_ranks):
    assert run_ranks(4, two_dimensional) == [True] * 4


def infinite_shard(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from shoal.gather import GradientSpec, pack12

    whole = model_of(((8, 4), (8,)))
    spec = GradientSpec.from_model(whole, target_chunk=4, topk=2, quant=None)

    def huge(uid):
        made = payload(spec, uid)
        vals, idxs = made["state_dict"]["p0vals"], torch.tensor([[0, 1]] * 2)
        made["state_dict"]["p0idxs"] = pack12(idxs)
        vals[:] = 1.0
        vals[0] = 3e38  # finite, but the sum of two is not; only in the first rows
        return made

    objects = {(WINDOW, uid): MemoryObject(dump_payload(huge(uid)), uid) for uid in (1, 2)}
    config = GatherConfig(max_abs_value=float("inf"))
    result = gather(GatherPlan(WINDOW, [1, 2]), spec, MemoryStore(objects), group=group_of(world), config=config)
    mesh = init_device_mesh("cpu", (world,))
    net = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for name, p in whole.items()}
    )
    report = outer_update(net, sgd(net), result, spec=spec, group=group_of(world), clip="none")
    assert torch.equal(net["p0"].full_tensor(), whole["p0"])
    assert not torch.equal(net["p1"].full_tensor(), whole["p1"])
    return report.skipped_params, report.applied_params


def test_an_update_that_is_not_finite_on_one_rank_is_skipped_on_all(run_ranks):
    assert run_ranks(2, infinite_shard) == [(["p0"], ["p1"])] * 2


# ---- every consumer, every source


def consumers(rank, world, *, folder):
    spec, group = small_spec(), group_of(world)
    result = gather(small_plan(), spec, small_store(), group=group, config=QUICK)
    path = Path(folder) / "a.pga"
    write_artifact(result, path, spec=spec, group=group)
    import torch.distributed as dist

    dist.barrier()
    local = gather(small_plan(), spec, small_store(), config=QUICK)  # the complete window on one rank
    partials = [gather_share(spec, share) for share in (PRIMARIES[::2], PRIMARIES[1::2], [43, 53, 59, 47])]
    answers = []
    for source in (local, partials, partials[::-1], ArtifactReader(path), merge(partials, small_plan())):
        model = model_of()
        answers.append(
            (
                outer_update(model, sgd(model), source, spec=spec).update_hash,
                index_overlap(source, spec=spec),
                {k: float(v) for k, v in param_norms(source, spec=spec).items()},
                quality_metrics(source, small_plan(), {uid: uid / 10 for uid in PRIMARIES}),
            )
        )
    assert answers[0][1] == index_overlap(result, spec=spec, group=group)
    assert answers[0][2] == {k: float(v) for k, v in param_norms(result, spec=spec).items()}
    return [a == answers[0] for a in answers]


def gather_share(spec, uids):
    tier = {43: 1, 53: 1, 59: 1, 47: 1}
    partial = gather(small_plan_of(uids), spec, small_store(), config=QUICK).partial
    partial.tiers = {uid: tier.get(uid, 0) for uid in partial.tiers}
    return partial


def small_plan_of(uids):
    return GatherPlan(WINDOW, uids, time_max=small_plan().time_max_us, timeout_s=20.0)


def test_every_consumer_answers_alike_for_every_source(run_ranks, tmp_path):
    for same in run_ranks(2, consumers, folder=str(tmp_path)):
        assert same == [True] * 5


LATENCY_S = 0.2


def slow(rank, world):
    """Seconds that the store's latencies alone take of this rank's share. Ranks meet in every fetch: they wait there
    until each is in its own, so that the shares take no longer than the longest of them."""
    import torch.distributed as dist

    shared = dist.distributed_c10d._get_default_store()

    class Meeting(MemoryStore):
        waited = 0.0
        inside = 0

        async def head(self, window, uid, **names):
            self.inside += 1
            assert self.inside == 1  # one fetch at a time
            self.waited += 2 * LATENCY_S  # for a head and a stream
            turn = round(self.waited / (2 * LATENCY_S))
            shared.add(f"turn {turn}", 1)
            while shared.add(f"turn {turn}", 0) < world:
                await asyncio.sleep(0.005)
            self.inside -= 1
            return await super().head(window, uid, **names)

    spec = small_spec()
    objects = {(WINDOW, uid): MemoryObject(dump_payload(payload(spec, uid)), uid) for uid in range(16)}
    plan, config = GatherPlan(WINDOW, range(16), timeout_s=200.0), GatherConfig(max_concurrent_fetches=1)
    store = Meeting(objects)
    result = gather(plan, spec, store, group=group_of(world), config=config)
    assert len(result.uids) == 16
    return store.waited


def test_fetching_gets_faster_with_ranks(run_ranks):  # the benchmark measures the real times
    times = {w: max(run_ranks(w, slow)) for w in (1, 2, 4)}
    assert times[2] <= 0.6 * times[1]
    assert times[4] <= 0.35 * times[1]
