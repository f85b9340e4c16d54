"""Index overlap: the worked example, exact thresholds, offenders, splits of the work, hand-made sources."""

import itertools

import pytest
import torch

from shoal.errors import ConfigError
from shoal.gather import (
    SEVERITY_MULTIPLIERS,
    BudgetTooSmall,
    GatherPlan,
    GradientSpec,
    MemoryObject,
    MemoryStore,
    ParamSpec,
    PartialGatherResult,
    chunk_ranges,
    dump_payload,
    gather,
    index_overlap,
    overlap_severity,
    overlap_signature,
    pack12,
)
from shoal.gather.payload.overlap import overlap_reference, unpacked
from tests.gather.helpers import WINDOW, model_of, payload

SPEC = GradientSpec(
    (ParamSpec("a", (24,), (2, 12), 4, "packed12"), ParamSpec("b", (4,), (1, 4), 2, "packed12")), quant=None
)
CHOICES = {
    3: ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1]]),
    8: ([[2, 3, 4, 5], [4, 5, 6, 7]], [[0, 1]]),
    14: ([[8, 9, 10, 11], [0, 1, 6, 7]], [[1, 2]]),
}
STAMPS = {3: 100, 8: 90, 14: 80}


def made(a, b):
    state = {"aidxs": pack12(torch.tensor(a)), "avals": torch.ones(2, 4)}
    if b is not None:
        state |= {"bidxs": pack12(torch.tensor(b)), "bvals": torch.ones(1, 2)}
    return {"state_dict": state, "global_step": 0}


def source(choices=CHOICES, stamps=STAMPS):
    return PartialGatherResult(
        uids=sorted(choices),
        timestamps=stamps,
        norms=torch.ones(len(choices), 2),
        payloads={uid: made(*choice) for uid, choice in choices.items()},
    )


def test_worked_example():
    report = index_overlap(source(), spec=SPEC)
    assert report.total == 10
    assert report.counts.tolist() == [[10, 8, 3], [8, 10, 3], [3, 3, 10]]
    assert (report.pairs_checked, report.pairs_high_ovlap) == (3, 1)
    assert report.ratio_high_ovlap == 1 / 3
    assert report.mean_overlap == 14 / 30
    assert (report.min_overlap, report.min_pair) == (0.3, (3, 14))
    assert (report.max_overlap, report.max_pair) == (0.8, (3, 8))
    assert report.pairs_over_thresh == [(3, 8, 0.8)]
    assert report.uids_over_thresh == {3: "mega"}
    assert report.exact


def test_signatures_of_two_workers_add_up():
    (s0, e0), (s1, e1) = chunk_ranges(3, 2)
    first, second = overlap_signature(source(), SPEC, s0, e0), overlap_signature(source(), SPEC, s1, e1)
    assert [first[i, j].item() for i, j in ((0, 1), (0, 2), (1, 2))] == [6, 2, 2]
    assert [second[i, j].item() for i, j in ((0, 1), (0, 2), (1, 2))] == [2, 1, 1]
    assert torch.equal(first + second, index_overlap(source(), spec=SPEC).counts)
    with pytest.raises(ConfigError):
        overlap_signature(source(), SPEC, 0, 4)


@pytest.mark.parametrize(("threshold", "over"), [(0.3, 3), (0.30000001, 1), (0.8, 1), (0.8000001, 0), (0, 3), (1, 0)])
def test_the_threshold_is_the_decimal_that_was_written(threshold, over):
    assert index_overlap(source(), spec=SPEC, threshold=threshold).pairs_high_ovlap == over


def test_equal_times_blame_the_earlier_in_canonical_order():
    same = index_overlap(source(stamps={3: 5, 8: 5, 14: 5}), spec=SPEC, threshold=0.3)
    assert same.uids_over_thresh == {3: "mega", 8: "high"}
    later = index_overlap(source(stamps={3: 5, 8: 6, 14: 5}), spec=SPEC)
    assert later.uids_over_thresh == {8: "mega"}


def test_an_offender_keeps_its_worst_severity():
    report = index_overlap(source(stamps={3: 9, 8: 5, 14: 5}), spec=SPEC, threshold=0.3)
    assert report.uids_over_thresh == {3: "mega", 8: "high"}


@pytest.mark.parametrize(
    ("overlap", "severity"), [(0.0, "high"), (0.49, "high"), (0.5, "max"), (0.6, "mega"), (1.0, "mega")]
)
def test_severities(overlap, severity):
    assert overlap_severity(overlap) == severity
    assert SEVERITY_MULTIPLIERS == {"high": 0.5, "max": 0, "mega": 0}
    for outside in (-0.01, 1.01, float("nan")):
        with pytest.raises(ValueError, match="overlap_severity"):
            overlap_severity(outside)


def test_a_pair_counts_the_parameters_that_both_have():
    lacking = source(CHOICES | {14: (CHOICES[14][0], None)})
    lacking.norms = torch.zeros(3, 0)  # not used here
    report = index_overlap(lacking, spec=SPEC)
    assert report.counts[0, 2] == 2
    assert report.min_overlap == 2 / 8
    assert report.max_overlap == 0.8


@pytest.mark.parametrize(("target_chunk", "topk"), [(16, 8), (4, 3), (80, 301)])
@pytest.mark.parametrize("peers", [2, 7, 70])
def test_counts_match_the_matrix_product(target_chunk, topk, peers):
    spec = GradientSpec.from_model(model_of(((64, 48), (160, 80), ())), target_chunk=target_chunk, topk=topk)
    objects = {(WINDOW, uid): MemoryObject(dump_payload(payload(spec, uid)), uid) for uid in range(peers)}
    result = gather(GatherPlan(WINDOW, range(peers)), spec, MemoryStore(objects))
    wanted = torch.zeros(peers, peers, dtype=torch.int64)
    for index, param in enumerate(spec.params):
        idxs = [unpacked(param, result.payloads[uid].param(index).idxs) for uid in result.uids]
        wanted += overlap_reference(idxs, param.totalk)
    report = index_overlap(result, spec=spec)
    assert torch.equal(report.counts, wanted)
    pairs = list(itertools.combinations(range(peers), 2))
    total = sum(p.chunks * p.k for p in spec.params)
    assert report.mean_overlap == sum(int(wanted[i, j]) for i, j in pairs) / (len(pairs) * total)


def test_sampling_is_seeded_by_the_window_and_marked():
    spec = GradientSpec.from_model(model_of(((256, 256),)), target_chunk=8, topk=8)
    objects = {(WINDOW, uid): MemoryObject(dump_payload(payload(spec, uid % 3)), uid) for uid in range(6)}
    result = gather(GatherPlan(WINDOW, range(6)), spec, MemoryStore(objects))
    a = index_overlap(result, spec=spec, mode="sampled", sample_chunks=200)
    assert a == index_overlap(result, spec=spec, mode="sampled", sample_chunks=200)
    assert (a.exact, a.sampled) == (False, 200)
    exact = index_overlap(result, spec=spec)
    assert abs(a.mean_overlap - exact.mean_overlap) < 0.1
    assert [p[:2] for p in a.pairs_over_thresh] == [p[:2] for p in exact.pairs_over_thresh] == [(0, 3), (1, 4), (2, 5)]


def test_arguments_are_checked():
    for kwargs in ({"mode": "guess"}, {"threshold": 1.5}):
        with pytest.raises(ConfigError):
            index_overlap(source(), spec=SPEC, **kwargs)
    assert issubclass(BudgetTooSmall, ValueError)
