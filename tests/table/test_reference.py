"""The references against the worked examples: optimizers, quantizers, rounding, tables."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import table
from shoal.table import (
    CombineAsSegment,
    ConstantsInitializer,
    EmbeddingHashTableConfig,
    EntryConfig,
    EntryDump,
    Fp32Compressor,
    HashTableConfigInstance,
    SgdOptimizer,
    ZerosInitializer,
)
from shoal.table.reference import ReferenceTable, reference_optimizer
from shoal.table.reference.quantizers import (
    HashNet,
    encode,
    fixed_r8_codes,
    fixed_r8_values,
    stochastic_round_float16,
)

F = np.float32


def build(kind, **fields):
    config = table.OptimizerConfig()
    message = getattr(config, kind)
    message.SetInParent()
    for name, value in fields.items():
        setattr(message, name, value)
    return reference_optimizer(config)


WD = {"weight_decay_factor": 0.05}
WORKED = [
    ("sgd", {}, (0.3, -0.15), (0.2, -0.2), {}),
    ("adagrad", {}, (0.401227, -0.1546537), (0.3569463, -0.1976869), {"norm": (5.1, 1.35)}),
    ("adagrad", WD, (0.4011975, -0.1545472), (0.3566408, -0.1966435), {"norm": (5.241148, 1.367489)}),
    (
        "dynamic_wd_adagrad",
        {"decouple_weight_decay": True, **WD},
        (0.398727, -0.1534037),
        (0.3524526, -0.1956699),
        {"norm": (5.1, 1.35)},
    ),
    ("dynamic_wd_adagrad", WD, (0.4011975, -0.1545472), (0.3566408, -0.1966435), {"norm": (5.241148, 1.367489)}),
    (
        "adadelta",
        {},
        (0.4687653, -0.2198489),
        (0.448263, -0.239389),
        {"accum": (0.46, 0.115), "accum_update": (0.01298391, 0.012)},
    ),
    ("adadelta", WD, (0.4687559, -0.2198152), (0.4480714, -0.2388466), {"accum": (0.4737989, 0.1161771)}),
    (
        "adam",
        {},
        (0.4047619, -0.1590909),
        (0.3154284, -0.1346187),
        {"m": (0.28, -0.04), "v": (0.0496, 0.0124), "beta1_power": 0.729, "beta2_power": 0.970299},
    ),
    (
        "adam",
        {"use_nesterov": True, **WD},
        (0.3189412, -0.07707866),
        (0.2064441, -0.08451875),
        {"m": (0.2838448, -0.04151041)},
    ),
    ("momentum", {}, (0.3, -0.15), (0.02, -0.11), {"n": (-0.28, 0.04)}),
    (
        "momentum",
        {"use_nesterov": True, **WD},
        (0.11525, -0.057625),
        (-0.2398699, -0.07006504),
        {"n": (-0.2828262, 0.04141313)},
    ),
    ("moving_average", {}, (0.65, -0.325), (0.685, -0.2425), {}),
    ("rmsprop", {}, (0.3774852, -0.1740253), (0.3178987, -0.2113634), {"n": (0.46, 0.115)}),
    ("rmspropv2", {}, (0.4333333, -0.2), (0.4015344, -0.2241268), {"n": (4.6, 1.15)}),
    ("rmspropv2", WD, (0.4330578, -0.1996894), (0.4008884, -0.223267), {"n": (4.734337, 1.162756)}),
    (
        "ftrl",
        {},
        (0.3231401, -0.07927589),
        (0.2788594, -0.122309),
        {"norm": (5.1, 1.35), "zero": (-6.297532, 1.421103)},
    ),
    (
        "ftrl",
        {"beta": 1, "l1_regularization_strength": 0.6, "l2_regularization_strength": 0.2},
        (0.1951852, -0.01118772),
        (0.1646818, -0.03410358),
        {"zero": (-5.998793, 1.344104)},
    ),
    (
        "group_ftrl",
        {"l1_regularization_strength": 0.5, "l2_regularization_strength": 0.2},
        (0.2486279, -0.06969583),
        (0.2182007, -0.09120208),
        {"norm": (5, 1.25), "zero": (-7.586931, 2.082265)},
    ),
    ("group_adagrad", {}, (0.401227, -0.2006135), (0.3569463, -0.2227539), {"grad_square_sum": 5.1}),
    (
        "group_adagrad",
        {"beta": 0.5, "l2_regularization_strength": 0.3, **WD},
        (0.4100494, -0.2050247),
        (0.3642283, -0.2170754),
        {"grad_square_sum": 5.242051},
    ),
]


@pytest.mark.parametrize(("kind", "fields", "first", "second", "state"), WORKED)
def test_optimizer_worked_examples(kind, fields, first, second, state):
    optimizer = build(kind, **fields)
    held = optimizer.init(2)
    w = optimizer.step(held, np.array([0.5, -0.25], F), np.array([2, -1], F), F(0.1))
    assert w.dtype == F
    np.testing.assert_allclose(w, first, rtol=1e-6, atol=1e-6)
    w = optimizer.step(held, w, np.array([1, 0.5], F), F(0.1))
    np.testing.assert_allclose(w, second, rtol=1e-6, atol=1e-6)
    for name, value in state.items():
        np.testing.assert_allclose(held[name], value, rtol=1e-6, atol=1e-6)
    dump = optimizer.dump(held)
    if dump is not None:
        back = optimizer.load(type(dump).FromString(dump.SerializeToString()))
        for name, value in held.items():
            np.testing.assert_array_equal(back[name], value)


def steps(optimizer, w, lr, gradients, global_steps=None):
    state, w, seen = optimizer.init(len(w)), np.array(w, F), []
    for i, g in enumerate(gradients):
        w = optimizer.step(state, w, np.full(len(w), g, F), F(lr), global_steps[i] if global_steps else 0)
        seen.append(float(w[0]))
    return seen


def test_adam_amsgrad_and_batch_softmax_worked_examples():
    gradients = [4, 0.1, 0.1]
    assert steps(build("adam"), [0], 0.1, gradients) == pytest.approx([-0.09756098, -0.164872, -0.2185647], abs=1e-6)
    amsgrad = steps(build("amsgrad"), [0], 0.1, gradients)
    assert amsgrad == pytest.approx([-0.09756098, -0.1645634, -0.2177652], abs=1e-6)
    softmax = steps(build("batch_softmax"), [2], 0.25, [0, 0, 0], [8, 20, 24])
    assert softmax == pytest.approx([3.5, 5.625, 5.21875], abs=1e-6)
    with pytest.raises(ValueError, match="must be >= 0"):
        steps(build("batch_softmax"), [2], 0.25, [0], [-1])


def test_adagrad_leaves_weights_alone_where_norm_is_zero():
    optimizer = build("adagrad", initial_accumulator_value=0)
    assert steps(optimizer, [0.5], 0.1, [0, 0]) == [0.5, 0.5]


@given(
    st.lists(st.floats(-2, 2, width=32).filter(lambda g: abs(g) > 0.01), min_size=1, max_size=5),
    st.floats(0.015625, 1, width=32),
)
def test_adamw_agrees_with_torch(gradients, lr):
    ours = steps(build("adamw", weight_decay_factor=0.1, epsilon=1e-12), [0.5], lr, gradients)
    w = torch.tensor([0.5], requires_grad=True)
    theirs = torch.optim.AdamW([w], lr=lr, weight_decay=0.1, eps=1e-12)
    for value, g in zip(ours, gradients, strict=True):
        w.grad = torch.tensor([g])
        theirs.step()
        assert value == pytest.approx(w.item(), rel=1e-4, abs=1e-4)


def test_rowwise_adagrad_and_lamb_by_hand():
    optimizer = build("rowwise_adagrad", epsilon=0)
    state = optimizer.init(2)
    w = optimizer.step(state, np.array([1, 1], F), np.array([3, 4], F), F(0.5))
    assert state["norm"] == 12.5
    np.testing.assert_allclose(w, 1 - 0.5 * np.array([3, 4]) / 12.5**0.5, rtol=1e-6)
    lamb = build("lamb", epsilon=0)
    w = lamb.step(lamb.init(2), np.array([3, 4], F), np.array([2, -2], F), F(0.1))
    ratio = 5 / 2**0.5  # the first step's direction is the sign
    np.testing.assert_allclose(w, [3 - 0.1 * ratio, 4 + 0.1 * ratio], rtol=1e-5)
    assert steps(build("lamb"), [0.0], 0.1, [0.0]) == [0.0]


def test_dc_worked_example():
    dc = table.DcOptimizer(0.5, SgdOptimizer(), 2)
    state, w, g = dc.init(), torch.tensor([0.5, -0.25]), torch.tensor([2.0, -1.0])
    dc.optimize_with_latest_value(state, w, g, [0.1], torch.tensor([0.3, 0.1]))
    torch.testing.assert_close(w, torch.tensor([0.26, -0.1325]), rtol=1e-6, atol=1e-6)
    assert g.tolist() == [2.0, -1.0]
    assert dc.dump(state).dump[0].WhichOneof("type") == "sgd"


@pytest.mark.parametrize(
    ("optimizer", "error"),
    [
        (table.BatchSoftmaxOptimizer(), ValueError),
        (table.DynamicWdAdagradOptimizer(), NotImplementedError),
        (table.OptimizerConfig(), ValueError),
        (table.OptimizerConfig(dc=table.DcOptimizerConfig()), ValueError),
        (table.AdamOptimizer(beta1=1.0), ValueError),
    ],
)
def test_dc_wraps_only_what_a_segment_could_have(optimizer, error):
    with pytest.raises(error, match="DcOptimizer: "):
        table.DcOptimizer(0.5, optimizer, 2)


def test_dc_forwards_and_dumps_the_wrapped_state():
    dc = table.DcOptimizer(0.5, table.AdagradOptimizer().as_proto(), 2)
    state, w = dc.init(), torch.tensor([0.5, -0.25])
    dc.optimize(state, w, torch.tensor([2.0, -1.0]), torch.tensor([0.1]), global_step=3)
    torch.testing.assert_close(w, torch.tensor([0.401227, -0.1546537]), rtol=1e-6, atol=1e-6)
    assert dc.dump(state).dump[0].adagrad.norm == pytest.approx([4.1, 1.1])
    with pytest.raises(ValueError, match="dc"):
        table.DcOptimizer(0.5, table.OptimizerConfig(dc=table.DcOptimizerConfig()), 2)
    with pytest.raises(ValueError, match="g must be float32 with 2"):
        dc.optimize(state, w, torch.zeros(3), 0.1)


def test_fixed_r8_worked_examples():
    w = np.array([0.3, -0.3, 0.0078, 0.0079, 2.5, -7, np.nan, np.inf, -np.inf], F)
    values = fixed_r8_values(fixed_r8_codes(w, 2.0), 2.0)
    expected = [0.296875, -0.296875, 0, 0.015625, 1.984375, -2.0, 0, 1.984375, -2.0]
    np.testing.assert_array_equal(values, np.array(expected, F))


def test_one_bit_codes_zero_as_minus_one_and_half_overflows_to_infinity():
    one_bit, half = table.OneBitCompressor().as_proto(), table.Fp16Compressor().as_proto()
    assert encode(one_bit, np.array([0, 1e-9, -1], F)).tolist() == [-1, 1, -1]
    assert np.isinf(encode(half, np.array([70000], F)))[0]


def test_hash_net_worked_example():
    net = HashNet(table.FloatCompressorConfig(one_bit={"amplitude": 0.2}).one_bit)
    w = np.array([0.7], F)
    np.testing.assert_allclose(net.value(w), 0.12087356, rtol=1e-6)
    net.advance(601)
    assert net.scale == 1
    net.advance(600)
    np.testing.assert_allclose(net.value(w), 0.17707033, rtol=1e-6)
    np.testing.assert_allclose(net.gradient(w, np.ones(1, F)), 0.08646097, rtol=1e-6)


def test_stochastic_rounding_goes_up_in_proportion_and_only_to_neighbours():
    w = np.full(20000, 0.1, F)
    rounded = stochastic_round_float16(w, np.random.default_rng(7).random(20000, F))
    lo, hi = F(0.099975586), F(0.10003662)
    assert set(np.unique(rounded)) == {lo, hi}
    assert np.mean(rounded == hi) == pytest.approx(0.40, abs=0.02)


@given(st.floats(-1e5, 1e5, width=32), st.floats(0, 0.9375, width=32))
def test_stochastic_rounding_gives_float16_values_next_to_the_weight(w, uniform):
    rounded = stochastic_round_float16(np.array([w], F), np.array([uniform], F))[0]
    assert F(np.float16(rounded)) == rounded
    if abs(w) > 65504:
        assert rounded == np.copysign(65504, w)
    else:
        assert abs(rounded - F(w)) <= max(2.0**-24, abs(w) * 2.0**-10)
        if F(np.float16(w)) == F(w):
            assert rounded == F(w)


# --- tables --------------------------------------------------------------------------------------------------------


def make(*segments, rates=(1.0,), **fields):
    config = EmbeddingHashTableConfig(
        entry_config=EntryConfig(segments=segments), cuckoo=table.CuckooEmbeddingHashTableConfig(), **fields
    )
    return ReferenceTable(HashTableConfigInstance(config, rates))


def test_table_example_a_sgd_with_duplicates():
    t = make(CombineAsSegment(2, ZerosInitializer(), SgdOptimizer(), Fp32Compressor()), rates=[0.5])
    t.assign_add([7, 8], [[1, 2], [3, 4]])
    assert t.lookup([8, 9, 7]).tolist() == [[3, 4], [0, 0], [1, 2]]
    assert t.size() == 2
    t.apply_gradients([7, 7, 9], [[1, 1], [1, 1], [2, 2]], 0)
    assert t.lookup([7, 9]).tolist() == [[0, 1], [-1, -1]]
    assert t.size() == 3


def test_table_example_b_duplicates_are_steps_unless_deduplicated():
    for dedup, weight, norm in ((False, -0.7152685, 5.1), (True, -0.4972452, 9.1)):
        t = make(CombineAsSegment(1, ZerosInitializer(), table.AdagradOptimizer(), Fp32Compressor()), rates=[0.5])
        t.apply_gradients([5, 5], [[2], [1]], 0, enable_dedup=dedup)
        assert t.lookup([5]).item() == pytest.approx(weight, abs=1e-6)
        dump = EntryDump.FromString(t.lookup_entry([5])[0])
        assert dump.opt.dump[0].adagrad.norm[0] == pytest.approx(norm, abs=1e-6)
        assert not dump.HasField("id")


def test_table_example_c_constants():
    t = make(CombineAsSegment(1, ConstantsInitializer(0.25), SgdOptimizer(), Fp32Compressor()))
    assert t.lookup([1]).item() == 0
    assert t.assign_add([1], [[1.0]]).lookup([1]).item() == 1.25
    assert t.apply_gradients([2], [[0.5]], 0).lookup([2]).item() == -0.25
    assert t.reinitialize([1, 3])[1].tolist() == [1, 0]
    assert t.lookup([1, 2, 3]).flatten().tolist() == [0.25, -0.25, 0.25]


def test_table_example_e_stale_rows():
    t = make(
        CombineAsSegment(1, ZerosInitializer(), SgdOptimizer(), Fp32Compressor()),
        slot_expire_time_config=table.SlotExpireTimeConfig(default_expire_time=2),
    )
    for key, now in ((1, 827200), (2, 827201), (3, 1000000)):
        t.assign([key], [[1.0]], now)
    assert [t.stale(key, t.max_update_time) for key in (1, 2, 3)] == [True, False, False]
    assert t.evict(1000000) == 1
    assert t.contains([1, 2, 3]).tolist() == [False, True, True]


def test_two_segments_have_their_own_optimizer_and_rate():
    t = make(
        CombineAsSegment(1, ZerosInitializer(), table.FtrlOptimizer(), Fp32Compressor()),
        CombineAsSegment(2, ZerosInitializer(), table.AdagradOptimizer(), Fp32Compressor()),
        rates=[0.5, 0.05],
    )
    t.apply_gradients([1], [[2, 1, -3]], 0)
    expected = torch.tensor([[-0.4938648, -0.04767313, 0.04972452]])
    torch.testing.assert_close(t.lookup([1]), expected, rtol=1e-6, atol=1e-6)
    back = make(*t.segments, rates=[0.5, 0.05]).restore_dumps(t.save_as_tensor(0, 1, 10, 0)[1])
    assert back.lookup_entry([1]) == t.lookup_entry([1])


def serving(compressor, **fields):
    segment = CombineAsSegment(2, ZerosInitializer(), SgdOptimizer(), compressor)
    entry = EntryConfig(segments=[segment], entry_type=EntryConfig.SERVING)
    config = EmbeddingHashTableConfig(entry_config=entry, cuckoo=table.CuckooEmbeddingHashTableConfig(), **fields)
    return ReferenceTable(HashTableConfigInstance(config, [1.0]))


def test_serving_rows_are_codes():
    t = serving(table.OneBitCompressor())
    t.assign([1], [[0.5, -0.5]]).assign_add([2], [[1.0, 0.0]])
    np.testing.assert_allclose(t.lookup([1, 2]), [[0.05, -0.05], [0.05, -0.05]])
    t.reinitialize([1])
    np.testing.assert_allclose(t.lookup([1]), [[-0.05, -0.05]])
    for call in (lambda: t.apply_gradients([1], [[0, 0]], 0), lambda: t.lookup_entry([1])):
        with pytest.raises(RuntimeError, match="not supported by serving entries"):
            call()


def test_skip_zero_embedding_erases_on_assign_and_not_on_assign_add():
    t = serving(Fp32Compressor(), skip_zero_embedding=True)
    t.assign([1, 2], [[1, 1], [0, 1e-30]])
    assert t.contains([1, 2]).tolist() == [True, False]
    t.assign([1, 3], [[0, 0], [0, 0]]).assign_add([4], [[0, 0]])
    assert t.contains([1, 3, 4]).tolist() == [False, False, True]
