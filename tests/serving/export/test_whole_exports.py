"""Distributed exports are visible completely or not at all: killed at any point, by one process or by ranks."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from shoal.comm import default_ranks
from shoal.errors import PeerError
from shoal.serving import ExportMode, Feature, ModelExporter
from shoal.serving.cluster.rollout import newest_everywhere
from shoal.serving.export.whole import is_whole, whole_versions
from shoal.table import test_hash_table
from shoal.testing import run_ranks
from tests.serving.helpers import eventually
from tests.serving.server.test_one_version import (
    SCORES,
    WEIGHTS,
    Scale,
    export_version,
    route_to,
    score,
    status_of,
    subs_of,
)
from tests.serving.server.test_server import serve  # noqa: F401

SUBS = ("entry", "ps_0", "ps_1")


def seen(path):
    """Which versions a server of each sub-graph finds."""
    return {tuple(whole_versions(path / "exported_models" / sub)) for sub in SUBS}


def die_at(rename):
    """Kills this process at its n-th rename of a folder."""
    real, count = os.rename, iter(range(100))

    def dying(source, target):
        if os.path.isdir(source) and next(count) == rename:
            os.kill(os.getpid(), signal.SIGKILL)
        real(source, target)

    os.rename = dying


def export_and_die(rank, world, path, version, rename):
    die_at(rename)
    export_version(Path(path), version)


def export_of_ranks(rank, world, path, version, *, dies=-1, fails=-1, alone=False):
    """Every rank's own shard; the row's value tells the version."""
    table = test_hash_table(1)
    table.assign(torch.arange(rank, 10, world), torch.full((10 // world, 1), SCORES[version] / WEIGHTS[version]))
    table.name = f"T{rank}"
    tool = ModelExporter(path, model_name="m", net=Scale(WEIGHTS[version]), features={"user": Feature(slot="u")})
    if rank == dies:
        die_at(0)
    if rank == fails:
        os.makedirs(Path(path) / "exported_models", exist_ok=True)
        (Path(path) / "exported_models" / f"ps_{rank}").write_text("in the way")
    who = {"rank": rank, "num_ps": world} if alone else {"ranks": default_ranks()}
    return tool.export([{"u": table}], global_step=7, mode=ExportMode.DISTRIBUTED, **who)


def test_a_version_is_whole_when_all_parts_of_its_save_are_there(tmp_path):
    export_version(tmp_path, 1)
    assert seen(tmp_path) == {(1,)}
    base = tmp_path / "exported_models"
    os.rename(base / "ps_1" / "1", base / "ps_1" / ".away")
    assert seen(tmp_path) == {()}
    assert newest_everywhere(base, 2) is None
    export_version(tmp_path, 2)
    os.rename(base / "ps_1" / "2", base / "ps_1" / "1")  # from another save
    assert not is_whole(base / "entry" / "1")
    assert seen(tmp_path) == {()}


def test_a_shard_that_is_alone_in_its_place_is_whole(tmp_path):
    export_version(tmp_path / "made", 1)
    (tmp_path / "elsewhere").mkdir()
    os.rename(tmp_path / "made/exported_models/ps_0", tmp_path / "elsewhere/ps_0")
    for name in (str(2**63), "9" * 200):  # a server could not report them
        shutil.copytree(tmp_path / "elsewhere/ps_0/1", tmp_path / "elsewhere/ps_0" / name)
    assert whole_versions(tmp_path / "elsewhere/ps_0") == [1]


@pytest.mark.parametrize("rename", range(3))
def test_an_export_that_is_killed_is_not_seen_and_is_made_again(tmp_path, rename):
    export_version(tmp_path, 1)
    run_ranks(1, export_and_die, str(tmp_path), 2, rename, backend=None, lost=(0,))
    named = [sub for sub in SUBS if (tmp_path / "exported_models" / sub / "2").exists()]
    assert len(named) == rename
    assert seen(tmp_path) == {(1,)}
    export_version(tmp_path, 2)
    assert seen(tmp_path) == {(1, 2)}


def test_servers_stay_with_their_version_when_an_export_is_killed(serve, tmp_path):  # noqa: F811
    export_version(tmp_path, 1)
    server, client = serve(subs_of(tmp_path), poll=0.05)
    route_to(server)
    run_ranks(1, export_and_die, str(tmp_path), 2, 2, backend=None, lost=(0,))
    server.refresh()
    with pytest.raises(StopIteration):  # neither loaded nor waiting
        status_of(client, "m:ps_0", 2)
    assert score(client) == [SCORES[1]] * 2
    export_version(tmp_path, 2)
    eventually(lambda: score(client) == [SCORES[2]] * 2)


def test_ranks_export_together(tmp_path):
    plans = run_ranks(2, export_of_ranks, str(tmp_path), 1)
    assert [sorted(plan) for plan in plans] == [["entry", "ps_0"], ["ps_1"]]
    assert seen(tmp_path) == {(7,)}


def test_of_ranks_that_export_together_one_that_fails_is_told_by_all(tmp_path):
    with pytest.raises(PeerError, match=r"ps_1|rank 1"):
        run_ranks(2, export_of_ranks, str(tmp_path), 1, fails=1)
    assert not list(tmp_path.glob("exported_models/entry/*"))


def test_what_a_killed_rank_left_is_not_mixed_with_the_next_save(serve, tmp_path):  # noqa: F811
    with pytest.raises(PeerError):
        run_ranks(2, export_of_ranks, str(tmp_path), 1, dies=0, lost=(0,), group_timeout_s=5)
    assert (tmp_path / "exported_models/ps_1/7").exists()
    assert seen(tmp_path) == {()}
    run_ranks(2, export_of_ranks, str(tmp_path), 2)  # the same step again, with other rows
    assert seen(tmp_path) == {(7,)}
    server, client = serve(subs_of(tmp_path))
    route_to(server)
    assert score(client) == [SCORES[2]] * 2


def test_ranks_that_export_alone_are_seen_when_the_last_one_has_written(tmp_path):
    export_of_ranks(1, 2, tmp_path, 1, alone=True)
    assert seen(tmp_path) == {()}
    export_of_ranks(0, 2, tmp_path, 1, alone=True)
    assert seen(tmp_path) == {(7,)}
