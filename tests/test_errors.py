"""The tree of exceptions: one base for errors between ranks, and the built-in that a caller expects."""

import pytest

import shoal.comm
import shoal.errors
import shoal.train

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
