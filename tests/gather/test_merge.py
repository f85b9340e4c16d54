"""The merge as a pure function: rules, counters, and that order, grouping and repetition do not matter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.gather import (
    GatherPlan,
    PartialGatherResult,
    PlanMismatch,
    RankReport,
    as_partials,
    assign,
    fault,
    index_overlap,
    merge,
    merge_reports,
    outer_update,
    param_norms,
    quality_metrics,
)
from tests.gather.helpers import model_of, sgd, small_spec

REASONS = ("index_out_of_range", "too_late", "not_found", "timeout", "store_error", "local_error")


@st.composite
def partials(draw, count=3):
    made = []
    for rank in range(draw(st.integers(1, count))):
        uids = draw(st.lists(st.integers(0, 12), unique=True, max_size=8))
        split = draw(st.integers(0, len(uids)))
        accepted, skipped = sorted(uids[:split]), sorted(uids[split:])
        versions = {uid: draw(st.integers(0, 2)) for uid in accepted}
        made.append(
            PartialGatherResult(
                rank=rank,
                world_size=count,
                assigned_uids=sorted(uids),
                uids=accepted,
                skipped_uids=skipped,
                tiers={uid: draw(st.integers(0, 1)) for uid in uids},
                skip_reasons={uid: draw(st.sampled_from(REASONS)) for uid in skipped},
                global_steps=[uid * 10 + versions[uid] for uid in accepted],
                timestamps={uid: versions[uid] // 2 for uid in accepted},
                digests={uid: f"{uid}-{versions[uid]}" for uid in accepted},
                sizes=dict.fromkeys(accepted, 5),
                norms=torch.tensor([[float(uid), versions[uid]] for uid in accepted]).reshape(-1, 2),
            )
        )
    return made


def same(a, b):
    m, n = a.manifest, b.manifest
    assert a == b
    assert m == n
    assert m.owners == n.owners
    assert torch.equal(m.norms, n.norms)
    assert m.skip_reasons == n.skip_reasons
    assert m.tiers == n.tiers


@given(partials(), partials(), partials())
def test_merging_is_associative_commutative_and_idempotent(a, b, c):
    together = merge([*a, *b, *c])
    same(merge([merge([*a, *b]), *c]), together)
    same(merge([*a, merge([*b, *c])]), together)
    same(merge([*c, *b, *a]), together)
    same(merge([merge(b), merge(c), merge(a)]), together)
    same(merge([*a, *a]), merge(a))
    same(merge([together, together]), together)


@given(partials(count=5))
def test_invariants_of_a_merge(parts):
    m = merge(parts).manifest
    attempted = {uid for p in parts for uid in p.attempted}
    assert len(m.uids) == len(set(m.uids)) == len(m.global_steps) == len(m.norms)
    assert not set(m.uids) & set(m.skipped_uids)
    assert set(m.uids) | set(m.skipped_uids) == attempted == set(m.tiers)
    assert set(m.owners) == set(m.uids)
    assert m.uids == sorted(m.uids, key=lambda uid: (m.tiers[uid], uid))
    assert set(m.uids) == {uid for p in parts for uid in p.uids}
    copies = [(uid, p.digests[uid]) for p in parts for uid in p.uids]
    assert m.duplicates_dropped + m.conflicts == len(copies) - len(m.uids)
    assert m.conflicts == len(set(copies)) - len(m.uids)
    for uid in m.skipped_uids:
        faults = [fault(p.skip_reasons[uid]) for p in parts if uid in p.skip_reasons]
        order = ("peer", "unknown", "local")
        assert fault(m.skip_reasons[uid]) == min(faults, key=order.index)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=100), st.integers(1, 64), st.data())
def test_shares_are_disjoint_cover_everything_and_are_even(uids, world, data):
    ranks = data.draw(st.none() | st.lists(st.integers(0, world - 1), unique=True, min_size=1))
    shares = assign(uids, world, ranks)
    dealt = [uid for share in shares for uid in share]
    assert sorted(dealt) == sorted(set(uids))
    assert all(share == sorted(share) for share in shares)
    sizes = [len(shares[r]) for r in (ranks or range(world))]
    assert max(sizes) - min(sizes) <= 1
    assert len(shares) == world


def test_the_kept_copy_is_the_smallest_of_time_digest_rank():
    copies = [
        RankReport(rank=rank, uids=[4], timestamps={4: mtime}, digests={4: digest}, global_steps=[step])
        for rank, mtime, digest, step in [(0, 9, "b", 1), (1, 5, "c", 2), (2, 5, "a", 3), (3, 5, "a", 4)]
    ]
    m = merge_reports(GatherPlan(0, [4]), copies)
    assert (m.owners, m.global_steps, m.timestamps, m.digests) == ({4: 2}, [3], {4: 5}, {4: "a"})
    assert (m.duplicates_dropped, m.conflicts) == (1, 2)


def test_success_wins_and_tiers_are_the_smallest():
    reports = [
        RankReport(rank=0, skipped_uids=[4, 5], skip_reasons={4: "local_error", 5: "local_error"}, tiers={4: 1, 5: 0}),
        RankReport(rank=1, uids=[4], tiers={4: 1}, skipped_uids=[5], skip_reasons={5: "too_late"}),
    ]
    m = merge_reports(GatherPlan(0, [5, 6]), reports)
    assert m.uids == [4]
    assert m.skip_reasons == {5: "too_late"}
    assert m.reserve_used_uids == [4]
    assert m.missing_uids == [5, 6]
    assert m.success_rate == 0.5


@pytest.mark.parametrize("field", [{"window": 1}, {"version": "1"}, {"spec_hash": "x"}])
def test_reports_of_another_run_are_a_plan_mismatch(field):
    with pytest.raises(PlanMismatch):
        merge_reports(GatherPlan(0, [1]), [RankReport(uids=[1]), RankReport(rank=1, **field)])
    with pytest.raises(PlanMismatch):
        merge([PartialGatherResult(uids=[1]), PartialGatherResult(rank=1, **field)])


def test_without_a_plan_everything_of_tier_0_was_intended():
    partial = PartialGatherResult(uids=[3, 7], tiers={7: 1}, skipped_uids=[1], skip_reasons={1: "timeout"})
    assert merge([partial]).intended_uids == [1, 3]
    assert merge(partial).missing_uids == [1]
    assert merge([partial], GatherPlan(0, [1, 2, 3])).intended_uids == [1, 2, 3]


@pytest.mark.parametrize("source", [None, [], (), [None], PartialGatherResult()])
def test_empty_sources_have_empty_answers(source):
    spec, model = small_spec(), model_of()
    before = [p.detach().clone() for p in model.values()]
    assert [p.uids for p in as_partials(source)] in ([], [[]])
    assert merge(source).uids == []
    assert merge(source).decision == "SKIP"
    assert outer_update(model, sgd(model), source, spec=spec).decision == "SKIP"
    assert all(torch.equal(a, b) for a, b in zip(before, model.values(), strict=True))
    report = index_overlap(source, spec=spec)
    assert (report.pairs_checked, report.mean_overlap, report.min_pair, report.max_pair) == (0, 0, None, None)
    assert (report.pairs_over_thresh, report.uids_over_thresh) == ([], {})
    assert param_norms(source, spec=spec) == {}
    assert param_norms(source, spec=spec, per_uid=True) == ({}, {})
    quality = quality_metrics(source, GatherPlan(0, [1, 2]), {1: 1.0, 2: 0.5})
    assert quality["success_rate"] == 0.0
    assert quality["intended_mean_final"] == 0.75
    assert quality["actual_mean_final"] == 0.0


def test_results_differ_by_what_was_accepted_and_by_the_decision():
    a = merge([PartialGatherResult(uids=[3])])
    assert a != merge([PartialGatherResult(uids=[4])])
    assert a != merge([PartialGatherResult(uids=[3])], min_peers=2)
    assert a != 3


def test_the_state_of_hand_made_payloads_is_aligned_with_the_peers():
    made = {
        uid: {"state_dict": {"wvals": torch.tensor([uid]), "widxs": torch.tensor([0]), "note": uid}} for uid in (2, 5)
    }
    result = merge(PartialGatherResult(uids=[2, 3, 5], payloads=made))
    assert sorted(result.state_dict) == ["widxs", "wvals"]
    first, absent, last = result.state_dict["wvals"]
    assert (first.tolist(), absent, last.tolist()) == ([2], None, [5])


def test_of_copies_that_nothing_tells_apart_the_lowest_ranks_is_kept():
    parts = [
        PartialGatherResult(rank=rank, uids=[2], payloads={2: {"state_dict": {"wvals": rank}}}) for rank in (2, 0, 1)
    ]
    for order in (parts, parts[::-1]):
        result = merge(order)
        assert result.owners == {2: 0}
        assert result.state_dict["wvals"] == [0]
        assert result.duplicates_dropped == 2


def test_other_things_are_no_source():
    with pytest.raises(ConfigError):
        as_partials({"uids": [1]})
