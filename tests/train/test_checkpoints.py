"""`Checkpoints` in a user's loop, resumed by more and fewer ranks (processes)."""

import pytest
import torch
from torch import nn

from shoal.comm.ranks.torch_ranks import default_ranks
from shoal.data import Schema, Stream, make_format, text_fid
from shoal.errors import ConfigError, DataError
from shoal.nn import HashEmbeddingBag
from shoal.sharded import AllToAllHashTable
from shoal.table import HashTable
from shoal.testing import run_ranks
from shoal.train import Checkpoints

SCHEMA = Schema(label="y", sparse=("u",))
LINES = 300


class Model(nn.Module):
    def __init__(self, make, ways=("row", "column", "table:0", "data")):
        super().__init__()
        self.bags = nn.ModuleList(
            HashEmbeddingBag(make(name, way), combiner="sum") for name, way in zip("abcd", ways, strict=False)
        )
        self.dense = nn.Linear(4 * len(ways), 1)

    def forward(self, ids):
        return self.dense(torch.cat([bag(ids) for bag in self.bags], dim=1))


def spread(name, way):
    return AllToAllHashTable(4, name=name, way=way, optimizer="adagrad", lr=0.1)


def local(name, way):
    return HashTable(4, name=name, optimizer="adagrad", lr=0.1)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text("y\tu\n" + "".join(f"{i}\tu{i % 50}\n" for i in range(LINES)))
    return str(path)


def opened(folder, data, make=spread, **options):
    torch.manual_seed(0)
    ranks = default_ranks()
    model = Model(make, **options)
    optimizer = torch.optim.Adam(model.parameters())
    stream = Stream([data], make_format("tsv", SCHEMA), SCHEMA, batch_size=16, shuffle_rows=64, rank=ranks.rank,
                    world=ranks.world_size)  # fmt: skip
    return model, optimizer, stream, Checkpoints(folder, model, optimizer, stream=stream, ranks=ranks)


def steps(rank, world, *, folder, data, count):
    """Learns ``count`` steps (fewer at the end of the data) and saves; labels, and what is known then."""
    model, optimizer, stream, checkpoints = opened(folder, data)
    at = checkpoints.resume()
    known = (
        None if at is None else {"step": at.step, "world": at.world, "values": at.values, **content(model, optimizer)}
    )
    step, labels, batches, state = at.step if at else 0, [], iter(stream), stream.state
    for _ in range(count):
        batch = next(batches, None)
        ids = batch.samples.ids.view(-1, 1) if batch else torch.empty(0, 1, dtype=torch.int64)
        optimizer.zero_grad()
        model(ids).sum().backward()
        for parameter in model.parameters():
            checkpoints.ranks.sum(parameter.grad)
        optimizer.step()
        step += 1
        if batch:
            labels += batch.samples.label.int().tolist()
            state = batch.state
    checkpoints.save(step, state, values={"steps": step})
    return labels, known, content(model, optimizer)


def content(model, optimizer):
    ids = torch.tensor([text_fid(f"u{i}", slot) for i in range(50) for slot in range(3)])
    states = sorted(optimizer.state_dict()["state"].items())
    moments = [state["exp_avg"].flatten().tolist() for _, state in states]
    return {
        "rows": [bag.table.lookup(ids).tolist() for bag in model.bags], "weight": model.dense.weight.tolist(),
        "moments": moments, "table_steps": [bag.keepers()[0].global_step for bag in model.bags],
    }  # fmt: skip


def test_rows_weights_and_positions_continue_on_any_number_of_ranks(tmp_path, data):
    folder, labels, before = tmp_path / "run", [], None
    for world, count in ((3, 3), (2, 2), (1, 1), (3, 10)):
        parts = run_ranks(world, steps, folder=folder, data=data, count=count, timeout_s=300)
        for own, known, _ in parts:
            labels += own
            if before is not None:
                assert known == before
        after = parts[0][2]
        assert any(row != [0.0] * 4 for row in after["rows"][1])
        assert all(content == after for _, _, content in parts)
        number = int(sorted(path.name for path in folder.glob("ckpt-*"))[-1].rpartition("-")[2])
        before = {"step": number, "world": world, "values": {"steps": number}, **after}
    assert sorted(labels) == list(range(LINES))
    assert len(list(folder.glob("ckpt-*"))) == 2


def test_a_model_of_plain_tables_and_its_damage(tmp_path, data):
    model, optimizer, stream, checkpoints = opened(tmp_path, data, local)
    assert checkpoints.resume() is None
    batches = iter(stream)
    for step in (1, 2):
        batch = next(batches)
        model(batch.samples.ids.view(-1, 1)).sum().backward()
        optimizer.step()
        checkpoints.save(step, batch.state)
        kept = content(model, optimizer)
        if step == 1:
            first = kept
    again = opened(tmp_path, data, local)
    assert again[3].resume().step == 2
    assert content(*again[:2]) == kept
    newest = max(tmp_path.glob("ckpt-*"))
    (newest / "dense.safetensors").write_bytes(b"nothing")
    older = opened(tmp_path, data, local)
    assert older[3].resume().step == 1
    assert content(*older[:2]) == first
    assert next(iter(older[2])).samples.label.tolist() == batch.samples.label.tolist()
    (tmp_path / "ckpt-00000001" / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"no checkpoint in .* is complete"):
        opened(tmp_path, data, local)[3].resume()


def test_what_does_not_fit_is_refused(tmp_path, data):
    model, optimizer, _, checkpoints = opened(tmp_path, data, local)
    checkpoints.save(1)
    with pytest.raises(ConfigError, match=r"do not fit the model: these tensors differ: dense.weight"):
        opened(tmp_path, data, local, ways=("row", "row"))[3].resume()
    with pytest.raises(ConfigError, match="keep must be at least 1, got 0"):
        Checkpoints(tmp_path, model, optimizer, keep=0)
    with pytest.raises(ConfigError, match="state needs a stream; pass the stream"):
        Checkpoints(tmp_path, model, optimizer).save(2, {"epoch": 0})
    both = nn.ModuleList([HashEmbeddingBag(local("a", "row")) for _ in range(2)])
    with pytest.raises(ConfigError, match="tables must have different names, got a, a"):
        Checkpoints(tmp_path, both, optimizer)
