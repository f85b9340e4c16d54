"""Nets that AOTInductor compiles at export: the same answers, pushed weights, servers that must not run them."""

import logging
from pathlib import Path

import pytest
import torch

from shoal.errors import DataError
from shoal.serving import Feature, ModelExporter
from shoal.serving.export import compiled
from shoal.serving.server.loader import load_servable
from shoal.serving.server.net.placement import Placement
from shoal.table import test_hash_table

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def one_small_compilation():
    """The compiler is not tried for what it can do, nor are headers compiled for programs to come."""
    from torch._inductor import config

    with config.patch(
        {"cpp_cache_precompile_headers": False, "aot_inductor.precompile_headers": False, "cpp.vec_isa_ok": True}
    ):
        yield


class Net(torch.nn.Module):
    """Has an operation that the core does not have."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 1)

    def forward(self, user, price):
        return {"score": torch.erfinv(0.9 * torch.tanh(self.linear(torch.cat([user, price], 1)).squeeze(1)))}


def export(folder, name):
    table = test_hash_table(4, name_suffix=name)
    table.assign(torch.arange(9), torch.randn(9, 4))
    tool = ModelExporter(
        folder, model_name="m", net=Net(), features={"user": Feature(slot="u")}, dense={"price": torch.zeros(2, 2)},
        compiled=True,
    )  # fmt: skip
    return Path(tool.export([{"u": table}], global_step=1)[""])


def answer(servable, rows):
    draw = torch.Generator().manual_seed(rows)
    inputs = {
        "user": torch.randint(0, 9, (rows, 3), generator=draw),
        "price": torch.randn(rows, 2, generator=draw),
    }
    return servable.signatures["serving_default"].run(inputs)


def test_a_compiled_net_is_run_where_that_is_allowed(tmp_path):
    if compiled.compiler() is None:
        pytest.skip("there is no C++ compiler")
    where = export(tmp_path, "compiled")
    plain, quick = load_servable(where, where.parent), load_servable(where, where.parent, Placement(compiled=True))
    assert plain.program.runs == "torch, since aten.erfinv.default is not among the native operations"
    assert quick.program.runs == "compiled, since aten.erfinv.default is not among the native operations"
    for rows in (1, 2, 3, 50):
        torch.testing.assert_close(answer(quick, rows), answer(plain, rows), rtol=1e-4, atol=1e-5)
    weights = {name: value + 0.25 for name, value in plain.program.weights.items()}
    before = answer(quick, 5)
    for one in (plain, quick):
        one.program.moments.switch(one.program.bound(weights), {})
    torch.testing.assert_close(answer(quick, 5), answer(plain, 5), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(answer(quick, 5)["score"], before["score"])
    if torch.cuda.is_available():
        check_gpu(where, load_servable(where, where.parent))
    (where / "variables" / "compiled_cpu.pt2").write_bytes(b"for another machine")
    with pytest.raises(DataError, match=r"compiled_cpu\.pt2"):  # like any damaged file of an export
        load_servable(where, where.parent)


def check_gpu(where, host):
    card = load_servable(where, where.parent, Placement(device="cuda", compiled=True, max_batch_rows=8))
    assert card.program.runs == "compiled on cuda"
    card.warm_up()
    print("graphs of a compiled net:", card.program.moments.net.sizes)
    for rows in (1, 2, 3, 50):
        torch.testing.assert_close(answer(card, rows), answer(host, rows), rtol=1e-4, atol=1e-5)
    weights = {name: value + 0.25 for name, value in host.program.weights.items()}
    for one in (host, card):
        one.program.moments.switch(one.program.bound(weights), {})
    torch.testing.assert_close(answer(card, 5), answer(host, 5), rtol=1e-4, atol=1e-5)


def test_without_a_compiler_the_program_alone_is_written(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(compiled, "compiler", lambda: None)
    with caplog.at_level(logging.WARNING):
        where = export(tmp_path, "not_compiled")
    assert "the net is not compiled because this machine has no C++ compiler" in caplog.text
    servable = load_servable(where, where.parent, Placement(compiled=True))
    assert servable.program.runs.startswith("torch, since")
    assert answer(servable, 3)["score"].shape == (3,)
