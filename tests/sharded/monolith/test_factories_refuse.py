"""Arguments that the factories refuse because they would have no effect; servers on loopback."""

import pytest

from shoal.errors import ConfigError
from shoal.serving import (
    ParameterSyncClient,
    create_dummy_sync_client,
    create_parameter_sync_clients,
    reset_sync_clients,
)
from shoal.sharded import (
    create_multi_type_hash_table,
    create_native_multi_hash_table,
    create_partitioned_hash_table,
)
from tests.sharded.helpers import config

FACTORIES = {
    "multi_type": lambda sync, client: create_multi_type_hash_table(2, {"a": config(2)}, None, sync, client=client),
    "native": lambda sync, client: create_native_multi_hash_table(2, {"a": config(2)}, None, sync, client=client),
    "partitioned": lambda sync, client: create_partitioned_hash_table(2, True, sync_clients=sync, client=client),
}


@pytest.fixture(autouse=True)
def clean_clients():
    yield
    reset_sync_clients()


def test_there_cannot_be_fewer_servers_than_none():
    for make in (create_native_multi_hash_table, create_multi_type_hash_table):
        with pytest.raises(ValueError, match="the number of servers must be >= 0, got -1"):
            make(-1, {"a": config(1)}, None)


def test_rows_of_ranks_are_not_on_servers(ps):
    with pytest.raises(ConfigError, match="client must be None with enable_gpu_emb"):
        create_partitioned_hash_table(2, True, enable_gpu_emb=True, client=ps(2))


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES.keys())
def test_sync_clients_of_tables_on_servers_are_refused_since_nothing_would_be_pushed(ps, make):
    client, handles = ps(2), create_parameter_sync_clients(2)
    for sync in (handles, [ParameterSyncClient(each) for each in handles], [None, handles[1]]):
        with pytest.raises(ConfigError, match="sync_clients push rows of tables in this process"):
            make(sync, client)
    assert handles[0].table_names == {}


@pytest.mark.parametrize("make", [FACTORIES["multi_type"], FACTORIES["native"]], ids=["multi_type", "native"])
def test_tables_on_servers_may_have_clients_that_push_nothing(ps, make):
    client = ps(2)
    for sync in (None, [None, None], [create_dummy_sync_client()] * 2):
        make(sync, client)
