"""Fixtures with brokers, one of each kind per module; a conftest imports them."""

import pytest

from shoal.errors import MissingExtraError
from shoal.testing.brokers import MockKafka, RedisServer


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    pytest.importorskip("redis")
    try:
        server = RedisServer(tmp_path_factory.mktemp("redis"))
    except MissingExtraError as error:
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture(scope="module")
def mock_kafka():
    pytest.importorskip("confluent_kafka")
    with MockKafka() as broker:
        yield broker
