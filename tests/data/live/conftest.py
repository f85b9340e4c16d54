"""Fixtures of the tests of live sources."""

from tests.brokers import mock_kafka, redis_server  # noqa: F401
