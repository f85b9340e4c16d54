"""Tables on servers that are opened again with other settings: which are accepted, refused and kept."""

import logging

import pytest
import torch

from shoal.errors import ConfigError
from shoal.sharded import Engine, Shard, ps_table
from shoal.sharded.ps.client.remote import create_request
from shoal.sharded.ps.protocol import Op, Request, Status
from shoal.table import (
    AdagradOptimizer,
    AdamOptimizer,
    HashTable,
    OnesInitializer,
    SlotOccurrenceThresholdConfig,
)
from tests.sharded.helpers import config

T = torch.tensor
IDS = torch.arange(100)


def engine(folder):
    made = Engine(Shard(0, 1), "log", folder)
    made.recover()
    return made


def write(engine, op, seq, ids=IDS, **fields):
    request = Request(
        op, stream=b"w" * 16, seq=seq, acked=seq - 1, names=("t",), counts=[ids.numel()], ids=ids, **fields
    )
    return engine.apply([request])[0]


def create(engine, made, **options):
    return engine.apply([create_request(made, {"name": "t", "seed": 4, **options})])[0]


def days(number, dim=2, **more):
    made = config(dim, **more)
    made.table_config.slot_expire_time_config.default_expire_time = number
    return made


def filtered(threshold, capacity=1000):
    message = SlotOccurrenceThresholdConfig(default_occurrence_threshold=threshold).SerializeToString().hex()
    return {"type": "sliding_hash_filter", "capacity": capacity, "config": message}


def test_a_table_takes_another_rate_and_expiry_and_keeps_its_rows(ps):
    client = ps(2)
    first = ps_table(client, 2, name="t", optimizer="adagrad", lr=0.05, expire_after="30d")
    first.assign(IDS, torch.ones(100, 2), req_time=86400)
    second = ps_table(client, 2, name="t", optimizer="adagrad", lr=0.5, expire_after="2d")
    assert second.lookup(IDS).tolist() == [[1, 1]] * 100
    judge = HashTable(2, name="judge", optimizer="adagrad", lr=0.5, seed=0)
    judge.assign(IDS, torch.ones(100, 2))
    for table in (second, judge):
        table.apply_gradients(IDS[:50], torch.ones(50, 2), req_time=5 * 86400)
    assert torch.equal(second.lookup(IDS), judge.lookup(IDS))
    assert sum(part.evict() for part in second.tables) == 50


CHANGES = {
    "numbers of the optimizer": config(2, optimizer=AdagradOptimizer(initial_accumulator_value=9.0)),
    "the initializer": config(2, optimizer=AdagradOptimizer(), initializer=OnesInitializer()),
    "expiry": days(3, optimizer=AdagradOptimizer()),
    "the rate": config(2, rate=0.5, optimizer=AdagradOptimizer(learning_rate=0.5)),
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_settings_that_leave_rows_alone_are_taken_and_survive(tmp_path, changed, checkpoint):
    first = engine(tmp_path)
    assert create(first, config(2, optimizer=AdagradOptimizer())).status == Status.OK
    gradients = torch.randn(100, 2, generator=torch.Generator().manual_seed(1))
    assert write(first, Op.APPLY, 1, IDS[:60], values=gradients[:60], rates=[0.1]).status == Status.OK
    before = first.shard.tables["t"].lookup_entry(IDS)
    assert create(first, changed).status == Status.OK
    assert first.shard.tables["t"].lookup_entry(IDS) == before
    # new rows are like those of a table that was created with the new settings
    judge = HashTable.from_config(changed, name="judge", seed=4)
    judge.apply_gradients(IDS[60:], gradients[60:])
    judge_rate = judge.rates(0)
    assert write(first, Op.APPLY, 2, IDS[60:], values=gradients[60:], rates=judge_rate).status == Status.OK
    assert first.shard.tables["t"].lookup_entry(IDS[60:]) == judge.lookup_entry(IDS[60:])
    if checkpoint:
        first.checkpoint()
    first.log.sync()
    again = engine(tmp_path)
    assert again.shard.specs == first.shard.specs
    assert again.shard.tables["t"].lookup_entry(IDS) == first.shard.tables["t"].lookup_entry(IDS)
    assert again.shard.tables["t"]._native.layout.row_bytes == first.shard.tables["t"]._native.layout.row_bytes


REFUSED = {
    "dim": (config(3, optimizer=AdagradOptimizer()), {}, "dim is 2, not 3"),
    "optimizer": (config(2, optimizer=AdamOptimizer()), {}, "the optimizer is adagrad, not adam"),
    "seed": (config(2, optimizer=AdagradOptimizer()), {"seed": 5}, "its new rows depend on seed 4, not 5"),
}


@pytest.mark.parametrize(("changed", "options", "why"), REFUSED.values(), ids=REFUSED)
def test_what_rows_do_not_allow_is_refused_without_advice_that_destroys_them(tmp_path, changed, options, why):
    first = engine(tmp_path)
    create(first, config(2, optimizer=AdagradOptimizer()))
    write(first, Op.ASSIGN, 1, values=torch.ones(100, 2))
    reply = create(first, changed, **options)
    assert reply.status == Status.BAD_REQUEST
    assert why in reply.text()
    assert "another name" in reply.text()
    assert not any(word in reply.text() for word in ("empty", "remove", "delete"))
    assert first.shard.tables["t"].lookup(IDS).tolist() == [[1, 1]] * 100
    assert engine(tmp_path).shard.specs == first.shard.specs


def test_what_to_do_with_bad_gradients_can_change(tmp_path, caplog):
    first = engine(tmp_path)
    create(first, config(2))
    bad = {"values": torch.full((100, 2), float("nan")), "rates": [1.0]}
    assert write(first, Op.APPLY, 1, **bad).status == Status.BAD_REQUEST
    with caplog.at_level(logging.INFO, "shoal.ps"):
        assert create(first, config(2), on_bad_gradient="skip").status == Status.OK
    assert "table 't' has new settings" in caplog.text
    assert write(first, Op.APPLY, 2, **bad).status == Status.OK
    assert create(first, config(2), on_bad_gradient="never").status == Status.BAD_REQUEST
    assert write(first, Op.APPLY, 3, **bad).status == Status.OK


def test_a_filter_with_another_threshold_goes_on_counting(tmp_path):
    first = engine(tmp_path)
    create(first, config(2), filter=filtered(5))
    gradient = {"values": torch.ones(2), "rates": [1.0]}
    for seq in (1, 2, 3):
        write(first, Op.APPLY, seq, T([7]), **gradient)
    assert create(first, config(2), filter=filtered(3)).status == Status.OK
    write(first, Op.APPLY, 4, T([7, 8]), values=torch.ones(2, 2), rates=[1.0])
    for server in (first, engine(tmp_path)):
        assert server.shard.tables["t"].contains(T([7, 8])).tolist() == [True, False]
    assert create(first, config(2), filter=filtered(3, capacity=5000)).status == Status.OK  # starts to count from zero
    write(first, Op.APPLY, 5, T([8]), **gradient)
    assert create(first, config(2)).status == Status.OK
    write(first, Op.APPLY, 6, T([9]), **gradient)
    assert first.shard.tables["t"].contains(T([7, 8, 9])).tolist() == [True, False, True]
    first.checkpoint()
    assert engine(tmp_path).shard.tables["t"].contains(T([7, 8, 9])).tolist() == [True, False, True]


def test_a_kept_checkpoint_comes_back_under_the_settings_of_now(tmp_path):
    first = engine(tmp_path)
    create(first, config(2, optimizer=AdagradOptimizer()), filter=filtered(1))
    for seq in (1, 2):
        write(first, Op.APPLY, seq, values=torch.ones(100, 2), rates=[0.1])
    then = first.shard.tables["t"].lookup_entry(IDS)
    first.finish_checkpoint(first.begin_checkpoint(), "run-1")
    create(first, days(3, optimizer=AdagradOptimizer()), filter=filtered(1, capacity=5000))
    write(first, Op.APPLY, 3, values=torch.ones(100, 2), rates=[0.1])
    restore = Request(Op.RESTORE, stream=b"w" * 16, seq=4, acked=3, names=("t",), counts=[0], values=b"run-1")
    assert first.apply([restore])[0].status == Status.OK
    table = first.shard.tables["t"]
    assert table.lookup_entry(IDS) == then
    assert table.table_config.slot_expire_time_config.default_expire_time == 3


def test_settings_of_a_local_table_change_by_the_same_rules():
    from shoal.table.reconfigure import reconfigure

    table, other = HashTable(2, name="a", optimizer="adagrad"), HashTable(3, name="a", optimizer="adagrad")
    with pytest.raises(ConfigError, match="dim is 2, not 3"):
        reconfigure(table, other)
