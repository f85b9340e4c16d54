"""Tables in parts as groups: the conformance suite over servers and over parts in this process."""

import itertools

import pytest

import shoal
from shoal.sharded import DistributedHashTable, RemoteHashTable, ps_table
from tests.table.group_conformance import CASES, DIM, Kind

_names = itertools.count()


def remote(client):
    """Tables over all servers of a client."""

    def make(count, **options):
        return [ps_table(client, DIM, name=f"t{next(_names)}", **options) for _ in range(count)]

    return Kind(make)


def single(client):
    """Tables of one server, without a distributed table around them."""

    def make(count, *, seed, **options):
        configs = [shoal.HashTable(DIM, **options).config for _ in range(count)]
        return [RemoteHashTable(client, 1, f"t{next(_names)}", c, seed=seed, clocked=True) for c in configs]

    return Kind(make)


def local(parts):
    def make(count, *, seed, **options):
        def part(i, config):
            return shoal.HashTable(DIM, seed=seed, **options)

        config = shoal.HashTable(DIM, **options).config
        return [DistributedHashTable(parts, config, part) for _ in range(count)]

    return Kind(make)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("servers_count", [1, 2])
def test_tables_on_servers(ps, case, servers_count):
    case(remote(ps(servers_count)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_tables_of_one_server_of_two(ps, case):
    case(single(ps(2)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("parts", [1, 3])
def test_parts_in_this_process(case, parts):
    case(local(parts))
