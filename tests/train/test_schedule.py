"""Splitting layers into stages, and the order of a stage's work."""

import itertools

import pytest
import torch

from shoal.errors import ConfigError
from shoal.train import PipelineParallelConfig, PipelineStage, schedule_actions, split_by_cost, split_into_stages


def test_every_split_is_contiguous_covering_and_even():
    for layers in range(1, 65):
        for stages in range(1, layers + 1):
            cut = split_into_stages(layers, stages)
            sizes = [s.end_layer - s.start_layer for s in cut]
            assert [s.rank for s in cut] == list(range(stages))
            assert cut[0].start_layer == 0
            assert cut[-1].end_layer == layers
            assert all(a.end_layer == b.start_layer for a, b in itertools.pairwise(cut))
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)


def test_worked_splits():
    assert split_into_stages(11, 4)[3] == PipelineStage(9, 11, 3)
    assert [s.start_layer for s in split_by_cost([4, 1, 1, 1, 1, 4], 3)] == [0, 1, 5]
    assert [s.start_layer for s in split_by_cost([1, 2, 3, 4, 5, 6], 3)] == [0, 3, 5]
    for bad in ((3, 4), (3, 0), (0, 1)):
        with pytest.raises(ConfigError):
            split_into_stages(*bad)
        with pytest.raises(ConfigError):
            split_by_cost([1] * bad[0], bad[1])


def test_split_by_cost_is_the_first_best_of_all_cuts():
    import random

    rng = random.Random(0)
    for _ in range(200):
        costs = [rng.choice([0, 1, 2, 3, 5, 0.5]) for _ in range(rng.randint(1, 8))]
        stages = rng.randint(1, len(costs))
        options = []
        for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
            ends = [0, *cuts, len(costs)]
            options.append((max(sum(costs[a:b]) for a, b in itertools.pairwise(ends)), list(cuts)))
        assert [s.start_layer for s in split_by_cost(costs, stages)][1:] == min(options)[1]


def test_costs_may_be_decimals_or_tensors_and_must_be_numbers():
    assert [s.end_layer for s in split_by_cost([0.1, 0.2, 0.3], 2)] == [2, 3]
    assert [s.end_layer for s in split_by_cost([0.3, 0.1, 0.2, 0.3], 3)] == [1, 3, 4]
    assert [s.end_layer for s in split_by_cost(torch.tensor([4.0, 1, 1, 1, 1, 4]), 3)] == [1, 5, 6]
    for bad in ([1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")], [1.0, None]):
        with pytest.raises(ConfigError, match="finite"):
            split_by_cost(bad, 2)


def test_worked_schedules():
    assert " ".join(schedule_actions("1f1b", 3, 4, 0)) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert " ".join(schedule_actions("1f1b", 3, 4, 1)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert " ".join(schedule_actions("1f1b", 3, 4, 2)) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert " ".join(schedule_actions("gpipe", 2, 2, 1)) == "F0 F1 B0 B1"


def ticks(kind, stages, micro_batches):
    """Runs the schedule with unit costs; the number of ticks and the live activations of each stage."""
    waiting = [schedule_actions(kind, stages, micro_batches, s) for s in range(stages)]
    done, live, most, now = set(), [0] * stages, [0] * stages, 0
    while any(waiting):
        finished = []
        for s, actions in enumerate(waiting):
            if not actions:
                continue
            kind_, m = actions[0][0], actions[0][1:]
            need = (s - 1, f"F{m}") if kind_ == "F" else (s + 1, f"B{m}")
            if need[0] in (-1, stages) or need in done:
                finished.append((s, actions.pop(0)))
                live[s] += 1 if kind_ == "F" else -1
                most[s] = max(most[s], live[s])
        assert finished, "the schedule locks up"
        done.update(finished)
        now += 1
    return now, most


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_schedules_take_the_ideal_time_and_hold_the_stated_activations(stages, micro_batches):
    for kind in ("gpipe", "1f1b"):
        took, live = ticks(kind, stages, micro_batches)
        assert took == 2 * (micro_batches + stages - 1)
        want = [micro_batches] * stages if kind == "gpipe" else [min(micro_batches, stages - s) for s in range(stages)]
        assert live == want


def test_wrong_settings():
    for bad in ((0, 1), (1, 0), (2, 2, "zigzag"), (1.5, 1), (1, "2"), (True, 1)):
        with pytest.raises(ConfigError):
            PipelineParallelConfig(*bad)
    with pytest.raises(ConfigError):
        schedule_actions("1f1b", 2, 2, 2)
