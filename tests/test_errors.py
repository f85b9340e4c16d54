"""The tree of exceptions: one base for errors between ranks, and the built-in that a caller expects."""

import copy
import pickle

import pytest

import shoal.comm
import shoal.errors
import shoal.gather
import shoal.train
from shoal.gather.errors import PayloadsUnreadable
from shoal.testing import RankFailed, run_ranks

DISTRIBUTED = (
    "ConfigError",
    "ShapeError",
    "TransportError",
    "SerializationError",
    "CompressionError",
    "AggregationError",
    "StepAborted",
    "PipelineError",
)


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_errors_between_ranks_are_distributed_errors_wherever_they_are_imported_from(name):
    kind = getattr(shoal.errors, name)
    assert issubclass(kind, shoal.errors.DistributedError)
    assert issubclass(kind, RuntimeError)
    assert getattr(shoal.comm, name) is kind
    assert getattr(shoal.train, name) is kind


@pytest.mark.parametrize("name", ["ConfigError", "ShapeError", "CompressionError", "DataError"])
def test_bad_values_are_value_errors(name):
    assert issubclass(getattr(shoal.errors, name), ValueError)


def test_failed_ranks_are_ascending():
    assert shoal.errors.StepAborted([3, 0, 2]).failed_ranks == [0, 2, 3]


@pytest.mark.parametrize(
    "error",
    [
        shoal.errors.CapacityError("full"),
        shoal.errors.DeadlineError("late", ranks=[2]),
        shoal.errors.MissingExtraError("install it"),
        shoal.errors.PeerError("gone", ranks=[1, 3]),
        shoal.errors.SerializationError("short"),
        shoal.errors.StepAborted([1, 0]),
        shoal.errors.TransportError("lost", kind="peer_lost", peer=3),
        shoal.gather.BudgetTooSmall(5, "of 'w'"),
        shoal.gather.PayloadRejected("bad_topk", "of 'w'"),
        shoal.gather.RankFailure([2, 1], "in a round"),
        shoal.gather.StoreError("denied", permanent=True),
        shoal.gather.UpdateInterrupted(["a", "b"], "rank 1 died"),
        PayloadsUnreadable({1: "shrank"}),
        shoal.errors.ContractError("worker index must be in 1..3, got 4"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_processes_with_their_attributes(error):
    error.add_note("in step 7")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)
        assert again.args == error.args


def budget_too_small(rank, world):
    raise shoal.gather.BudgetTooSmall(1280)


def test_a_ranks_own_exception_is_the_cause_whatever_its_constructor_takes():
    with pytest.raises(RankFailed) as caught:
        run_ranks(1, budget_too_small)
    assert isinstance(caught.value.__cause__, shoal.gather.BudgetTooSmall)
    assert caught.value.__cause__.needed == 1280
