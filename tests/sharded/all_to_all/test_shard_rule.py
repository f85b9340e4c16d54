"""Which rank owns an id of our own tables, and checkpoints of version 0.1, whose rule left rank 0 empty."""

import json
from types import SimpleNamespace

import pytest
import torch

import shoal
from shoal.sharded import AllToAllHashTable
from tests.sharded.helpers import run_ranks

pytestmark = pytest.mark.timeout(600)

IDS = torch.arange(-20, 40)
ROWS = torch.stack([IDS, 2 * IDS], 1).float()
SETTINGS = {"optimizer": "sgd", "initializer": "zeros"}


def old_owner(ids, world):
    """Rank 0 held nothing where there were more than four ranks."""
    return torch.remainder(ids, world - 1) + 1


def test_ranks_restore_what_the_old_rule_saved(tmp_path):
    for rank in range(5):
        here = old_owner(IDS, 5) == rank
        table = shoal.HashTable(2, name=f"old_{rank}", **SETTINGS).assign(IDS[here], ROWS[here])
        table.save(str(tmp_path / f"rank-{rank:05d}" / "rows"))
    manifest = {"format": 1, "world_size": 5, "empty_rank0": True, "dim": 2}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for rank in range(5):
        # every rank reports the same: that it has restored its part
        backend = SimpleNamespace(rank=rank, world_size=5, all_to_all=lambda flat, send, recv: flat.clone())
        table = AllToAllHashTable(2, backend=backend, **SETTINGS).restore(tmp_path)
        owned = IDS[table.owner(IDS) == rank]
        assert table.table.size() == owned.numel() == 12
        assert table.table.lookup(owned).tolist() == torch.stack([owned, 2 * owned], 1).tolist()


def five_ranks(rank, world, folder):
    from shoal.comm.ranks.torch_ranks import start_ranks
    from shoal.durable import MANIFEST, read_folder, read_saved, write_saved
    from shoal.train.loop.checkpoint import Snapshot, load_checkpoint, save_checkpoint

    ranks, model = start_ranks(), torch.nn.Linear(1, 1)

    def snapshot():
        return Snapshot(step=1, model=model, optimizer=torch.optim.SGD(model.parameters()), reader={}, metrics={})

    def save(name, table):
        path = f"{folder}/{name}"
        save_checkpoint(path, snapshot(), [table], ranks, lambda: None)
        return path

    here = old_owner(IDS, world) == rank
    old = shoal.HashTable(2, name="t", **SETTINGS).assign(IDS[here], ROWS[here])
    path = save("old", old)
    if rank == 0:
        saved = read_saved(f"{path}/{MANIFEST}")
        del saved.fields["content"]["tables"][0]["empty_rank0"]  # as version 0.1 wrote it
        write_saved(saved.manifest, saved.fields, saved.files)
    ranks.barrier()
    table = AllToAllHashTable(2, name="t", **SETTINGS)
    load_checkpoint(read_folder(path), snapshot(), [table.table], ranks)
    found = table.lookup(IDS)
    again = save("new", table.table)
    fresh = AllToAllHashTable(2, name="t", **SETTINGS)
    load_checkpoint(read_folder(again), snapshot(), [fresh.table], ranks)
    return found.tolist(), fresh.lookup(IDS).tolist(), fresh.table.size()


def test_every_rank_of_five_holds_rows_also_after_a_trainer_checkpoint_of_the_old_rule(tmp_path):
    for found, again, size in run_ranks(5, five_ranks, str(tmp_path)):
        assert found == again == ROWS.tolist()
        assert size == 12
