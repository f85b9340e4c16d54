"""`shoal plan`: its model against sums made by hand, its measurement, its files, its messages."""

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.errors import ConfigError, DataError
from shoal.plan.advice import changes, recommended
from shoal.plan.config import HostPlan, ModelPlan, Plan, TablePlan, load_plan
from shoal.plan.costs import Costs, load_costs, save_costs
from shoal.plan.model import estimate, estimates, row_bytes, state_bytes
from shoal.plan.steps import LOCAL, SHAPES, WAYS, Timed, explained, loads_of_shape
from shoal.sharded import Plan as Sharding
from shoal.sharded import plan as plan_tables
from shoal.sharded.placement.costs import VERSION
from shoal.sharded.placement.model import Links, local_ns
from shoal.sharded.placement.plan import Placement

COSTS = Costs(
    lookup_fixed=20, lookup_per_dim=0.1, update_fixed=50, update_per_dim=0.5, pool_fixed=30, pool_per_dim=0.3,
    route_fixed=20, route_per_dim=1, row_overhead_bytes=32, dense_gflops=100, dense_update=0.5, step_us=100,
    link_gb_per_s=2, link_latency_us=100, reduce_gb_per_s=1, reduce_latency_us=200, ps_gb_per_s=1.5, ps_latency_us=200,
    machine="paper", measured="2026-11-15",
)  # fmt: skip
TABLE = TablePlan(name="item", dim=16, ids_per_sample=10, ids_per_day=1e6, unique_share=0.5)
PLAN = Plan(tables=(TABLE,), model=ModelPlan(batch=1000, dense_parameters=1e6), host=HostPlan(cores=10))


def test_one_host_is_the_sum_of_its_parts():
    found = estimate(PLAN, COSTS, 1, "all_to_all")
    ids, unique = 10_000, 5_000
    assert found.seconds == pytest.approx(
        {
            "step": 100e-6,
            "pooling": ids * (30 + 0.3 * 16) * 1e-9 / 10,
            "dense": 6e6 * 1000 / (100e9 * 10) + 1e6 * 0.5e-9,
            "table": unique * (20 + 1.6 + 50 + 8) * 1e-9 / 10,
        }
    )
    assert found.step_s == pytest.approx(sum(found.seconds.values()))
    assert found.samples_per_s == pytest.approx(1000 / found.step_s)
    assert (found.network_bytes, found.servers, found.bottleneck) == (0, 0, "dense")
    assert found.memory_bytes == pytest.approx(30e6 * (64 + 64 + 32) + 16e6)


def test_two_hosts_send_half_of_their_rows():
    found = estimate(PLAN, COSTS, 2, "all_to_all")
    rows = 5_000 * 0.5 * (8 + 64 + 64)
    assert found.network_bytes == pytest.approx(rows + 4e6)  # rows and dense gradients
    assert found.seconds["network"] == pytest.approx(rows / 3.125e9)  # 25 Gb/s, below the limit of the software
    slow = estimate(replace(PLAN, host=replace(PLAN.host, cores=1, network_gbps=1000)), COSTS, 2, "all_to_all")
    assert slow.seconds["network"] == pytest.approx(rows / 2e9)  # the software's limit


@pytest.mark.parametrize("step_ms", [3.0, 60.0])
def test_predictions_are_brought_to_steps_of_the_real_model(step_ms):
    plan = replace(PLAN, model=replace(PLAN.model, step_ms=step_ms))
    assert estimate(plan, COSTS, 1, "all_to_all").step_s == pytest.approx(step_ms / 1e3)
    for layout, hosts in (("all_to_all", 4), ("planned", 4), ("parameter_server", 1)):
        before, after = (estimate(one, COSTS, hosts, layout) for one in (PLAN, plan))
        assert (after.step_s > before.step_s) == (step_ms == 60.0)
        assert after.seconds["latency"] == before.seconds["latency"]


def test_servers_hold_the_rows_and_serve_several_workers():
    found = estimate(PLAN, COSTS, 8, "parameter_server")
    assert found.servers == 4
    alone = estimate(PLAN, COSTS, 1, "parameter_server")
    assert found.seconds["table"] == pytest.approx(2 * alone.seconds["table"])
    assert found.memory_bytes == pytest.approx(30e6 * 160 / 4)


@pytest.mark.parametrize("layout", ["all_to_all", "parameter_server"])
def test_more_hosts_never_need_more_memory_and_never_step_faster(layout):
    found = [e for e in estimates(PLAN, COSTS) if e.layout == layout]
    assert [e.hosts for e in found] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    assert all(a.memory_bytes >= b.memory_bytes for a, b in pairwise(found))
    assert all(a.step_s <= b.step_s * 1.001 for a, b in pairwise(found))


def test_state_is_that_of_the_optimizer():
    assert state_bytes("adagrad", 16) == 64
    assert state_bytes("adam", 16) == 136
    assert state_bytes("sgd", 16) == 0
    assert state_bytes("rowwise_adagrad", 16) == 4
    assert row_bytes(TABLE, COSTS) == 64 + 64 + 32


def test_a_row_costs_what_a_table_takes():
    import torch

    import shoal

    n = 200_000
    table = shoal.HashTable(16, name="bytes").assign(torch.arange(n) * 7919, torch.zeros(n, 16))
    assert table._native.bytes() / n == pytest.approx(row_bytes(TABLE, COSTS), rel=0.35)


def test_the_recommendation_fits_and_keeps_up():
    big = replace(PLAN, tables=(replace(TABLE, ids_per_day=1e8),), model=replace(PLAN.model, samples_per_day=1e10))
    found = estimates(big, COSTS)
    start = recommended(found)
    assert start is not None
    assert start.fits
    assert start.days_per_day >= 1
    fewer = [e for e in found if e.hosts + e.servers < start.hosts + start.servers]
    assert not any(e.fits and e.days_per_day >= 1 for e in fewer)
    hopeless = replace(big, tables=(replace(TABLE, ids_per_day=1e13),))
    assert recommended(estimates(hopeless, COSTS)) is None


def test_changes_are_the_model_asked_again():
    at = estimate(PLAN, COSTS, 4, "parameter_server")
    found = {change.what: change for change in changes(PLAN, COSTS, at)}
    faster = replace(PLAN, host=replace(PLAN.host, cores=20))
    assert found["20 cores per host"].samples_per_s == pytest.approx(
        estimate(faster, COSTS, 4, "parameter_server").samples_per_s / at.samples_per_s
    )
    assert found["rows of half the width"].memory < 1
    assert found["twice as many parameter servers"].memory == pytest.approx(0.5)


def test_the_example_is_a_plan_and_prints_and_draws(tmp_path, capsys):
    save_costs(COSTS, tmp_path / "costs.json")
    plan = Path(__file__).parents[2] / "examples" / "plan.toml"
    if not plan.exists():
        pytest.skip("the examples are not beside the tests")
    argv = ["plan", str(plan), "--costs", str(tmp_path / "costs.json")]
    assert main([*argv, "--out", str(tmp_path / "a" / "plan.png")]) == 0
    out = capsys.readouterr().out
    for text in ("all to all", "parameter server", "1,000 + 500", "start with", "bottleneck: ", "paper"):
        assert text in out
    assert (tmp_path / "a" / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["estimates"]) == 33
    assert main([*argv, "--spread", "8", "--save", str(tmp_path / "spread.json")]) == 0
    assert "other ways" in capsys.readouterr().out
    assert Sharding.load(tmp_path / "spread.json").ranks == 8
    assert main([*argv, "--save", str(tmp_path / "spread.json")]) == 2
    assert report["recommended"]["fits"]
    assert report["costs"]["machine"] == "paper"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[table]]\nname = 't'\ndim = 8\nids_per_sample = 1\n", "[[table]] 1: ids_per_day is missing"),
        ("[table]\nname = 't'\n", "with two brackets"),
        ("[modle]\n", "there is no section [modle]"),
        ("[[table]]\nname = 't'\ndim = 0\nids_per_sample = 1\nids_per_day = 1\n", "dim must be at least 1, got 0"),
        ("[[table]]\nname = 't'\ndim = 8.5\nids_per_sample = 1\nids_per_day = 1\n", "dim must be of type int, got 8.5"),
        ("[[table]]\nname = 't'\ndims = 8\n", "has no setting 'dims' (did you mean 'dim'?); it has name, dim"),
        ("[host]\ncores = 4\n", "at least one [[table]]"),
        ("[host]\nhosts = [0]\n", "numbers from 1 to 100000"),
        ("what", "Expected '='"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_file_and_the_reason(tmp_path, capsys, text, words):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_plan(path)
    assert main(["plan", str(path)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert str(path) in err


def test_costs_of_another_file_are_refused(tmp_path, capsys):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DataError, match="shoal plan --measure"):
        load_costs(tmp_path / "x.json")
    values = asdict(COSTS) | {"dense_gflops": "fast"}
    (tmp_path / "x.json").write_text(json.dumps({"version": VERSION, "costs": values}))
    with pytest.raises(DataError, match="dense_gflops is missing or not a number"):
        load_costs(tmp_path / "x.json")
    assert main(["plan"]) == 2
    assert "a plan as TOML or --measure must be given" in capsys.readouterr().err


def test_costs_that_cannot_be_kept_are_refused_before_measuring(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "file" / "costs.json", tmp_path):
        assert main(["plan", "--measure", "--costs", str(where)]) == 2
        err = capsys.readouterr().err
        assert f"--costs {where}" in err
        assert "measuring" not in err


def test_costs_explain_the_steps_that_were_timed():
    """Steps that follow from some costs give these costs back, whatever was assumed before."""
    real = replace(COSTS, route_fixed=110, route_per_dim=2.5, bag_fixed=70, bag_per_dim=3, held_share=1.8, held_us=90,
                   copy_fixed=55, copied_share=1.5, copied_us=80, ranks_us=1300, peer_us=70, group_us=260,
                   table_us=35)  # fmt: skip
    real = replace(real.rows_times(1.5), crowd=0.07)
    timed = []
    for ranks in (1, 2, 4, 8):
        for way in (LOCAL, *WAYS) if ranks > 1 else (LOCAL,):
            for shape in SHAPES:
                distinct = [0.9 * ids * samples for _, ids, samples in shape]
                one = Timed(ranks, way, loads_of_shape(shape, distinct), 0.0)
                timed.append(replace(one, seconds=_step_s(one, real)))
    found = explained(COSTS, timed)
    for one in timed:
        if one.way != LOCAL:
            assert _step_s(one, found) == pytest.approx(one.seconds, rel=0.05), one
    assert found.crowd == pytest.approx(0.07, abs=0.006)
    assert found.rows("update", 16) == pytest.approx(real.rows("update", 16), rel=0.05)
    assert found.ranks_us == pytest.approx(real.ranks_us, rel=0.15)
    over = [one for one in timed if one.way != LOCAL]
    assert explained(COSTS, over[:1]).copied_share == pytest.approx(COSTS.copied_share)  # not measured


def _step_s(one, costs):
    """What a step takes where costs are these; one without exchanges takes 0.2 ms and 0.1 for each width, besides."""
    crowded = costs.beside(one.ranks)
    if one.way == LOCAL:
        rows = 1e-9 * sum(local_ns(load, load.dim, crowded) for load in one.loads)
        return rows + 1e-3 * (1 + costs.crowd * (one.ranks - 1)) * (0.2 + 0.1 * len({load.dim for load in one.loads}))
    placed = tuple(Placement(load=load, way=own) for load, own in zip(one.loads, one.ways(), strict=True))
    return Sharding(tables=placed, ranks=one.ranks, costs=crowded).step.seconds


def test_ranks_on_one_machine_slow_each_other_and_hosts_do_not(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    loads = loads_of_shape(SHAPES[0], [18_000.0])
    near, far = (plan_tables(loads, 8, COSTS, links=links) for links in (None, Links()))
    assert near.step.compute_s == pytest.approx((1 + 7 * COSTS.crowd) * far.edited(**{
        placed.name: placed.way for placed in near.tables}).step.compute_s)  # fmt: skip
    assert near.step.network_s == pytest.approx(far.step.network_s)
    assert near.costs.beside(8) == near.costs  # a second call changes nothing
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert plan_tables(loads, 8, COSTS).costs == COSTS.beside(2)
    with pytest.raises(ConfigError, match="per_machine must be 1 to 8, the number of ranks, got 9"):
        plan_tables(loads, 8, COSTS, per_machine=9)


def test_tables_with_a_budget_have_no_copies_and_no_slices(tmp_path, capsys):
    save_costs(COSTS, tmp_path / "costs.json")
    plan = tmp_path / "plan.toml"
    plan.write_text(
        "[[table]]\nname = 'hour'\ndim = 64\nids_per_sample = 1\nids_per_day = 24\nunique_share = 0.01\nmax_rows = 24\n"
        "[host]\nlatency_us = 5000\n"  # copies need two exchanges, other ways four
    )
    argv = ["plan", str(plan), "--costs", str(tmp_path / "costs.json"), "--spread", "4", "--json"]
    assert main(argv) == 0
    (limited,) = json.loads(capsys.readouterr().out)["tables"]
    assert limited["way"].split(":")[0] in ("row", "table")
    assert "a table with a budget cannot have copies" in limited["why"]
    plan.write_text(plan.read_text().replace("max_rows = 24\n", ""))
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["tables"][0]["way"] == "data"


@pytest.mark.timeout(600)
def test_a_file_of_costs_that_is_not_there_is_measured_and_kept(tmp_path, capsys):
    plan = tmp_path / "plan.toml"
    plan.write_text("[[table]]\nname = 't'\ndim = 8\nids_per_sample = 1\nids_per_day = 1\n")
    kept = tmp_path / "new" / "costs.json"
    argv = ["plan", str(plan), "--json", "--costs", str(kept)]
    assert main(argv) == 0
    said = capsys.readouterr()
    assert f"the costs of this machine are in {kept}" in said.err
    assert main(argv) == 0  # the stored costs are used
    again = capsys.readouterr()
    assert "measuring" not in again.err
    assert json.loads(again.out)["costs"] == json.loads(said.out)["costs"]
    costs = load_costs(kept)
    save_costs(costs, tmp_path / "deep" / "costs.json")
    assert load_costs(tmp_path / "deep" / "costs.json") == costs
    for name, value in asdict(costs).items():
        if isinstance(value, float):
            assert value >= 0, name
    assert 1 < costs.rows("lookup", 16) < 100_000
    assert costs.dense_gflops > 0.1
    assert costs.link_gb_per_s > 0.001
