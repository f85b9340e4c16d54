"""Checkpoints of a server that keeps writing: their contents, what waits for them, and a crash at every point."""

import json
import os
import random
import shutil
import threading
import time
from datetime import timedelta

import pytest
import torch

from shoal.durable import folder
from shoal.errors import PeerError
from shoal.sharded import Engine, PsClient, Shard, ps_table
from shoal.sharded.placement.local import LocalServers
from shoal.sharded.ps.protocol import Op, Request, Status
from shoal.sharded.ps.server.checkpoint import Checkpoints
from shoal.sharded.ps.server.snapshot import ShardSnapshot
from shoal.table import (
    AdamOptimizer,
    RandomUniformInitializer,
    SlotOccurrenceThresholdConfig,
    StochasticRoundingFloat16OptimizerWrapper,
)
from tests.sharded.helpers import LONG, HashTable, config

T = torch.tensor
IDS = torch.arange(-50, 450)


def engine(directory, durability="log"):
    result = Engine(Shard(0, 1), durability, directory)
    result.recover()
    return result


def create(*targets, name="t", **options):
    optimizer = StochasticRoundingFloat16OptimizerWrapper(AdamOptimizer())
    message = config(3, optimizer=optimizer, initializer=RandomUniformInitializer()).table_config.SerializeToString()
    for target in targets:
        request = Request(Op.CREATE, ids=message, values=json.dumps({"name": name, "seed": 4, **options}).encode())
        assert target.apply([request])[0].status == Status.OK


def random_write(seq, n=40):
    ids = IDS[torch.randint(0, len(IDS), (n,))]
    op = random.choice([Op.APPLY, Op.APPLY, Op.ASSIGN, Op.ASSIGN_ADD, Op.INSERT, Op.REINITIALIZE, Op.ERASE])
    ids = ids[: n // 4] if op in (Op.ERASE, Op.REINITIALIZE) else ids
    values = torch.randn(ids.numel(), 3) if op in (Op.APPLY, Op.ASSIGN, Op.ASSIGN_ADD) else b""
    return Request(
        op, stream=b"w" * 16, seq=seq, acked=seq - 1, names=("t",), counts=[ids.numel()], ids=ids, values=values,
        rates=[0.1] if op == Op.APPLY else (), req_time=seq, global_step=seq,
    )  # fmt: skip


def write(seq, *targets):
    request = random_write(seq)
    for target in targets:
        assert target.apply([request])[0].status == Status.OK


def state(target, names=("t",)):
    tables = [target.shard.tables[name] for name in names]
    return [
        (t.lookup_entry(IDS), t.max_update_time, t.size(), t._native.calls()) for t in tables
    ], target.streams.dump()


@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_holds_the_moment_it_was_begun(tmp_path, seed):
    random.seed(seed)
    torch.manual_seed(seed)
    judge, subject = engine(None, "none"), engine(tmp_path / "live")
    create(judge, subject)
    for seq in range(1, 15):
        write(seq, judge, subject)
    then = state(judge)
    snapshot = subject.begin_checkpoint()
    for seq in range(15, 30):
        write(seq, judge, subject)
    create(judge, subject, name="later")  # a table that is not in the checkpoint
    subject.finish_checkpoint(snapshot)
    for seq in range(30, 35):
        write(seq, judge, subject)
    subject.log.sync()
    (tmp_path / "alone").mkdir()
    for path in (tmp_path / "live").glob("checkpoint-*"):
        shutil.copytree(path, tmp_path / "alone" / path.name)
    assert state(engine(tmp_path / "alone", "checkpoint")) == then
    again = engine(tmp_path / "live")
    assert state(again, ("t", "later")) == state(judge, ("t", "later"))
    assert again.recovered_records == 21


def test_what_a_filter_had_counted_at_that_moment_is_kept(tmp_path):
    thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=3).SerializeToString().hex()
    options = {"filter": {"type": "sliding_hash_filter", "capacity": 1000, "config": thresholds}}
    judge, subject = engine(None, "none"), engine(tmp_path / "live")
    create(judge, subject, **options)
    for seq in range(1, 9):
        if seq == 3:
            snapshot = subject.begin_checkpoint()
        for target in (judge, subject):
            target.apply(
                [Request(Op.APPLY, stream=b"w" * 16, seq=seq, acked=seq - 1, names=("t",), counts=[2],
                         ids=T([7, 10 + seq % 2]), values=torch.ones(6), rates=[0.1])]
            )  # fmt: skip
        if seq == 5:
            subject.finish_checkpoint(snapshot)
        subject.log.sync()
        shutil.copytree(tmp_path / "live", tmp_path / str(seq))
        assert state(engine(tmp_path / str(seq))) == state(judge)
    assert judge.shard.tables["t"].size() == 3


def test_a_crash_at_any_point_of_a_checkpoint_loses_nothing(tmp_path, monkeypatch):
    """The folder is copied at every step; a server that starts on a copy must be what was acknowledged by then."""
    random.seed(0)
    torch.manual_seed(0)
    live = tmp_path / "live"
    judge, subject = engine(None, "none"), engine(live)
    create(judge, subject)
    points = []
    seq = 0

    def crash(name):
        nonlocal seq
        for _ in range(3):
            seq += 1
            write(seq, judge, subject)
        subject.log.sync()
        copy = tmp_path / f"{len(points)}-{name}"
        shutil.copytree(live, copy)
        points.append((copy, state(judge)))

    real_sync, real_rename, real_rows = folder.sync_folder, os.rename, ShardSnapshot.save

    def rename(source, target):
        crash("before")
        real_rename(source, target)
        crash("after")

    monkeypatch.setattr(folder, "sync_folder", lambda path: (crash("sync"), real_sync(path))[1])
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(ShardSnapshot, "save", lambda self, to: (crash("rows"), real_rows(self, to))[1])
    for _ in range(3):
        crash("apart")
        snapshot = subject.begin_checkpoint()
        crash("begun")
        subject.finish_checkpoint(snapshot)
        crash("finished")
    monkeypatch.undo()
    assert len(points) == 3 * 8 + 2  # the third removes the first
    for copy, expected in points:
        assert state(engine(copy)) == expected, copy.name


def test_rows_of_many_tables_are_written_while_a_thread_changes_them(tmp_path):
    torch.manual_seed(1)
    judge, subject = engine(None, "none"), engine(tmp_path)
    create(judge, subject)
    create(judge, subject, name="u")
    ids = torch.arange(60_000)

    def update(seq, some):
        request = Request(
            Op.APPLY, stream=b"w" * 16, seq=seq, acked=seq - 1, names=("t", "u"), counts=[some.numel()] * 2,
            ids=torch.cat([some, some]), values=torch.randn(2 * some.numel(), 3), rates=[0.1, 0.1],
        )  # fmt: skip
        for target in (judge, subject):
            assert target.apply([request])[0].status == Status.OK

    update(1, ids)
    seq = 1
    for _ in range(3):
        snapshot = subject.begin_checkpoint()
        thread = threading.Thread(target=subject.finish_checkpoint, args=(snapshot,))
        thread.start()
        during = 0
        while thread.is_alive() or during < 3:
            seq, during = seq + 1, during + 1
            update(seq, torch.randint(0, 70_000, (2000,)))
        thread.join()
    subject.log.sync()
    again = engine(tmp_path)
    for name in ("t", "u"):
        mine, other = again.shard.tables[name], judge.shard.tables[name]
        assert mine.size() == other.size()
        assert mine.lookup_entry(torch.arange(70_000)) == other.lookup_entry(torch.arange(70_000))


def test_clearing_and_evicting_come_after_the_checkpoint(tmp_path):
    subject = engine(tmp_path)
    create(subject)
    snapshot = subject.begin_checkpoint()
    with pytest.raises(ValueError, match="already"):
        subject.begin_checkpoint()
    for op in (Op.CLEAR, Op.EVICT):
        reply = subject.apply([Request(op, stream=b"w" * 16, seq=1, names=("t",), counts=[0])])[0]
        assert reply.status == Status.UNAVAILABLE
        assert "checkpoint" in reply.text()
    subject.finish_checkpoint(snapshot)
    assert subject.apply([Request(Op.CLEAR, stream=b"w" * 16, seq=1, names=("t",), counts=[0])])[0].status == Status.OK


def test_updates_are_answered_while_a_checkpoint_is_written(servers, tmp_path, monkeypatch):
    [server] = servers(1, "log", tmp_path, evict_every=timedelta(seconds=0.05))
    entered, go_on = threading.Event(), threading.Event()
    real = Checkpoints.save

    def slow(self, snapshot):
        entered.set()
        assert go_on.wait(60)
        return real(self, snapshot)

    monkeypatch.setattr(Checkpoints, "save", slow)
    with PsClient([server.address], deadline=LONG) as client:
        table = ps_table(client, 2, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
        paths = []
        thread = threading.Thread(target=lambda: paths.extend(client.checkpoint()))
        thread.start()
        assert entered.wait(60)
        for step in range(20):
            table.apply_gradients(T([1, 2]), torch.ones(2, 2), step)
        assert table.lookup(T([1])).tolist() == [[-20, -20]]
        second = threading.Thread(target=lambda: paths.append(server.checkpoint()))  # waits for the first
        second.start()
        cleared = threading.Thread(target=table.tables[0].clear)
        cleared.start()
        time.sleep(0.3)
        assert not paths
        assert table.lookup(T([1])).tolist() == [[-20, -20]]
        go_on.set()
        for each in (thread, second, cleared):
            each.join(60)
        assert len(paths) == 2
        assert table.lookup(T([1])).tolist() == [[0, 0]]
    server.stop()
    assert engine(tmp_path / "shard-0").shard.tables["t"].size() == 0


def test_a_checkpoint_that_fails_harms_nobody_and_is_tried_again(servers, tmp_path, monkeypatch):
    [server] = servers(1, "log", tmp_path, checkpoint_every=timedelta(seconds=0.05))
    real, full = Checkpoints.save, threading.Event()
    full.set()

    def save(self, snapshot):
        if full.is_set():
            raise OSError(28, "No space left on device")
        return real(self, snapshot)

    monkeypatch.setattr(Checkpoints, "save", save)
    with PsClient([server.address], deadline=LONG) as client:
        table = ps_table(client, 2, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
        end = time.monotonic() + 60
        while server._writes.checkpoint_failures < 3:
            assert time.monotonic() < end
            table.apply_gradients(T([1, 2]), torch.ones(2, 2))
        with pytest.raises(PeerError, match="No space left"):
            server.checkpoint()
        assert server.fatal is None
        full.clear()
        assert server.checkpoint().startswith(str(tmp_path))
        table.apply_gradients(T([1]), torch.ones(1, 2))


@pytest.mark.timeout(900)
def test_killed_in_the_middle_of_a_checkpoint_with_updates_flowing(tmp_path, forked_servers):
    settings = {"optimizer": "adam", "initializer": "uniform", "lr": 0.01}
    judge = HashTable(16, seed=1, name="judge", **settings)
    options = ["--durability", "log", "--dir", str(tmp_path), "--checkpoint-every", "0.05s"]
    rng = random.Random(0)
    with LocalServers(1, options) as servers:
        client = PsClient(servers.addresses, deadline=LONG, max_staleness=2)
        table = ps_table(client, 16, name="t", seed=1, **settings)
        killed = []
        end = time.monotonic() + 600

        def until(happened):
            while not happened() and time.monotonic() < end:
                time.sleep(0.001)

        def drafts():
            return any((tmp_path / "shard-00000").glob(".tmp-*"))

        def kill():
            while sum(killed) < 3 and time.monotonic() < end:
                until(drafts)
                time.sleep(rng.random() * 0.03)
                servers.pause(0)
                if not drafts():  # this checkpoint was finished meanwhile
                    servers.resume(0)
                    continue
                restarts, seen = servers.restarts, step
                servers.kill(0)
                killed.append(drafts())
                until(lambda n=restarts, s=seen: servers.restarts > n and step > s + 3)  # updates flow again

        thread = threading.Thread(target=kill)
        torch.manual_seed(0)
        step = 0
        ids = torch.arange(20_000)
        while step < 3 or thread.is_alive():
            grads = torch.randn(ids.numel(), 16)
            table.apply_gradients(ids, grads, step, req_time=step)
            judge.apply_gradients(ids, grads, step, enable_dedup=True, req_time=step)
            ids = torch.randint(0, 25_000, (3000,))
            step += 1
            if step == 1:
                thread.start()
        assert sum(killed) == 3  # all three left a draft behind
        table.as_op()
        ids = torch.arange(25_000)
        assert torch.equal(table.lookup(ids), judge.lookup(ids))
        assert table.tables[0].lookup_entry(ids[::7]) == judge.lookup_entry(ids[::7])
        client.close()
