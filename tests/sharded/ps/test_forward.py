"""A training forward with parameter servers only reads: its answers, what it must not change, who refuses it."""

import threading
from datetime import timedelta

import pytest
import torch

import shoal
from shoal.errors import ConfigError, UnsupportedError
from shoal.sharded import DistributedHashTable, Engine, ParameterServer, PsClient, Shard, ps_table
from shoal.sharded.ps.protocol import Op, Request, Status, parse_reply
from shoal.table import SlotOccurrenceThresholdConfig
from shoal.table.protocol import SUM, Features, Part, Step, groups_of
from tests.sharded.helpers import LONG

T = torch.tensor
ONE = Features((0,), (SUM,), (0,), 4)


def group_of(*tables):
    [(group, _)] = groups_of(tables)
    return group


def find(group, *ids, features=None):
    features = features or Features(tuple(range(len(ids))))
    counts = T([len(i) for i in ids])
    return group.find(torch.cat([T(i, dtype=torch.int64) for i in ids]), counts, features, missing="initial"), features


def forward(table, ids):
    found, features = find(group_of(table), ids)
    return group_of(table).rows(found, features, missing="initial")


def requests(server):
    """Requests answered so far, by operation."""
    return {op: count for (op, status), count in server.metrics.requests.items() if op != "INFO"}


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 5000])  # answered by the socket's thread, or by a thread for large reads
@pytest.mark.parametrize("servers_count", [1, 2])
def test_an_unknown_id_is_answered_with_the_row_that_its_update_starts_from(ps, n, servers_count):
    table = ps_table(ps(servers_count), 4, name="t", optimizer="sgd", lr=0.5, seed=5)
    plain = shoal.HashTable(4, optimizer="sgd", lr=0.5, seed=5)
    ids = torch.arange(n) * 7 - 3
    plain.assign(ids[:2], torch.ones(2, 4))
    table.assign(ids[:2], torch.ones(2, 4))
    assert torch.equal(forward(table, ids.tolist()), plain.lookup(ids, insert_missing=True))
    grads = torch.arange(4 * n).view(n, 4).float() / n
    table.apply_gradients(ids, grads, 0)
    plain.apply_gradients(ids, grads, 0)
    assert torch.equal(table.lookup(ids), plain.lookup(ids))


def test_initial_rows_are_those_of_the_tables_layout(ps):
    from shoal.sharded import RemoteHashTable
    from shoal.table import (
        CombineAsSegment,
        CuckooEmbeddingHashTableConfig,
        EmbeddingHashTableConfig,
        EntryConfig,
        FixedR8Compressor,
        HashTable,
        HashTableConfigInstance,
        OneBitCompressor,
        RandomUniformInitializer,
        SgdOptimizer,
    )

    uniform = RandomUniformInitializer(-1.0, 1.0)
    segments = [
        CombineAsSegment(2, uniform, SgdOptimizer(), FixedR8Compressor()),
        CombineAsSegment(2, uniform, SgdOptimizer(), OneBitCompressor()),
    ]
    message = EmbeddingHashTableConfig(
        entry_config=EntryConfig(segments=segments), cuckoo=CuckooEmbeddingHashTableConfig()
    )
    config = HashTableConfigInstance(message, [1.0, 1.0])
    table = RemoteHashTable(ps(1), 0, "t", config, seed=9)
    plain = HashTable.from_config(config, name="plain", seed=9)
    ids = torch.arange(50)
    rows = forward(table, ids.tolist())
    assert torch.equal(rows, plain.lookup(ids, insert_missing=True))
    assert rows.any()


def test_an_active_filter_gives_zeros_until_an_update_was_admitted(ps):
    threshold = SlotOccurrenceThresholdConfig(default_occurrence_threshold=2).SerializeToString().hex()
    filter = {"type": "sliding_hash_filter", "capacity": 1000, "split_num": 7, "config": threshold}
    table = ps_table(ps(2), 4, name="t", optimizer="sgd", lr=1.0, filter=filter)
    for _ in range(5):  # a read does not count for admission
        assert not forward(table, [1, 2]).any()
    for _ in range(2):
        table.apply_gradients(T([1, 2]), torch.ones(2, 4))
        assert not forward(table, [1, 2]).any()
    table.apply_gradients(T([1, 2]), torch.ones(2, 4))
    assert forward(table, [1, 2]).all()
    assert table.size() == 2


# --- what must not change ---------------------------------------------------------------------------------------------


def test_it_changes_nothing_on_the_server(servers, tmp_path):
    [server] = servers(1, "log", tmp_path)
    engine = server.engine
    threshold = SlotOccurrenceThresholdConfig(default_occurrence_threshold=3).SerializeToString().hex()
    with PsClient([server.address], deadline=LONG) as client:
        filter = {"type": "sliding_hash_filter", "capacity": 1000, "split_num": 7, "config": threshold}
        tables = [ps_table(client, 4, name="a"), ps_table(client, 4, name="b", filter=filter)]
        for table in tables:
            table.assign(T([1, 2]), torch.ones(2, 4), req_time=100)

        def state():
            filters = [engine.shard.tables["b"].hash_filter.get_block(i).cells.tobytes() for i in range(7)]
            stamps = [bytes(e) for t in tables for e in t.tables[0].lookup_entry(T([1, 2, 3]))]
            times = [t.max_update_time for t in engine.shard.tables.values()]
            sizes = [t.size() for t in tables]
            return filters, stamps, times, sizes, engine.shard.version, engine.log.bytes_written, len(engine.streams)

        before = state()
        for ids in ([1, 2, 3], list(range(4000))):
            found, features = find(group_of(*tables), ids, ids)
            group = group_of(*tables)
            group.rows(found, features, missing="initial")
            bags = Features((0, 1), (SUM, SUM), (0, 4), 8)
            out = torch.empty(1, 8)
            group.pooled(found, bags, T([0, len(ids), 2 * len(ids)]), None, out, missing="initial")
        assert state() == before
        assert requests(server)["FIND_INITIAL"] == 4


def test_it_does_not_wait_for_the_disk(servers, tmp_path):
    [server] = servers(1, "log", tmp_path)
    log = server.engine.log
    go_on, waits, sync = threading.Event(), threading.Event(), log.sync

    def slow_disk():
        waits.set()
        assert go_on.wait(LONG.total_seconds())
        sync()

    with PsClient([server.address], deadline=LONG, max_staleness=4) as client:
        table = ps_table(client, 4, name="t", seed=1)
        log.sync = slow_disk
        try:
            table.apply_gradients(T([1]), torch.ones(1, 4))
            assert waits.wait(LONG.total_seconds())
            forward(table, [1, 2])
            forward(table, list(range(4000)))
            assert client.unanswered == 1  # the update still waits for the disk
        finally:
            go_on.set()
        table.as_op()


# --- number of requests -----------------------------------------------------------------------------------------------


def test_tables_of_one_dim_share_a_request_per_server(servers):
    started = servers(2)
    with PsClient([s.address for s in started], deadline=LONG) as client:
        kinds = {"a": "sgd", "b": "adam", "c": "sgd"}
        tables = [ps_table(client, 4, name=name, seed=3, optimizer=kind) for name, kind in kinds.items()]
        group = group_of(*tables)
        before = [requests(s) for s in started]
        found, features = find(group, [1, 2, 3], [2, 3], [3, 4, 4])
        assert [requests(s) for s in started] == before  # a find only routes
        rows = group.rows(found, features, missing="initial")
        group.update([Part(found, features, torch.ones_like(rows))], step=Step())
        for server, earlier in zip(started, before, strict=True):
            more = {op: n - earlier.get(op, 0) for op, n in requests(server).items() if n != earlier.get(op, 0)}
            assert more == {"FIND_INITIAL": 1, "APPLY": 1}
        assert [t.size() for t in tables] == [3, 2, 2]


def test_only_servers_and_tables_that_have_ids_are_asked(servers):
    started = servers(2)
    with PsClient([s.address for s in started], deadline=LONG) as client:
        group = group_of(ps_table(client, 4, name="a"), ps_table(client, 4, name="b"))
        before = [requests(s).get("FIND_INITIAL", 0) for s in started]
        found, features = find(group, [], [2, 4])
        assert group.rows(found, features, missing="initial").shape == (2, 4)
        assert [requests(s).get("FIND_INITIAL", 0) for s in started] == [before[0] + 1, before[1]]


def test_tables_of_other_dims_clients_or_clocks_are_groups_of_their_own(ps, servers):
    client, other = ps(2), ps(2)
    tables = [ps_table(client, 4, name="a"), ps_table(client, 8, name="b"), ps_table(other, 4, name="a")]
    tables.append(ps_table(client, 4, name="c"))
    assert [places for _, places in groups_of(tables)] == [[0, 3], [1], [2]]
    group = group_of(tables[0], tables[3])
    assert group.traits.remote
    assert group is group_of(tables[0], tables[3])


# --- between forward and backward -------------------------------------------------------------------------------------


def test_a_server_may_be_restarted_between_forward_and_backward(tmp_path):
    def start(port):
        return ParameterServer(Engine(Shard(0, 1), "log", tmp_path), port=port).start()

    server = start(0)
    port = int(server.address.rpartition(":")[2])
    with PsClient([server.address], deadline=LONG) as client:
        table = ps_table(client, 4, name="t", optimizer="sgd", lr=1.0, seed=2)
        group = group_of(table)
        found, features = find(group, [1, 2, 1])
        rows = group.rows(found, features, missing="initial")
        server.stop(drain=timedelta(seconds=2))
        server = start(port)
        try:
            group.update([Part(found, features, torch.ones(3, 4))], step=Step())
            assert torch.equal(table.lookup(T([1, 2])), rows[:2] - T([[2.0], [1.0]]))
        finally:
            server.stop(drain=timedelta(seconds=2))


def test_two_modules_and_two_losses_make_one_step(ps):
    table = ps_table(ps(2), 4, name="t", optimizer="adagrad", lr=0.5, seed=2)
    plain = shoal.HashTable(4, optimizer="adagrad", lr=0.5, seed=2)
    group = group_of(table)
    one, features = find(group, [1, 2, 1])
    other, _ = find(group, [5, 2])
    parts = [Part(one, features, torch.ones(3, 4)), Part(other, features, torch.full((2, 4), 2.0))]
    group.update([*parts, Part(one, features, torch.full((3, 4), 0.5))], step=Step())
    ids, grads = T([1, 2, 1, 5, 2, 1, 2, 1]), T([1, 1, 1, 2, 2, 0.5, 0.5, 0.5])
    plain.apply_gradients(ids, grads[:, None].expand(8, 4), enable_dedup=True)
    assert torch.equal(table.lookup(T([1, 2, 5])), plain.lookup(T([1, 2, 5])))


def test_a_bad_gradient_for_one_server_reaches_none(ps):
    table = ps_table(ps(2), 4, name="t", optimizer="sgd", lr=1.0)
    grads = torch.ones(2, 4)
    grads[1, 2] = float("inf")
    with pytest.raises(ConfigError, match="nothing was applied"):
        table.apply_gradients(T([1, 2]), grads)
    assert table.size() == 0
    skipping = ps_table(ps(2), 4, name="s", optimizer="sgd", lr=1.0, on_bad_gradient="skip")
    skipping.apply_gradients(T([1, 2]), grads)
    assert skipping.contains(T([1, 2])).tolist() == [True, False]


@pytest.mark.parametrize("servers_count", [0, 2])  # 0: parts in this process
def test_a_bad_gradient_is_left_to_the_table_that_skips_it(ps, servers_count):
    client = ps(servers_count) if servers_count else None

    def build(name, mode):
        options = {"name": name, "optimizer": "sgd", "lr": 1.0, "initializer": "zeros", "on_bad_gradient": mode}
        if client is not None:
            return ps_table(client, 4, **options)
        config = shoal.HashTable(4, **options).config
        return DistributedHashTable(2, config, lambda i, c: shoal.HashTable(4, **options))

    tables = [build("a", "raise"), build("b", "skip"), build("c", "raise")]
    group = group_of(*tables)
    found, features = find(group, [1, 2], [1, 2], [1, 2])
    grads = torch.ones(6, 4)
    grads[2, 1] = float("nan")
    group.update([Part(found, features, grads)], step=Step())
    assert [t.lookup(T([1, 2]))[:, 0].tolist() for t in tables] == [[-1.0, -1.0], [0.0, -1.0], [-1.0, -1.0]]
    grads[5, 1] = float("nan")
    with pytest.raises(ConfigError, match="table 'c': a gradient holds NaN or infinity; nothing was applied"):
        group.update([Part(found, features, grads)], step=Step())
    assert [t.lookup(T([1, 2]))[:, 0].tolist() for t in tables] == [[-1.0, -1.0], [0.0, -1.0], [-1.0, -1.0]]


def test_a_rate_that_is_scaled_counts_on_every_server(ps):
    client = ps(2)
    tables = [ps_table(client, 4, name=n, optimizer="sgd", lr=1.0, initializer="zeros") for n in "ab"]
    group = group_of(*tables)
    found, features = find(group, [1, 2], [1, 2])
    group.update([Part(found, features, torch.ones(4, 4))], step=Step(lr_scale=T([0.5, 2.0])))
    assert [t.lookup(T([1, 2]))[:, 0].tolist() for t in tables] == [[-0.5, -0.5], [-2.0, -2.0]]


# --- versions ---------------------------------------------------------------------------------------------------------


def send(address, frames):
    """A reply to bare frames."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = int(LONG.total_seconds() * 1000)
        socket.connect(address)
        socket.send_multipart(frames)
        return parse_reply(socket.recv_multipart())


GOLDEN = (
    "5348505301000800000000000300000000000000" + "00" * 16 + "00" * 16 + "00" * 8 + "00" * 8 + "00" * 8
    + "00000000" + "01000000" + "00000000" + "0200000000000000" + "74"
)  # fmt: skip


def test_the_bytes_of_a_forward():
    request = Request(Op.FIND_INITIAL, request=3, counts=[2], names=("t",), ids=T([7, -1]))
    header, ids = request.frames()
    assert header.hex() == GOLDEN
    assert memoryview(ids).tobytes().hex() == "0700000000000000ffffffffffffffff"


def test_an_operation_that_a_server_does_not_know_is_refused(servers):
    [server] = servers(1)
    header = bytearray.fromhex(GOLDEN)
    header[6] = 99  # an operation of a later version
    reply = send(server.address, [bytes(header), T([7, -1]).numpy().tobytes()])
    assert reply.status == Status.BAD_REQUEST
    assert "unknown operation 99" in reply.text()


def test_a_server_of_an_older_version_is_not_asked(servers):
    """It tells no operations; what it knows is a lookup, which would give zeros."""
    [server] = servers(1)
    info = server.info

    def old():
        return {key: value for key, value in info().items() if key != "operations"}

    server._reads._info = old
    with PsClient([server.address], deadline=LONG) as client:
        table = ps_table(client, 4, name="t")
        table.assign(T([1]), torch.ones(1, 4))
        assert table.lookup(T([1])).tolist() == [[1.0] * 4]
        with pytest.raises(UnsupportedError, match=r"parameter server 0 .* find_initial.*upgrade the servers first"):
            forward(table, [1, 2])
        assert "FIND_INITIAL" not in requests(server)
        server._reads._info = info  # upgraded: the worker notices it
        assert forward(table, [1, 2])[0].tolist() == [1.0] * 4
