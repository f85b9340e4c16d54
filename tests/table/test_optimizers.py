"""Every native optimizer against its reference: drawn configurations, several steps, odd widths, instruction sets."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import table
from shoal.table import CombineAsSegment, ConstantsInitializer, EntryDump, HashTable, ZerosInitializer
from shoal.testing.tables import OPTIMIZERS, Pair, instance, instances, rows


def close(mine, theirs, what, atol=3e-6):
    np.testing.assert_allclose(mine, theirs, rtol=3e-6, atol=atol, err_msg=what)


def zero_error(dump, weights, rate):
    """What rounding may do to FTRL's ``zero``: it takes ``(sqrt(norm') - sqrt(norm)) / lr * w``, so that a last bit of
    the roots, which a fused multiply-add decides, comes out ``1 / lr`` times as large. Up to eight steps a call."""
    return max(3e-6, 8 * 2.0**-23 * max(dump.norm) ** 0.5 / rate * max(1.0, *map(abs, weights)))


def check_entries(pair, keys):
    """Weights, optimizer states and times of every row agree."""
    for key, entry in zip(keys, pair.ours.lookup_entry(torch.tensor(keys)), strict=True):
        if key not in pair.reference.rows:
            assert entry == b""
            continue
        mine, theirs = EntryDump.FromString(entry), pair.reference.dump(key)
        close(list(mine.num), list(theirs.num), f"weights of {key}")
        assert mine.last_update_ts_sec == theirs.last_update_ts_sec
        assert [d.WhichOneof("type") for d in mine.opt.dump] == [d.WhichOneof("type") for d in theirs.opt.dump]
        slowest = min(pair.reference.config.call_learning_rate_fns_fewer_ops(0))
        for a, b in zip(mine.opt.dump, theirs.opt.dump, strict=True):
            of_a, of_b = getattr(a, a.WhichOneof("type")), getattr(b, b.WhichOneof("type"))
            for field in of_b.DESCRIPTOR.fields:
                x, y = getattr(of_a, field.name), getattr(of_b, field.name)
                atol = zero_error(of_b, theirs.num, slowest) if field.name == "zero" else 3e-6
                close(list(x) if field.is_repeated else x, list(y) if field.is_repeated else y, field.name, atol)


def resync(pair):
    """The reference goes on from the native states, so that rounding does not pile up."""
    entries = dict(
        zip(pair.reference.rows, pair.ours.lookup_entry(torch.tensor(list(pair.reference.rows))), strict=True)
    )
    scales = [net and net.scale for net in pair.reference.hash_nets]
    records = []
    for key, entry in entries.items():
        dump = EntryDump.FromString(entry)
        dump.id = key
        records.append(dump.SerializeToString())
    pair.reference.restore_dumps(records)
    for net, scale in zip(pair.reference.hash_nets, scales, strict=True):
        if net is not None:
            net.scale = scale


def run(config, draw, steps=3):
    pair = Pair.of(config)
    dim = pair.ours.dim_size
    for step in range(steps):
        keys = draw(st.lists(st.integers(-2, 3), min_size=1, max_size=8))
        grads = rows(draw, len(keys), dim)
        dedup = draw(st.booleans())
        before = grads.clone()
        pair.ours.apply_gradients(torch.tensor(keys), grads, step, enable_dedup=dedup, req_time=step)
        assert torch.equal(before, grads)
        pair.reference.apply_gradients(keys, grads, step, enable_dedup=dedup, req_time=step)
        check_entries(pair, [-2, -1, 0, 1, 2, 3])
        every = torch.arange(-2, 4)
        close(pair.ours.lookup(every), pair.reference.lookup(every), "lookup")
        resync(pair)


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@settings(max_examples=settings.default.max_examples // 2)
@given(st.data())
def test_each_optimizer_matches_its_reference(kind, data):
    config = data.draw(instances(max_segments=1, kinds=[kind], compressors=st.none()))
    run(config, data.draw)


@given(st.data())
def test_segments_of_any_kind_side_by_side_match_the_reference(data):
    run(data.draw(instances()), data.draw, steps=3)


def one(optimizer, dim=1, rate=0.1, initializer=None, compressor=None, **fields):
    segment = CombineAsSegment(dim, initializer or ZerosInitializer(), optimizer, compressor)
    return HashTable.from_config(instance([segment], [rate]), name="one", **fields)


def test_adagrad_without_accumulator_leaves_a_zero_gradient_alone():
    t = one(table.AdagradOptimizer(initial_accumulator_value=0.0), 9, initializer=ConstantsInitializer(0.5))
    t.apply_gradients(torch.tensor([1]), torch.zeros(1, 9), 0)
    assert t.lookup(torch.tensor([1])).tolist() == [[0.5] * 9]


@pytest.mark.parametrize("optimizer", [table.FTRLWithGroupSparsityOptimizer(), table.AdaGradWithGroupLassoOptimizer()])
def test_group_optimizers_give_zero_for_a_zero_direction(optimizer):
    t = one(optimizer, 3)
    t.apply_gradients(torch.tensor([1]), torch.zeros(1, 3), 0)
    assert t.lookup(torch.tensor([1])).tolist() == [[0, 0, 0]]


def test_group_ftrl_without_beta_or_accumulator_keeps_untouched_lanes_at_zero():
    t = one(table.FTRLWithGroupSparsityOptimizer(beta=0.0, initial_accumulator_value=0.0), 3)
    t.apply_gradients(torch.tensor([1]), torch.tensor([[0.0, 3.0, 4.0]]), 0)
    torch.testing.assert_close(t.lookup(torch.tensor([1])), torch.tensor([[0.0, -0.1, -0.1]]))


@pytest.mark.parametrize("optimizer", [table.FtrlOptimizer(), table.FTRLWithGroupSparsityOptimizer()])
def test_a_rate_of_zero_leaves_ftrl_rows_alone(optimizer):
    t = one(optimizer, 3, rate=0.0, initializer=ConstantsInitializer(0.5))
    t.apply_gradients(torch.tensor([1]), torch.ones(1, 3), 0)
    assert t.lookup(torch.tensor([1])).tolist() == [[0.5] * 3]


def test_group_adagrad_leaves_weights_alone_when_nothing_was_accumulated():
    t = one(
        table.AdaGradWithGroupLassoOptimizer(initial_accumulator_value=0.0), 3, initializer=ConstantsInitializer(0.5)
    )
    t.apply_gradients(torch.tensor([1]), torch.zeros(1, 3), 0)
    assert t.lookup(torch.tensor([1])).tolist() == [[0.5] * 3]


def test_batch_softmax_refuses_a_negative_step_before_any_change():
    t = one(table.BatchSoftmaxOptimizer())
    with pytest.raises(ValueError, match="global_step"):
        t.apply_gradients(torch.tensor([1]), torch.zeros(1, 1), -1)
    assert t.size() == 0


def test_learning_rates_follow_the_step_of_the_call():
    segment = CombineAsSegment(1, ZerosInitializer(), table.SgdOptimizer())
    t = HashTable.from_config(instance([segment], [table.PolynomialDecay(0.5, 8, 0.1)]), name="decaying")
    t.apply_gradients(torch.tensor([1]), torch.ones(1, 1), 2)
    assert t.lookup(torch.tensor([1])).item() == pytest.approx(-0.4)
    t.apply_gradients(torch.tensor([1]), torch.ones(1, 1), torch.tensor(20))
    assert t.lookup(torch.tensor([1])).item() == pytest.approx(-0.5)


# --- stochastic rounding and random initial weights -------------------------------------------------------------------


def test_stochastic_rounding_lands_on_float16_neighbours_in_proportion():
    wrapped = table.StochasticRoundingFloat16OptimizerWrapper(table.SgdOptimizer())
    t = one(wrapped, 64, rate=1.0, seed=11)
    keys = torch.arange(500)
    t.apply_gradients(keys, torch.full((500, 64), -0.1), 0)
    found = t.lookup(keys).numpy()
    lo, hi = np.float32(0.099975586), np.float32(0.10003662)
    assert set(np.unique(found)) == {lo, hi}
    assert np.mean(found == hi) == pytest.approx(0.40, abs=0.01)
    of_rows = (found == hi).mean(axis=1)
    assert of_rows.std() == pytest.approx((0.4 * 0.6 / 64) ** 0.5, rel=0.2)  # weights are rounded independently
    assert len(np.unique(found, axis=0)) > 490


def test_stochastic_rounding_keeps_what_float16_holds_and_clamps_the_rest():
    wrapped = table.StochasticRoundingFloat16OptimizerWrapper(table.SgdOptimizer())
    t = one(wrapped, 6, rate=1.0)
    t.apply_gradients(torch.tensor([1]), -torch.tensor([[0.5, -65504.0, 1e6, -1e6, 0.0, 2.0**-24]]), 0)
    assert t.lookup(torch.tensor([1])).tolist() == [[0.5, -65504, 65504, -65504, 0, 2.0**-24]]


def test_stochastic_rounding_touches_only_its_own_segment():
    segments = [
        CombineAsSegment(2, ZerosInitializer(), table.StochasticRoundingFloat16OptimizerWrapper(table.SgdOptimizer())),
        CombineAsSegment(2, ZerosInitializer(), table.SgdOptimizer()),
    ]
    t = HashTable.from_config(instance(segments, [1.0, 1.0]), name="two")
    t.apply_gradients(torch.tensor([1]), torch.full((1, 4), -0.1), 0)
    found = t.lookup(torch.tensor([1]))[0]
    assert found[2:].tolist() == torch.full((2,), 0.1).tolist()
    assert found[:2].half().float().tolist() == found[:2].tolist()


def test_uniform_rows_fill_their_range_are_independent_and_follow_the_seed():
    def rows_of(seed):
        t = one(table.SgdOptimizer(), 16, initializer=table.RandomUniformInitializer(-1.0, 3.0), seed=seed)
        t.reinitialize(torch.arange(2000))
        return t.lookup(torch.arange(2000)).numpy()

    drawn = rows_of(5)
    assert drawn.min() >= -1
    assert drawn.max() < 3
    assert drawn.mean() == pytest.approx(1, abs=0.03)
    assert drawn.std() == pytest.approx(4 / 12**0.5, rel=0.02)
    assert len(np.unique(drawn[:, 0])) > 1900
    assert abs(np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]) < 0.08
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.08
    np.testing.assert_array_equal(drawn, rows_of(5))
    assert not np.array_equal(drawn, rows_of(6))


# --- instruction sets -------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from shoal.testing.tables import OPTIMIZERS, instance
from shoal import _core, table
from shoal.table import CombineAsSegment, ConstantsInitializer, HashTable
torch.manual_seed(3)
out = [torch.tensor([{"base": 0.0, "avx2": 1.0, "avx512": 2.0}[_core.isa()]])]
for kind in sorted(OPTIMIZERS):
    dim = 1 if kind == "batch_softmax" else 37
    config = table.OptimizerConfig()
    getattr(config, kind).SetInParent()
    for compressor in (None, table.FixedR8Compressor(2.0), table.OneBitCompressor()):
        segment = CombineAsSegment(dim, ConstantsInitializer(0.3), config, compressor)
        t = HashTable.from_config(instance([segment], [0.1]), name=kind)
        for step in range(5):
            t.apply_gradients(torch.arange(9), torch.randn(9, dim), step)
        out.append(t.lookup(torch.arange(10)).flatten())
print(torch.cat(out).numpy().tobytes().hex())
"""


@pytest.mark.timeout(900)
def test_every_instruction_set_gives_the_same_numbers():
    found = {}
    for isa in ("base", "avx2", "avx512"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | {"SHOAL_ISA": isa},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found[isa] = np.frombuffer(bytes.fromhex(done.stdout.strip()), np.float32)
    assert found["base"][0] == 0
    for isa in ("avx2", "avx512"):
        np.testing.assert_allclose(found[isa][1:], found["base"][1:], rtol=1e-5, atol=1e-6, err_msg=isa)
