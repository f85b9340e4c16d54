"""The outer update: arithmetic, order, memory, duplicates, ledger, failures."""

import math
import pickle

import pytest
import torch

import shoal
from shoal.errors import ConfigError
from shoal.gather import (
    AlreadyApplied,
    BudgetTooSmall,
    GatherConfig,
    GatherPlan,
    GradientSpec,
    MemoryObject,
    MemoryStore,
    PlanMismatch,
    QuantSpec,
    TilePlan,
    UpdateInterrupted,
    UpdateLedger,
    clip_factors,
    decompress,
    dump_payload,
    gather,
    outer_update,
    pack12,
    run_window,
    tile_plan,
)
from tests.gather.helpers import (
    PRIMARIES,
    QUICK,
    WINDOW,
    model_of,
    payload,
    sgd,
    small_plan,
    small_spec,
    small_store,
)


def gathered(spec, uids=range(5), make=payload, config=QUICK, **kwargs):
    objects = {(WINDOW, uid): MemoryObject(dump_payload(make(spec, uid), **kwargs), uid) for uid in uids}
    return gather(GatherPlan(WINDOW, uids), spec, MemoryStore(objects), config=config)


def dense_reference(spec, payloads, norms, clip="median", reduction="count_mean"):
    """The meaning, one peer after the other, in float32 on dense tensors."""
    out = {}
    for i, param in enumerate(spec.params):
        factors = clip_factors(norms[:, i])[1] if clip == "median" else torch.ones(len(payloads))
        total, count = torch.zeros(param.shape), torch.zeros(param.shape)
        for made, factor in zip(payloads, factors, strict=True):
            ones = {k: v for k, v in made["state_dict"].items() if not k.endswith(("vals", "quant_params"))}
            ones |= {p.name + "vals": torch.ones(*p.grid, p.k) for p in spec.params}
            mask = decompress({"state_dict": ones}, spec)[param.name]
            total += factor * decompress(made, spec)[param.name]
            count += mask
        if reduction == "count_mean":
            out[param.name] = torch.where(count > 0, total / count.clamp(min=1), 0)
        else:
            out[param.name] = total / len(payloads) if reduction == "peer_mean" else total
    return out


def applied(spec, result, shapes=None, dtype=torch.float32, **kwargs):
    """(what SGD of rate 1 subtracted from zeros, report)."""
    model = torch.nn.ParameterDict({p.name: torch.nn.Parameter(torch.zeros(p.shape, dtype=dtype)) for p in spec.params})
    report = outer_update(model, sgd(model), result, spec=spec, **kwargs)
    return {name: -p.detach() for name, p in model.items()}, report


# ---- small pure pieces


def test_lower_median_and_factors():
    m, f = clip_factors(torch.tensor([5.0, 3.0, 10.0]))
    assert float(m) == 5.0
    assert f.tolist() == [1.0, 1.0, 0.5]
    m, f = clip_factors(torch.tensor([4.0, 2.0]))
    assert float(m) == 2.0
    assert f.tolist() == [0.5, 1.0]
    assert f.dtype == torch.float32
    m, f = clip_factors(torch.zeros(3))
    assert f.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("args", "plan"),
    [
        ((8192 * 28672, 2, 57344, 4096, 64, 160, 1 << 30), (469_762_048, 34_816, 17_347, 4)),
        ((8192 * 28672 // 8, 2, 7168, 4096, 64, 160, 256 << 20), (58_720_256, 34_816, 6_023, 2)),
        ((256, 4, 16, 16, 4, 10, 4096), (1024, 256, 12, 2)),
    ],
)
def test_tile_table(args, plan):
    names = ("numel", "itemsize", "chunks", "totalk", "k", "raw_per_chunk", "budget_bytes")
    assert tile_plan(**dict(zip(names, args, strict=True))) == TilePlan(*plan)


def test_budget_that_holds_no_chunk_says_what_it_needs():
    with pytest.raises(BudgetTooSmall) as caught:
        tile_plan(numel=256, itemsize=4, chunks=16, totalk=16, k=4, raw_per_chunk=10, budget_bytes=1279)
    assert caught.value.needed == 1280
    assert isinstance(caught.value, ValueError)
    spec = small_spec()
    result = gathered(spec)
    model = model_of()
    before = [p.detach().clone() for p in model.values()]
    with pytest.raises(BudgetTooSmall) as caught:
        outer_update(model, sgd(model), result, spec=spec, budget_bytes=1000)
    assert all(torch.equal(a, b) for a, b in zip(before, model.values(), strict=True))
    report = outer_update(model, sgd(model), result, spec=spec, budget_bytes=caught.value.needed)
    assert report.peak_bytes <= caught.value.needed
    with pytest.raises(BudgetTooSmall):
        outer_update(model, sgd(model), result, spec=spec, budget_bytes=caught.value.needed - 1)


def test_ledger_state_is_plain():
    ledger = UpdateLedger()
    assert ledger.state_dict() == {"last": None, "step": 0}
    ledger.record(4, "abc")
    other = UpdateLedger()
    other.load_state_dict(ledger.state_dict())
    assert (other.last, other.step) == ((4, "abc"), 1)
    for window in (3, 4):
        with pytest.raises(AlreadyApplied):
            other.check(window)
    other.check(5)
    UpdateLedger(allow_replay=True).check(0)


# ---- arithmetic


def example_payload(i0, v0, i1, v1):
    rows = torch.tensor([i0, i1, [0, 1], [0, 1]])
    vals = torch.tensor([v0, v1, [0.0, 0.0], [0.0, 0.0]]).reshape(2, 2, 2)
    return {"state_dict": {"widxs": pack12(rows), "wvals": vals}, "global_step": 1}


@pytest.mark.parametrize(
    ("reduction", "row"),
    [
        ("count_mean", [7 / 3, 2.0, 0.0, 2 / 3]),
        ("peer_mean", [7 / 3, 2 / 3, 0.0, 2 / 3]),
        ("sum", [7.0, 2.0, 0.0, 2.0]),
    ],
)
def test_worked_example(reduction, row):
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(4, 4))})
    spec = GradientSpec.from_model(model, target_chunk=2, topk=2, quant=None)
    made = {
        3: example_payload([0, 3], [3.0, -4.0], [1, 2], [0.0, 0.0]),
        8: example_payload([0, 1], [1.0, 2.0], [1, 2], [2.0, 0.0]),
        14: example_payload([0, 3], [6.0, 8.0], [1, 3], [0.0, 0.0]),
    }
    result = gathered(spec, made, make=lambda spec, uid: made[uid])
    assert result.norms.reshape(-1).tolist() == [5.0, 3.0, 10.0]
    update, report = applied(spec, result, reduction=reduction)
    wanted = torch.zeros(4, 4)
    wanted[0] = torch.tensor(row)
    assert torch.equal(update["w"], wanted)
    assert report.min_median_norm == report.max_median_norm == 5.0
    assert report.param_norms["w"] == pytest.approx(float(wanted.norm()), rel=1e-6)
    assert report.param_means["w"] == pytest.approx(float(wanted.mean()), rel=1e-6)
    assert report.global_l2_norm == report.param_norms["w"]
    assert report.total_elements == 16
    assert (report.decision, report.applied_params, report.window) == ("APPLY", ["w"], WINDOW)


SHAPES = ((64, 48), (48,), (10,), (), (6, 5, 2), (128, 160), (3, 7))


@pytest.mark.parametrize("quant", [None, QuantSpec(), QuantSpec(64)])
@pytest.mark.parametrize(("target_chunk", "topk"), [(16, 8), (4, 3), (80, 7)])
@pytest.mark.parametrize("clip", ["median", "none"])
def test_update_matches_the_dense_reference(quant, target_chunk, topk, clip):
    spec = GradientSpec.from_model(model_of(SHAPES), target_chunk=target_chunk, topk=topk, quant=quant)
    result = gathered(spec)
    made = [payload(spec, uid) for uid in result.uids]
    for reduction in ("count_mean", "peer_mean", "sum"):
        update, _ = applied(spec, result, clip=clip, reduction=reduction)
        wanted = dense_reference(spec, made, result.norms, clip, reduction)
        for name in wanted:
            assert torch.equal(update[name], wanted[name]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_values_are_added_in_float32(dtype):
    spec = small_spec(quant=None)

    def halved(spec, uid):
        made = payload(spec, uid)
        made["state_dict"] = {k: v.to(dtype) if k.endswith("vals") else v for k, v in made["state_dict"].items()}
        return made

    result = gathered(spec, make=halved)
    update, _ = applied(spec, result)
    wanted = dense_reference(spec, [halved(spec, uid) for uid in result.uids], result.norms)
    assert all(torch.equal(update[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("budget", [1 << 30, 17_000])
def test_half_parameters_get_the_float32_update_rounded_once(dtype, budget):
    spec = small_spec()
    result = gathered(spec, PRIMARIES)
    full, report32 = applied(spec, result)
    half, report16 = applied(spec, result, dtype=dtype, budget_bytes=budget)
    for name in full:
        assert torch.equal(half[name], full[name].to(dtype))
    assert report16.update_hash == report32.update_hash


def test_a_float64_parameter_gets_the_float32_update():
    spec = small_spec()
    result = gathered(spec)
    full, _ = applied(spec, result)
    wide, _ = applied(spec, result, dtype=torch.float64)
    assert all(torch.equal(wide[name], full[name].double()) for name in full)


def test_the_torch_path_for_other_devices_gives_the_same_bits(monkeypatch):
    from shoal.gather.update import accumulate

    spec = GradientSpec.from_model(model_of(SHAPES), target_chunk=16, topk=7)
    result = gathered(spec, PRIMARIES)
    native, report = applied(spec, result, dtype=torch.bfloat16)
    init = accumulate.TileSum.__init__

    def no_native(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.native = False

    monkeypatch.setattr(accumulate.TileSum, "__init__", no_native)
    plain, again = applied(spec, result, dtype=torch.bfloat16)
    assert report.update_hash == again.update_hash
    assert all(torch.equal(native[name], plain[name]) for name in native)


def test_nesterov_steps_one_parameter_at_a_time():
    spec, result = small_spec(), gathered(small_spec())
    model, plain = model_of(), model_of()
    options = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    optimizer, reference = (
        torch.optim.SGD(model.parameters(), **options),
        torch.optim.SGD(plain.parameters(), **options),
    )
    update, _ = applied(spec, result)
    for _ in range(3):
        outer_update(model, optimizer, result, spec=spec)
        for name, p in plain.items():
            p.grad = update[name].clone()
        reference.step()
    for name in model:
        assert torch.equal(model[name], plain[name])
        assert model[name].grad is None


def test_hash_is_of_the_float32_update():
    from hashlib import blake2b

    spec, result = small_spec(), gathered(small_spec())
    update, report = applied(spec, result)
    digest = blake2b(digest_size=32)
    for param in spec.params:
        zeroed = update[param.name] + 0.0  # turns -0.0 into 0.0
        digest.update(param.name.encode() + b"\0" + zeroed.numpy().tobytes())
    assert report.update_hash == digest.hexdigest()


def test_thread_counts_do_not_change_a_bit():
    spec = GradientSpec.from_model(model_of(((512, 768),)), target_chunk=32, topk=32)
    before, seen = (shoal.num_threads(), torch.get_num_threads()), set()
    try:
        for threads in (1, 2):
            shoal.set_num_threads(threads)
            torch.set_num_threads(threads)
            result = gathered(spec, range(9))
            seen.add((applied(spec, result)[1].update_hash, result.hash))
    finally:
        shoal.set_num_threads(before[0])
        torch.set_num_threads(before[1])
    assert len(seen) == 1


# ---- memory


def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def test_memory_does_not_grow_with_peers():
    spec = GradientSpec.from_model(model_of(((1024, 1024),)), target_chunk=32, topk=64)
    budget = 6 << 20
    peaks, grown = {}, {}
    for count in (4, 64):
        result = gathered(spec, range(count), config=GatherConfig(spill="disk"))
        model = model_of(((1024, 1024),))
        optimizer = sgd(model)
        outer_update(model, optimizer, result, spec=spec, budget_bytes=budget)
        before = anonymous_bytes()
        report = outer_update(model, optimizer, result, spec=spec, budget_bytes=budget)
        grown[count] = anonymous_bytes() - before
        peaks[count] = report.peak_bytes
        assert report.peak_bytes <= budget
        assert report.tiles > 1
    assert peaks[64] <= 1.05 * peaks[4]
    assert grown[64] - grown[4] < 0.1 * 60 * spec.payload_bytes


def test_resident_memory_of_a_gather_on_disk_does_not_grow_with_payloads():
    spec = GradientSpec.from_model(model_of(((2048, 1024),)), target_chunk=32, topk=64)
    few = [dump_payload(payload(spec, uid)) for uid in range(4)]
    datas = {uid: few[uid % 4] for uid in range(64)}
    results, anonymous = [], {}
    for count in (4, 64):
        store = MemoryStore({(WINDOW, uid): MemoryObject(datas[uid], uid) for uid in range(count)})
        before = anonymous_bytes()
        results.append(gather(GatherPlan(WINDOW, range(count)), spec, store, config=GatherConfig(spill="disk")))
        anonymous[count] = anonymous_bytes() - before
    assert anonymous[64] - anonymous[4] < 0.1 * 60 * spec.payload_bytes


# ---- duplicates, ledger, failures


def test_a_peer_that_comes_twice_is_applied_once():
    spec, store = small_spec(), small_store()
    clean = gather(small_plan(), spec, store, config=QUICK)
    _, report = applied(spec, clean)
    _, twice = applied(spec, [clean.partial, clean.partial])
    assert twice.update_hash == report.update_hash
    assert twice.duplicates_dropped == len(clean.uids)
    half = [uid for uid in PRIMARIES if uid < 20]
    shared = [
        gather(GatherPlan(WINDOW, uids, time_max=small_plan().time_max_us), spec, store, config=QUICK).partial
        for uids in (half, PRIMARIES[2:])
    ]
    one = gather(GatherPlan(WINDOW, PRIMARIES, time_max=small_plan().time_max_us), spec, store, config=QUICK)
    _, overlapping = applied(spec, shared)
    assert overlapping.update_hash == applied(spec, one)[1].update_hash
    assert overlapping.duplicates_dropped == len(set(shared[0].uids) & set(shared[1].uids)) > 0


def test_a_window_can_be_applied_once():
    spec, result = small_spec(), gathered(small_spec())
    ledger, model = UpdateLedger(), model_of()
    outer_update(model, sgd(model), result, spec=spec, ledger=ledger)
    assert ledger.last == (WINDOW, result.hash)
    assert ledger.step == 1
    after = [p.detach().clone() for p in model.values()]
    with pytest.raises(AlreadyApplied):
        outer_update(model, sgd(model), result, spec=spec, ledger=ledger)
    assert all(torch.equal(a, b) for a, b in zip(after, model.values(), strict=True))
    outer_update(model, sgd(model), gathered(spec, []), spec=spec, ledger=ledger)
    assert ledger.step == 1


def test_a_skip_decision_changes_nothing():
    spec = small_spec()
    result = gathered(spec, config=GatherConfig(min_peers=9))
    ledger, model = UpdateLedger(), model_of()
    before = [p.detach().clone() for p in model.values()]
    report = outer_update(model, sgd(model), result, spec=spec, ledger=ledger)
    assert (report.decision, ledger.step) == ("SKIP", 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.values(), strict=True))


@pytest.mark.parametrize("when", ["before overlap", "after overlap"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_spill_file_damaged_before_the_update_skips_the_window(damage, when, tmp_path, monkeypatch):
    from shoal.gather.protocol import window

    spec, model, ledger = small_spec(), model_of(), UpdateLedger()
    before = [p.detach().clone() for p in model.values()]
    overlap = window.index_overlap

    def meddle(result, **kwargs):
        report = overlap(result, **kwargs) if when == "after overlap" else None
        path = result.payloads[result.uids[2]].path
        if damage == "remove":
            path.unlink()
        elif damage == "truncate":
            path.write_bytes(path.read_bytes()[:100])
        else:
            data = bytearray(path.read_bytes())
            data[-100] ^= 1
            path.write_bytes(data)
        return report or overlap(result, **kwargs)

    monkeypatch.setattr(window, "index_overlap", meddle)
    config = GatherConfig(retry_interval_s=0.02, spill="disk", spill_dir=tmp_path)
    store = small_store()
    report = run_window(model, sgd(model), small_plan(), spec=spec, store=store, config=config, ledger=ledger)
    assert report.decision == "SKIP"
    assert list(report.unready) == list(report.update.unready) == [0]
    assert (ledger.step, store.artifacts, report.artifact_sha256) == (0, {}, None)
    assert all(torch.equal(a, b) for a, b in zip(before, model.values(), strict=True))


@pytest.mark.parametrize("snapshot", [None, "cpu"])
def test_a_read_that_fails_half_way_interrupts_the_update(snapshot, monkeypatch):
    from shoal.gather.payload.payload_ref import PayloadRef

    spec, model = small_spec(), model_of()
    result = gathered(spec, config=GatherConfig(spill="disk"))
    before = [p.detach().clone() for p in model.values()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9)
    calls = 0

    def fail(self):
        nonlocal calls
        calls += 1
        if calls > 8:
            raise OSError("the disk is gone")

    monkeypatch.setattr(PayloadRef, "check_readable", fail)
    with pytest.raises(UpdateInterrupted) as caught:
        outer_update(model, optimizer, result, spec=spec, snapshot=snapshot)
    assert caught.value.applied_params == ["p0"]
    same = [torch.equal(a, b) for a, b in zip(before, model.values(), strict=True)]
    assert same == [snapshot is not None, True, True]
    assert bool(optimizer.state) == (snapshot is None)


class Stubborn(torch.optim.SGD):
    """Steps once, then fails in the middle of its second step."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        super().step(closure)
        if self.steps == 2:
            raise RuntimeError("no")


@pytest.mark.parametrize("snapshot", [None, "cpu"])
def test_a_step_that_fails_interrupts_the_update(snapshot):
    spec, model = small_spec(), model_of()
    result = gathered(spec)
    before = [p.detach().clone() for p in model.values()]
    optimizer, ledger = Stubborn(model.parameters(), lr=0.7, momentum=0.9), UpdateLedger()
    with pytest.raises(UpdateInterrupted) as caught:
        outer_update(model, optimizer, result, spec=spec, snapshot=snapshot, ledger=ledger)
    assert caught.value.applied_params == ["p0"]
    assert (ledger.last, ledger.step) == (None, 0)
    same = [torch.equal(a, b) for a, b in zip(before, model.values(), strict=True)]
    assert same == ([True, True, True] if snapshot else [False, False, True])


def test_a_step_sees_the_gradient_of_one_parameter_only():
    spec, model = small_spec(), model_of()
    extra = torch.nn.Parameter(torch.ones(3))  # in the optimizer, but not in the model
    for p in (*model.values(), extra):
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=1.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad is not None for p in (*model.values(), extra)]))
    outer_update(model, optimizer, gathered(spec), spec=spec)
    assert seen == [[i == j for j in range(4)] for i in range(3)]
    assert torch.equal(extra, torch.ones(3))


@pytest.mark.parametrize("budget", [1 << 30, 16_500])
def test_an_update_that_its_dtype_cannot_hold_is_skipped(budget):
    spec = small_spec(quant=None)

    def large(spec, uid):
        made = payload(spec, uid)
        made["state_dict"]["p1vals"][-1, 0] = 9e3  # the sum of eight is finite in float32, not in float16
        made["state_dict"]["p1idxs"] = payload(spec, 0)["state_dict"]["p1idxs"]
        return made

    result = gathered(spec, range(8), large)
    kwargs = {"reduction": "sum", "clip": "none", "budget_bytes": budget}
    for dtype, skipped in ((torch.float32, []), (torch.bfloat16, []), (torch.float16, ["p1"])):
        update, report = applied(spec, result, dtype=dtype, **kwargs)
        assert report.skipped_params == skipped
        assert report.applied_params == [name for name in update if name not in skipped]
        assert all(torch.isfinite(value).all() for value in update.values())
        assert bool(update["p1"].any()) == (not skipped)


def test_a_hand_made_grid_may_lie_over_any_shape():
    from shoal.gather import ParamSpec

    flat = GradientSpec((ParamSpec("w", (6, 4), (3, 8), 2, "packed12"),))
    turned = GradientSpec((ParamSpec("w", (6, 4), (2, 2, 1, 6), 2, "packed12"),))  # over 2 x 12
    for spec in (flat, turned):
        result = gathered(spec)
        update, _ = applied(spec, result)
        expected = dense_reference(spec, [payload(spec, uid) for uid in range(5)], result.norms)
        assert torch.equal(update["w"], expected["w"])


def test_a_payload_without_a_parameter_is_named(tmp_path):
    from shoal.gather import PartialGatherResult, write_artifact

    spec = small_spec()
    made = payload(spec, 3)
    made["state_dict"] = {k: v for k, v in made["state_dict"].items() if not k.startswith("p1")}
    source = PartialGatherResult(uids=[3], norms=torch.ones(1, 3), payloads={3: made})
    with pytest.raises(ConfigError, match="peer 3's payload has no parameter 'p1'"):
        applied(spec, source)
    with pytest.raises(ConfigError, match="peer 3's payload has no parameter 'p1'"):
        write_artifact(source, tmp_path / "a.pga", spec=spec)


def test_arguments_are_checked():
    spec, model = small_spec(), model_of()
    result = gathered(spec)
    for kwargs in ({"clip": "mean"}, {"reduction": "max"}, {"wave_peers": 0}, {"prefetch": 0}, {"snapshot": "gpu"}):
        with pytest.raises(ConfigError):
            outer_update(model, sgd(model), result, spec=spec, **kwargs)
    with pytest.raises(PlanMismatch):
        outer_update(model, sgd(model), result, spec=small_spec(topk=4))
    other = torch.nn.ParameterDict({"p0": torch.nn.Parameter(torch.zeros(2, 2))})
    with pytest.raises(ConfigError, match="p0"):
        outer_update(other, sgd(other), result, spec=spec)


def test_a_window_needs_no_more_than_its_update():
    spec, ledger = GradientSpec.from_model(model_of(((4, 4),)), target_chunk=2, topk=2), UpdateLedger()
    store = MemoryStore({(WINDOW, uid): MemoryObject(dump_payload(payload(spec, uid)), uid) for uid in range(40)})
    model = model_of(((4, 4),))
    run = lambda budget: run_window(  # noqa: E731
        model, sgd(model), GatherPlan(WINDOW, range(40)), spec=spec, store=store, budget_bytes=budget, ledger=ledger
    )
    with pytest.raises(BudgetTooSmall) as caught:
        run(1)
    assert caught.value.needed == 4 * 16 + 8 * 4 + 12 * 2 + 2 * 4 * 5
    report = run(caught.value.needed)
    assert (report.decision, ledger.step, report.update.peak_bytes) == ("APPLY", 1, caught.value.needed)
    assert report.upload.wait(100)


def test_whole_window_reports_and_metrics():
    spec, model, seen = small_spec(), model_of(), {}
    store = small_store()
    report = run_window(
        model, sgd(model), small_plan(), spec=spec, store=store, config=QUICK,
        sink=lambda name, value, step: seen.__setitem__((name, step), value), scores=dict.fromkeys(PRIMARIES, 0.5),
    )  # fmt: skip
    assert report.decision == "APPLY"
    assert report.upload.wait(100)
    again = pickle.loads(pickle.dumps(report))  # as a rank hands its report to the process that started it
    assert (again.upload.ok, again.result, again.update) == (True, report.result, report.update)
    assert seen["gather/success_rate", WINDOW] == 10 / 12
    assert seen["gather/skipped/too_late", WINDOW] == 1
    assert seen["gather/reserve_used", WINDOW] == 3
    assert seen["overlap/pairs_checked", WINDOW] == 45
    assert seen["update/global_l2_norm", WINDOW] == report.update.global_l2_norm
    assert seen["update/peak_bytes", WINDOW] == report.update.peak_bytes
    assert seen["gather/intended_mean_final", WINDOW] == 0.5
    assert report.record["global"]["artifact_sha256"] == report.artifact_sha256
    assert math.isfinite(report.record["accumulate_s"])
    without = run_window(
        model, sgd(model), small_plan(), spec=spec, store=small_store(), config=QUICK, overlap_threshold=None,
        emit_artifact=False,
    )  # fmt: skip
    assert without.overlap is None
    assert without.artifact_sha256 is None
