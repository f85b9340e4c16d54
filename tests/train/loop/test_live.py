"""`shoal train` on endless sources: history and stream, exact resume, bad records, acknowledgements, timers.

The last ones start processes.
"""

import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from shoal.data.live import LiveStream, open_reader, open_writer
from shoal.errors import ConfigError, DataError
from shoal.sharded import PsClient
from shoal.train import SessionRunHook
from shoal.train.loop.trainer import trainer
from shoal.trainer import load_config
from tests.brokers import mock_kafka, redis_server  # noqa: F401
from tests.cli.train_helpers import events, kill_after, newest, of, same_checkpoint
from tests.train.loop.helpers import SMALL, Told, run

DEADLINE_S = 120
BASE = SMALL | {
    "data.format": "json", "data.label": "click", "data.dense": ["age"], "data.sparse": ["user", "item"],
    "data.time": "at",    "data.shuffle_rows": 0, "data.max_wait_s": 30.0, "data.idle_s": 0.5, "train.batch_size": 64,
}  # fmt: skip


def records(first, last):
    for i in range(first, last):
        user, item = i * 7919 % 50, i * 104729 % 31
        click = int((user * 7 + item) % 5 == 0)
        made = {"click": click, "age": i % 80, "user": f"u{user}", "item": f"i{item}", "at": 1_000_000 + i}
        yield json.dumps(made).encode()


def settings(*train, **more):
    given = {name.replace("_dot_", "."): value for name, value in more.items()}
    return load_config(None, BASE | {"data.train": [str(one) for one in train]} | given)


def fill(address, first, last, partition=None):
    writer = open_writer(address)
    writer.append(list(records(first, last)), partition=partition)
    writer.close()


def write(path, first, last):
    path.write_bytes(b"".join(line + b"\n" for line in records(first, last)))
    return path


def state_of(config, **options):
    """Weights and rows after a run, and what it said."""
    told = Told()
    with trainer(config, reporter=told, **options) as one:
        one.run()
        weights = {name: tensor.clone() for name, tensor in one.model.state_dict().items()}
        return weights, one.rows.local[0].size(), told


def same(one, other):
    return one.keys() == other.keys() and all(bool((one[name] == other[name]).all()) for name in one)


def test_history_is_handed_over_to_the_stream_and_the_run_learns_what_a_run_on_files_learns(redis_server, tmp_path):  # noqa: F811
    first, second = write(tmp_path / "a.json", 0, 640), write(tmp_path / "b.json", 640, 1280)
    weights, rows, _ = state_of(settings(first, second))
    address = redis_server.address("handover")
    fill(address, 0, 1280)
    reader = open_reader(address)  # the first 640 are in the history, so the stream begins after them
    positions = reader.poll(640, 5.0)[0].positions
    reader.close()
    ours, ours_rows, told = state_of(settings(first, f"{address}?from={positions[-1]}"))
    assert (told.ended["why"], told.ended["samples"], told.ended["epoch"]) == ("finished", 1280, 2)
    assert same(ours, weights)
    assert ours_rows == rows
    assert told.ended["lag_records"] == 0
    # The same, with the position next to the history.
    (tmp_path / "_positions.json").write_text(json.dumps({address: {"handover": positions[-1]}}))
    assert same(state_of(settings(first, address))[0], weights)
    (tmp_path / "_positions.json").write_text("[]")
    with pytest.raises(DataError, match="_positions"):
        run(settings(first, address))


@pytest.mark.parametrize("stopped_at", [0, 10])
def test_a_run_that_waits_for_its_source_can_be_stopped_and_resumed(redis_server, tmp_path, stopped_at):  # noqa: F811
    address = redis_server.address(f"waited{stopped_at}")
    fill(address, 0, 640)
    config = settings(write(tmp_path / "a.json", 640, 1280), address, out_dot_dir=str(tmp_path / "out"))
    whole, _, _ = state_of(replace(config, out=replace(config.out, dir=None)))
    told = Told()

    def stop():  # step 10 is the last one of the history; the source is then opened again
        redis_server.kill()
        return one.at.step + 1 >= stopped_at

    try:
        if not stopped_at:
            redis_server.kill()
        with trainer(config, reporter=told, stop=stop) as one:
            assert one.run()["why"] == "interrupted"
    finally:
        redis_server.start()
    assert told.ended["step"] == stopped_at
    resumed, _, told = state_of(config)
    assert told.ended["why"] == "finished"
    assert same(resumed, whole)


def test_a_run_that_is_stopped_goes_on_behind_what_it_learnt_and_a_dead_letter_is_written_once(redis_server, tmp_path):  # noqa: F811
    address = redis_server.address("stopped")
    writer = open_writer(address)
    writer.append(list(records(0, 200)))
    writer.append([b"not json", b'{"click": 2']), writer.append(list(records(200, 500)))
    writer.append([b"\xff"]), writer.append(list(records(500, 640)))
    writer.close()
    whole, _, told = state_of(settings(address))
    assert (told.ended["samples"], told.ended["bad_rows"]) == (640, 3)
    config = settings(address, out_dot_dir=str(tmp_path / "out"), out_dot_every_steps=4)
    for stop_at in (3, 6, None):
        told = Told()
        with trainer(config, reporter=told, stop=lambda told=told, at=stop_at: one.at.step + 1 == at) as one:
            one.run()
    assert (told.ended["samples"], told.ended["bad_rows"]) == (640, 3)
    assert same(one.model.state_dict(), whole)
    letters = [json.loads(line) for line in (tmp_path / "out" / "dead-letters.jsonl").read_text().splitlines()]
    assert [one.get("text", one.get("base64")) for one in letters] == ["not json", '{"click": 2', "/w=="]
    assert letters[0]["source"] == address
    assert "JSON" in letters[0]["why"]
    with pytest.raises(DataError, match="stopped, partition stopped"):
        run(settings(address, train_dot_strict=True))


def test_kafka_offsets_are_committed_when_the_checkpoint_is_whole_and_not_before(mock_kafka, tmp_path):  # noqa: F811
    address = mock_kafka.address("committed") + "?group=ctr"
    for partition in range(4):
        fill(address, partition * 64, partition * 64 + 64, str(partition))
    run(settings(address))  # without checkpoints nothing is committed
    reader = open_reader(address)
    assert set(reader.positions().values()) == {0}
    reader.close()
    told = run(settings(address, out_dot_dir=str(tmp_path)))
    assert told.ended["samples"] == 256
    reader = open_reader(address)
    assert reader.positions() == {"0": 64, "1": 64, "2": 64, "3": 64}
    reader.close()
    fill(address, 256, 320, "1")
    assert run(settings(address, out_dot_dir=str(tmp_path))).ended["samples"] == 320


def test_a_history_of_files_is_continued_by_a_topic_from_a_date_on(mock_kafka, tmp_path):  # noqa: F811
    import confluent_kafka

    producer = confluent_kafka.Producer({"bootstrap.servers": mock_kafka.bootstrap})
    midnight_ms = 1_793_491_200_000  # 2026-11-01, UTC
    for i, record in enumerate(records(0, 640)):  # the first half of each partition is from the day before
        producer.produce("dated", record, partition=i % 2, timestamp=midnight_ms + (i - 320) * 1000)
    producer.flush(DEADLINE_S)
    history, rest = write(tmp_path / "a.json", 0, 320), tmp_path / "b.json"
    rest.write_bytes(b"".join(line + b"\n" for line in list(records(320, 640))[::2]))
    weights, rows, _ = state_of(settings(history, rest))
    address = mock_kafka.address("dated")
    for date in ("2026-11-01", "2026-11-01T02:00:00+02:00"):
        ours, ours_rows, told = state_of(settings(history, f"{address}?partitions=0&from={date}"))
        assert (told.ended["samples"], told.ended["lag_records"], ours_rows) == (480, 0, rows)
        assert same(ours, weights)


def test_a_growing_directory_and_a_batch_that_waited_long_enough(tmp_path):
    folder = tmp_path / "grows"
    folder.mkdir()
    write(folder / "a.json", 0, 100)
    told = run(settings(f"dir:{folder}", data_dot_max_wait_s=0.0, data_dot_idle_s=0.3))
    assert (told.ended["samples"], told.ended["step"]) == (100, 2)


def test_a_directory_of_parquet_files_continues_a_history_of_parquet_files(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    def parquet(path, first, last):
        pq.write_table(pa.Table.from_pylist([json.loads(one) for one in records(first, last)]), path)
        return path

    parquet_files = {"data_dot_format": "parquet"}
    days = [parquet(tmp_path / f"day{day}.parquet", 320 * day, 320 * day + 320) for day in range(3)]
    weights, rows, _ = state_of(settings(*days, **parquet_files))
    (tmp_path / "in").mkdir()
    for day in (1, 2):
        days[day].rename(tmp_path / "in" / days[day].name)
    ours, ours_rows, told = state_of(settings(days[0], f"dir:{tmp_path / 'in'}", **parquet_files))
    assert told.ended["samples"] == 960
    assert same(ours, weights)
    assert ours_rows == rows


def test_an_empty_stream_ends_when_it_was_idle_for_long_enough_or_is_evaluated_and_stopped(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    held = write(tmp_path / "eval.json", 0, 64)
    assert run(settings(f"dir:{folder}", data_dot_idle_s=0.1)).ended["samples"] == 0
    config = settings(
        f"dir:{folder}",
        data_dot_eval=[str(held)],
        eval_dot_every_s=0.1,
        data_dot_idle_s=60.0,
        out_dot_dir=str(tmp_path / "out"),
    )
    told = Told()
    with trainer(config, reporter=told, stop=lambda: len(told.evaluations) > 1) as one:
        assert one.run()["why"] == "interrupted"
    assert told.saves == [0]


def test_settings_of_sources_are_checked(tmp_path):
    for change, why in (
        ({"data.train": ["redis://h"]}, "STREAM"),
        ({"data.train": ["rdis://h/x"]}, "must begin with redis:.* got 'rdis://h/x'"),
        ({"data.eval": ["-"]}, "eval must be files"),
        ({"data.format": "csv"}, "columns"),
        ({"data.format": "parquet", "data.message_format": "jsn"}, "did you mean 'json'"),
        ({"data.max_wait_s": -1.0}, "max_wait_s"),
        ({"data.train": [str(tmp_path), "-"], "data.message_format": "tfrecord"}, "must agree"),
    ):
        with pytest.raises(ConfigError, match=why):
            load_config(None, BASE | {"data.train": ["-"]} | change)
    (tmp_path / "x.toml").write_text(
        '[data]\ntrain = ["a.json", "dir:grows", "kafka://h/t", "-"]\nformat = "json"\nlabel = "y"\nsparse = ["u"]\n'
    )
    config = load_config(tmp_path / "x.toml")
    assert config.data.train == (str(tmp_path / "a.json"), f"dir:{tmp_path / 'grows'}", "kafka://h/t", "-")


def test_a_batch_is_cut_again_where_it_was_cut_before(tmp_path):
    folder = tmp_path / "grows"
    folder.mkdir()

    def stream():
        made = load_config(None, BASE | {"data.train": [f"dir:{folder}"]}).data
        return LiveStream(
            made.live, made.make_format(), made.schema(), format_name="json", batch_size=64, max_wait_s=0.0, idle_s=0.2,
            journal=str(tmp_path / "journal"),
        )  # fmt: skip

    one, cut = stream(), []
    write(folder / "a", 0, 10)
    for batch in one:
        if len(batch):
            cut.append(batch)
            if len(cut) < 6:
                write(folder / "abcdef"[len(cut)], len(cut) * 10, len(cut) * 10 + 10)
    one.close()
    assert [len(batch) for batch in cut] == [10] * 6
    with open(tmp_path / "journal", "ab") as file:
        file.write(b"[7,[[")  # a line that a killed process left
    write(folder / "g", 60, 160)
    again = stream()  # would make one batch of all of them
    again.restart(cut[1].state)
    batches = [batch for batch in again if len(batch)]
    assert [len(batch) for batch in batches] == [10, 10, 10, 10, 64, 36]
    assert [batch.state for batch in batches[:4]] == [batch.state for batch in cut[2:]]
    assert batches[-1].samples.time.tolist() == list(range(1_000_124, 1_000_160))
    again.acknowledge(batches[2].state), again.acknowledge(batches[4].state)
    again.close()
    (folder / "c").write_bytes(b"".join(line + b"\n" for line in records(500, 505)))
    changed = stream()
    changed.restart(cut[1].state)
    with pytest.raises(DataError, match="the stream was changed"):
        list(changed)
    changed.close()


def test_updates_of_a_trainer_that_shares_its_servers_are_applied_once(tmp_path):
    pytest.importorskip("zmq")
    from shoal.sharded.ps import Engine, ParameterServer, Shard

    folder = tmp_path / "clicks"
    folder.mkdir()
    write(folder / "a", 0, 640)

    class Crash(SessionRunHook):
        """Ends the run in the middle of a step, as a kill would: after the rows were sent, before anything is kept."""

        def after_run(self, context, values):
            if context.global_step == 7:
                raise RuntimeError("killed")

    rows = []
    for name, crashes in (("whole", 0), ("killed", 3)):
        with ParameterServer(Engine(Shard(0, 1), "log", tmp_path / name / "ps")) as server:
            config = settings(
                f"dir:{folder}", out_dot_dir=str(tmp_path / name / "run"), out_dot_every_steps=4, train_dot_lr=0.0,
                train_dot_ps=[server.address], train_dot_ps_restore=False, data_dot_max_wait_s=0.0,
            )  # fmt: skip
            for _ in range(crashes):
                with pytest.raises(RuntimeError, match="killed"):
                    run(config, hooks=[Crash()])
            assert run(config).ended["samples"] == 640
            with PsClient([server.address]) as client:
                rows.append(
                    sorted((i, r.tolist()) for page in client.scan("features") for i, r in zip(*page[:2], strict=True))
                )
    assert len(rows[0]) == 81
    assert rows[0] == rows[1]


# --- processes --------------------------------------------------------------------------------------------------------


def command(address, out, *more):
    flags = [
        text
        for name, value in BASE.items()
        if name != "data.idle_s"
        for text in ("--set", f"{name}={json.dumps(value)}")
    ]
    shell = [sys.executable, "-m", "shoal", "train", "--train", address, "--out", str(out), "--json"]
    return [*shell, *flags, *map(str, more)]


def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(redis_server, tmp_path):  # noqa: F811
    address = redis_server.address("bits")
    fill(address, 0, 3200)
    config = {"out_dot_every_steps": 7, "data_dot_max_wait_s": float("inf")}
    run(settings(address, out_dot_dir=str(tmp_path / "whole"), **config))
    flags = ("--set", "data.max_wait_s=inf", "--checkpoint-steps", 7, "--log-steps", 1)
    kill_after(command(address, tmp_path / "killed", *flags), "progress", 23)
    redis_server.kill()
    redis_server.start()
    told = run(settings(address, out_dot_dir=str(tmp_path / "killed"), **config))
    assert told.ended["samples"] == 3200
    same_checkpoint(newest(tmp_path / "whole"), newest(tmp_path / "killed"))


def test_sigterm_ends_a_quiet_run_with_a_checkpoint_and_exit_code_0(tmp_path):
    folder = tmp_path / "grows"
    folder.mkdir()
    write(folder / "a.json", 0, 300)
    shell = command(f"dir:{folder}", tmp_path / "out", "--set", "data.max_wait_s=0.1", "--set", "out.log_s=0.2")
    with subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        seen = []
        for line in process.stdout:
            seen.append(json.loads(line))
            if seen[-1]["event"] == "progress" and seen[-1]["samples"] == 300:
                break
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    told = seen + events(out)
    assert of("start", told)[0]["sources"] == [f"dir:{folder}"]
    assert told[-1]["why"] == "interrupted"
    assert newest(tmp_path / "out").name == f"ckpt-{told[-1]['step']:08d}"
