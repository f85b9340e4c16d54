"""Logs and checkpoints in an object store: plain values, a store of files, then an S3 API on loopback."""

import json
import os
import shutil
from datetime import UTC, datetime, timedelta

import pytest
import torch

from shoal.cli.main import main
from shoal.errors import ConfigError, DataError
from shoal.sharded import Engine, ParameterServer, PsClient, Shard, ps_table
from shoal.sharded.ps.archive.restoring import restore
from shoal.sharded.ps.archive.store import Archive, Segment, chosen
from shoal.sharded.ps.archive.uploading import Uploading
from tests.sharded.helpers import LONG

T = torch.tensor


def uploading(archive, folder, **options):
    def make(server):
        return Uploading(archive, folder, durable=lambda: server.engine.log.durable_number, **options)

    return make


def server_of(folder, archive=None, **options):
    make = None if archive is None else uploading(archive, folder, **options)
    return ParameterServer(Engine(Shard(0, 1), "log", folder), archive=make, archive_every=timedelta(hours=1))


def table_of(client):
    return ps_table(client, 2, name="t", optimizer="sgd", lr=1.0, initializer="zeros")


def rows(folder, ids):
    with server_of(folder) as server, PsClient([server.address], deadline=LONG) as client:
        return table_of(client).lookup(ids)


@pytest.mark.parametrize(
    ("segments", "after", "expected"),
    [
        ([], 3, []),
        ([(0, 1, 4), (0, 5, 9)], 0, [(1, 4), (5, 9)]),
        ([(0, 1, 4), (0, 5, 9)], 6, [(7, 9)]),
        ([(0, 1, 4), (0, 6, 9)], 0, [(1, 4)]),
        ([(0, 3, 9)], 1, []),
        ([(1, 1, 9), (2, 6, 7)], 0, [(1, 5), (6, 7)]),
        ([(1, 1, 3), (1, 4, 9), (2, 3, 5), (3, 6, 6)], 0, [(1, 2), (3, 5), (6, 6)]),
    ],
)
def test_of_two_terms_the_later_ones_records_are_taken(segments, after, expected):
    made = [Segment(term, first, last, 0) for term, first, last in segments]
    assert [(first, last) for _, first, last in chosen(made, after)] == expected


def test_names_of_segments_say_what_is_in_them():
    segment = Segment(3, 7, 9, 1700000000000)
    assert Segment.of(segment.name) == segment
    assert Segment.of("notes.txt") is None


def test_an_empty_host_is_filled_up_to_the_last_upload(tmp_path):
    archive = Archive(f"file://{tmp_path / 'store'}", 0)
    with server_of(tmp_path / "a", archive) as server, PsClient([server.address], deadline=LONG) as client:
        table = table_of(client)
        table.apply_gradients(torch.arange(100), torch.ones(100, 2), 0)
        client.checkpoint(keep_as="run-best")
        table.apply_gradients(T([1]), torch.ones(1, 2), 1)
        server.uploading.round()
        middle = datetime.now(UTC)
        table.apply_gradients(T([1]), torch.ones(1, 2), 2)
        client.checkpoint()
        table.apply_gradients(T([2]), torch.ones(1, 2), 3)
        server.uploading.round()
        assert server.uploading.lag_records == 0
        stored = server.uploading.status()
        assert stored["archive_failures_total"] == 0
    assert archive.kept() == {"run-best": archive.checkpoints()[0].number}
    done = restore(archive, tmp_path / "b")
    assert done.kept == ("run-best",)
    assert rows(tmp_path / "b", T([0, 1, 2])).tolist() == [[-1, -1], [-3, -3], [-2, -2]]
    with server_of(tmp_path / "b") as server, PsClient([server.address], deadline=LONG) as client:
        client.restore("t", "run-best")
        assert table_of(client).lookup(T([1, 2])).tolist() == [[-1, -1], [-1, -1]]
    restore(archive, tmp_path / "c", until=middle)
    assert rows(tmp_path / "c", T([0, 1, 2])).tolist() == [[-1, -1], [-2, -2], [-1, -1]]
    with pytest.raises(ConfigError, match="must be empty"):
        restore(archive, tmp_path / "b")
    with pytest.raises(ConfigError, match="no checkpoint or log"):
        restore(archive, tmp_path / "d", until=middle - timedelta(days=1))


def test_a_server_goes_on_with_its_own_archive_and_refuses_one_that_is_ahead_of_it(tmp_path):
    archive = Archive(f"file://{tmp_path / 'store'}", 0)
    for step in range(2):
        with server_of(tmp_path / "a", archive) as server, PsClient([server.address], deadline=LONG) as client:
            table_of(client).apply_gradients(T([1]), torch.ones(1, 2), step)
            server.uploading.round()
    assert archive.segments()[-1].last >= 3
    restore(archive, tmp_path / "b")
    assert rows(tmp_path / "b", T([1])).tolist() == [[-2, -2]]
    with server_of(tmp_path / "empty", archive) as server, pytest.raises(DataError, match="shoal ps restore"):
        server.uploading.round()


def test_what_is_old_is_removed_and_a_damaged_object_is_refused(tmp_path):
    archive = Archive(f"file://{tmp_path / 'store'}", 0)
    with server_of(tmp_path / "a", archive, keep=timedelta(0)) as server:
        with PsClient([server.address], deadline=LONG) as client:
            table = table_of(client)
            for step in range(4):
                table.apply_gradients(T([1]), torch.ones(1, 2), step)
                client.checkpoint()
                server.uploading.round()
        assert len(archive.checkpoints()) <= 2
        assert all(one.last > archive.checkpoints()[0].number for one in archive.segments())
    number = archive.checkpoints()[-1].number
    folder = tmp_path / "store" / "shard-00000" / "checkpoints" / f"checkpoint-{number:016d}"
    file = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError):
        restore(archive, tmp_path / "b")
    assert not list((tmp_path / "b").glob("checkpoint-*"))


@pytest.mark.parametrize("url", ["bogus://x", "relative/path", "file://relative", "file:///proc/absent", "s3://", ""])
def test_an_address_that_is_no_store_is_refused_in_one_line(url):
    with pytest.raises(
        ConfigError, match=r"--archive must be s3://bucket/prefix, .* or file:///path, got .*\(.+\)$"
    ) as told:
        Archive(url, 0)
    assert "\n" not in str(told.value)


def test_a_store_that_does_not_answer_is_tried_again(tmp_path):
    archive = Archive(f"file://{tmp_path / 'store'}", 0)
    with server_of(tmp_path / "a", archive) as server, PsClient([server.address], deadline=LONG) as client:
        table_of(client).apply_gradients(T([1]), torch.ones(1, 2), 0)
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "store").write_text("not a folder")
        with pytest.raises(Exception, match=r"."):
            server.uploading.round()
        (tmp_path / "store").unlink()
        (tmp_path / "store").mkdir()
        server.uploading.round()
        assert archive.segments()


def test_the_archive_is_s3_too_and_the_command_restores(tmp_path, monkeypatch, capsys):
    moto = pytest.importorskip("moto.server")
    s3 = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    s3.start()
    try:
        host, port = s3.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        _make_bucket(host, port)
        archive = Archive("s3://bucket/ctr", 0)
        with server_of(tmp_path / "a", archive) as server, PsClient([server.address], deadline=LONG) as client:
            table = table_of(client)
            table.apply_gradients(T([1]), torch.ones(1, 2), 0)
            client.checkpoint()
            table.apply_gradients(T([1]), torch.ones(1, 2), 1)
            server.uploading.round()
        assert main(["ps", "restore", "--archive", "s3://bucket/ctr", "--dir", str(tmp_path / "b"), "--list"]) == 0
        assert "checkpoint" in capsys.readouterr().out
        assert main(["ps", "restore", "--archive", "s3://bucket/ctr", "--dir", str(tmp_path / "b"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["last"] >= 3
        assert rows(tmp_path / "b" / "shard-00000", T([1])).tolist() == [[-2, -2]]
        assert main(["ps", "restore", "--archive", "s3://bucket/ctr", "--dir", str(tmp_path / "b")]) == 2
        assert "must be empty" in capsys.readouterr().err
    finally:
        s3.stop()


def _make_bucket(host, port):
    import urllib.request

    request = urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
    urllib.request.urlopen(request, timeout=60).close()
    assert os.environ["AWS_ENDPOINT_URL"]
