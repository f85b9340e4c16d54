"""Configuration: messages, entry classes, learning rates, validation, short optimizer names."""

import pytest
import torch

import shoal
from shoal import table
from shoal.errors import ConfigError
from shoal.table import (
    AdagradOptimizer,
    CombineAsSegment,
    CuckooHashTableConfig,
    EmbeddingHashTableConfig,
    EntryConfig,
    Fp32Compressor,
    HashTableConfigInstance,
    OptimizerConfig,
    PolynomialDecay,
    SgdOptimizer,
    ZerosInitializer,
)
from shoal.table.config import messages
from shoal.table.config.optim import as_row_optimizer
from shoal.table.config.validate import validate_slot_occurrence_threshold_config, validate_table_config


def config(segments=None, **fields):
    if segments is None:
        segments = [CombineAsSegment(4, ZerosInitializer(), SgdOptimizer(), Fp32Compressor())]
    fields.setdefault("cuckoo", table.CuckooEmbeddingHashTableConfig())
    return EmbeddingHashTableConfig(entry_config=EntryConfig(segments=segments), **fields)


DEFAULTS = {  # class -> the fields that are written when it is built without arguments
    "SgdOptimizer": ("sgd", {}),
    "AdagradOptimizer": ("adagrad", {"hessian_compression_times": 1, "warmup_steps": 0, "weight_decay_factor": 0.0}),
    "AdadeltaOptimizer": (
        "adadelta",
        {"weight_decay_factor": 0.0, "averaging_ratio": 0.9, "epsilon": 0.01, "warmup_steps": 0},
    ),
    "AdamOptimizer": (
        "adam",
        {
            "beta1": 0.9,
            "beta2": 0.99,
            "use_beta1_warmup": False,
            "weight_decay_factor": 0.0,
            "use_nesterov": False,
            "epsilon": 0.01,
            "warmup_steps": 0,
        },
    ),
    "AmsgradOptimizer": (
        "amsgrad",
        {
            "beta1": 0.9,
            "beta2": 0.99,
            "weight_decay_factor": 0.0,
            "use_nesterov": False,
            "epsilon": 0.01,
            "warmup_steps": 0,
        },
    ),
    "BatchSoftmaxOptimizer": ("batch_softmax", {}),
    "MomentumOptimizer": (
        "momentum",
        {"weight_decay_factor": 0.0, "use_nesterov": False, "momentum": 0.9, "warmup_steps": 0},
    ),
    "MovingAverageOptimizer": ("moving_average", {"momentum": 0.9}),
    "RmspropOptimizer": ("rmsprop", {"weight_decay_factor": 0.0, "momentum": 0.9}),
    "RmspropV2Optimizer": ("rmspropv2", {"weight_decay_factor": 0.0, "momentum": 0.9}),
    "FtrlOptimizer": ("ftrl", {"warmup_steps": 0}),
    "FTRLWithGroupSparsityOptimizer": ("group_ftrl", {"warmup_steps": 0}),
    "AdaGradWithGroupLassoOptimizer": ("group_adagrad", {"weight_decay_factor": 0.0, "warmup_steps": 0}),
    "DynamicWdAdagradOptimizer": (
        "dynamic_wd_adagrad",
        {
            "hessian_compression_times": 1,
            "warmup_steps": 0,
            "weight_decay_factor": 0.0,
            "decouple_weight_decay": True,
            "enable_dynamic_wd": True,
            "flip_direction": True,
            "dynamic_wd_temperature": 1.0,
        },
    ),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_an_optimizer_class_writes_exactly_its_python_defaults(name):
    kind, written = DEFAULTS[name]
    proto = getattr(table, name)().as_proto()
    assert proto.WhichOneof("type") == kind
    message = getattr(proto, kind)
    assert {field.name for field, _ in message.ListFields()} == set(written)
    for field, value in written.items():
        assert getattr(message, field) == pytest.approx(value)
    assert not proto.HasField("stochastic_rounding_float16")


def test_positional_arguments_follow_the_documented_order():
    ftrl = table.FtrlOptimizer(0.5, 0.2, 1.5, 7, 0.25, 0.75).as_proto().ftrl
    assert (ftrl.learning_rate, ftrl.beta, ftrl.warmup_steps) == (0.5, 1.5, 7)
    assert ftrl.initial_accumulator_value == pytest.approx(0.2)
    assert (ftrl.l1_regularization_strength, ftrl.l2_regularization_strength) == (0.25, 0.75)
    group = table.AdaGradWithGroupLassoOptimizer(0.5, 0.25, 2.0, 3.0, 0.125, 4).as_proto().group_adagrad
    assert (group.learning_rate, group.beta, group.initial_accumulator_value) == (0.5, 0.25, 2.0)
    assert (group.l2_regularization_strength, group.weight_decay_factor, group.warmup_steps) == (3.0, 0.125, 4)


def test_message_defaults_are_those_of_the_formats():
    assert OptimizerConfig().adagrad.initial_accumulator_value == pytest.approx(0.1)
    assert OptimizerConfig().group_ftrl.beta == 1.0
    assert table.FloatCompressorConfig().one_bit.amplitude == pytest.approx(0.1)
    assert table.SlotExpireTimeConfig().default_expire_time == 36500
    assert EmbeddingHashTableConfig().feature_evict_every_n_hours == 240
    assert table.HashTableProto().export_share_embedding == table.HashTableProto.kBoolNone


def test_wrapped_optimizer_keeps_its_message_and_is_flagged():
    inner = AdagradOptimizer(0.5)
    wrapped = table.StochasticRoundingFloat16OptimizerWrapper(inner).as_proto()
    assert wrapped.stochastic_rounding_float16
    assert wrapped.adagrad == inner.as_proto().adagrad
    message = inner.as_proto()
    table.StochasticRoundingFloat16OptimizerWrapper(message).as_proto()
    assert not message.HasField("stochastic_rounding_float16")


def test_compressors_and_initializers_write_their_fields():
    one_bit = table.OneBitCompressor().as_proto().one_bit
    assert one_bit.step_size == 200
    assert one_bit.amplitude == pytest.approx(0.05)
    assert one_bit.HasField("amplitude")
    assert table.FixedR8Compressor(2.0).as_proto().fixed_r8.r == 2.0
    assert table.Fp16Compressor().as_proto().WhichOneof("type") == "fp16"
    assert not table.RandomUniformInitializer().as_proto().random_uniform.HasField("minval")
    assert table.BatchSoftmaxInitializer(3).as_proto().constants.constant == 3.0
    with pytest.raises(ValueError, match="init_step_interval"):
        table.BatchSoftmaxInitializer(0.5)


def test_a_segment_takes_objects_and_messages():
    by_object = CombineAsSegment(3, ZerosInitializer(), SgdOptimizer(0.5), Fp32Compressor())
    by_message = CombineAsSegment(
        3, ZerosInitializer().as_proto(), SgdOptimizer(0.5).as_proto(), Fp32Compressor().as_proto()
    )
    assert by_object.SerializeToString() == by_message.SerializeToString()
    by_choice = CombineAsSegment(
        3,
        table.ZerosInitializerConfig(),
        table.SgdOptimizerConfig(learning_rate=0.5),
        table.FloatCompressorConfig.Fp32(),
    )
    assert by_object == by_choice
    assert not CombineAsSegment(3, ZerosInitializer(), SgdOptimizer(), None).HasField("comp_config")
    with pytest.raises(ValueError, match="compressor must be"):
        CombineAsSegment(3, ZerosInitializer(), SgdOptimizer(), table.SgdOptimizerConfig())
    with pytest.raises(ValueError, match=r"optimizer must be an object of shoal\.table or of type OptimizerConfig"):
        CombineAsSegment(3, ZerosInitializer(), ZerosInitializer(), None)


def test_cuckoo_config_turns_eviction_on_only_with_hours():
    message = EmbeddingHashTableConfig()
    CuckooHashTableConfig(initial_capacity=5).mutate_table(message)
    assert message.initial_capacity == 5
    assert message.HasField("cuckoo")
    assert not message.HasField("enable_feature_eviction")
    CuckooHashTableConfig(feature_evict_every_n_hours=3).mutate_table(message)
    assert message.enable_feature_eviction
    assert message.feature_evict_every_n_hours == 3


def test_learning_rates_are_numbers_schedules_and_callables():
    instance = HashTableConfigInstance(config(), [0.5, PolynomialDecay(0.5, 8, 0.1), lambda: 0.25])
    rates = instance.call_learning_rate_fns(2)
    assert rates.dtype == torch.float32
    torch.testing.assert_close(rates, torch.tensor([0.5, 0.4, 0.25]))
    assert instance.call_learning_rate_fns_fewer_ops() == [0.5, 0.5, 0.25]
    with pytest.raises(ValueError, match="got none"):
        HashTableConfigInstance(config(), []).call_learning_rate_fns()


def test_config_string_is_the_merge_key():
    def key(*rates, dim=4):
        segment = CombineAsSegment(dim, ZerosInitializer(), SgdOptimizer(), Fp32Compressor())
        return str(HashTableConfigInstance(config([segment]), rates))

    assert key(0.5) == key(0.5)
    assert key(0.5) != key(0.25)
    assert key(0.5) != key(0.5, dim=5)
    assert key(PolynomialDecay(0.5, 8)) == key(PolynomialDecay(0.5, 8))
    assert key(PolynomialDecay(0.5, 8)) != key(PolynomialDecay(0.5, 9))
    assert key(lambda: 1.0) != key(lambda: 1.0)
    serialized = config().SerializeToString()
    assert key(0.5, 0.25) == f"TableConfigPB: {serialized}, LearningRateFns: [0.5, 0.25]"


def test_extra_restore_names_are_copied():
    names = ["a"]
    one, two = HashTableConfigInstance(config(), [1.0], names), HashTableConfigInstance(config(), [1.0])
    one.extra_restore_names.append("b")
    two.extra_restore_names.append("c")
    assert names == ["a"]
    assert HashTableConfigInstance(config(), [1.0]).extra_restore_names == []


def test_one_name_in_place_of_a_list_of_restore_names_is_refused():
    with pytest.raises(ConfigError, match="extra_restore_names must be a list of names, got 'old'"):
        HashTableConfigInstance(config(), [1.0], "old")


@pytest.mark.parametrize(
    ("arguments", "step", "rate"),
    [
        ((0.5, 8, 0.1), 0, 0.5),
        ((0.5, 8, 0.1), 2, 0.4),
        ((0.5, 8, 0.1), 20, 0.1),
        ((0.5, 8, 0.1, 2.0), 2, 0.325),
        ((0.5, 8, 0.1, 1.0, True), 10, 0.25),
        ((0.5, 8, 0.1, 1.0, True), 8, 0.1),
        ((0.5, 8, 0.1, 1.0, True), 0, 0.5),
        ((0.02, 5, 0.12), 3, 0.08),
    ],
)
def test_polynomial_decay_worked_examples(arguments, step, rate):
    assert PolynomialDecay(*arguments)(step) == pytest.approx(rate)


def test_a_schedule_without_a_step_reads_the_global_step():
    decay = PolynomialDecay(0.5, 8, 0.1)
    try:
        shoal.table.set_global_step(2)
        assert shoal.table.get_global_step() == 2
        assert decay() == pytest.approx(0.4)
        assert decay(0) == 0.5
    finally:
        shoal.table.set_global_step(0)
    expected = 'LearningRateFunction("PolynomialDecay",Params:cycle=False,decay_steps=8,'
    assert str(decay) == expected + "end_learning_rate=0.1,initial_learning_rate=0.5,name=None,power=1.0)"
    with pytest.raises(ValueError, match="must be >= 0"):
        shoal.table.set_global_step(-1)


def segment(dim=4, optimizer=None, initializer=None, compressor=None):
    return CombineAsSegment(dim, initializer or ZerosInitializer(), optimizer or SgdOptimizer(), compressor)


def serving(*segments, **fields):
    message = config(list(segments), **fields)
    message.entry_config.entry_type = EntryConfig.SERVING
    return message


def unknown_entry_type():
    message = config()
    message.entry_config.entry_type = EntryConfig.UNKNOWN
    return message


BAD = {
    "no kind": (lambda: config(cuckoo=None), "kind"),
    "no segments": (lambda: config([]), "segments"),
    "dim": (lambda: config([segment(0)]), "dim_size"),
    "unknown type": (unknown_entry_type, "entry_type"),
    "no init": (lambda: config([EntryConfig.Segment(dim_size=1, opt_config=SgdOptimizer().as_proto())]), "init_config"),
    "init unset": (lambda: config([segment(initializer=table.InitializerConfig())]), "init_config"),
    "no opt": (
        lambda: config([EntryConfig.Segment(dim_size=1, init_config=ZerosInitializer().as_proto())]),
        "opt_config",
    ),
    "opt unset": (lambda: config([segment(optimizer=OptimizerConfig())]), "opt_config"),
    "serving without compressor": (lambda: serving(segment()), "comp_config"),
    "skip zero in training": (lambda: config(skip_zero_embedding=True), "skip_zero_embedding"),
    "batch softmax": (lambda: config([segment(2, table.BatchSoftmaxOptimizer())]), "dim_size"),
    "dc": (lambda: config([segment(2, OptimizerConfig(dc=table.DcOptimizerConfig()))]), "dc"),
    "nan": (lambda: config([segment(2, table.AdamOptimizer(beta1=float("nan")))]), "beta1"),
    "beta": (lambda: config([segment(2, table.AdamOptimizer(beta1=1.0))]), "beta1"),
    "r": (lambda: config([segment(2, compressor=table.FixedR8Compressor(0.0))]), "fixed_r8.r"),
    "step size": (lambda: config([segment(2, compressor=table.OneBitCompressor(step_size=0))]), "step_size"),
    "slot": (
        lambda: config(
            slot_expire_time_config=table.SlotExpireTimeConfig(slot_expire_times=[{"slot": 32768, "expire_time": 1}])
        ),
        "slot",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_config_is_refused_by_the_name_of_its_field(case):
    build, field = BAD[case]
    with pytest.raises(ValueError, match=field):
        validate_table_config(build())


def test_good_configs_pass_and_the_number_of_rates_is_checked():
    validate_table_config(config(), [1.0])
    validate_table_config(serving(segment(compressor=Fp32Compressor()), skip_zero_embedding=True))
    with pytest.raises(ValueError, match="sizes of learning_rate_fns and segments must be equal"):
        validate_table_config(config(), [1.0, 2.0])
    with pytest.raises(NotImplementedError, match="enable_dynamic_wd"):
        validate_table_config(config([segment(optimizer=table.DynamicWdAdagradOptimizer())]))


def test_a_threshold_override_outside_the_slots_is_refused():
    bad = table.SlotOccurrenceThresholdConfig(slot_occurrence_thresholds=[{"slot": 40000, "occurrence_threshold": 1}])
    with pytest.raises(ValueError, match="40000"):
        validate_slot_occurrence_threshold_config(bad)


SHORT = [
    "Adadelta Adagrad Adam AdamW Amsgrad BatchSoftmax Ftrl GroupAdagrad GroupFtrl Lamb",
    "Momentum MovingAverage RmsProp RmsPropV2 RowwiseAdagrad Sgd",
]


@pytest.mark.parametrize("name", " ".join(SHORT).split())
def test_short_optimizers_become_messages(name):
    optimizer = getattr(shoal, name)(lr=0.25, stochastic_rounding=True)
    proto = optimizer.as_proto()
    message = getattr(proto, proto.WhichOneof("type"))
    if name != "MovingAverage":
        assert message.learning_rate == 0.25
    assert proto.stochastic_rounding_float16
    assert as_row_optimizer(proto.WhichOneof("type"))[0].WhichOneof("type") == proto.WhichOneof("type")


def test_short_optimizers_carry_their_rate_and_check_themselves():
    schedule = PolynomialDecay(0.5, 8)
    assert as_row_optimizer(shoal.Adam(lr=schedule))[1] is schedule
    assert as_row_optimizer(AdagradOptimizer(0.5))[1] == 0.5
    assert as_row_optimizer("sgd", lr=2.0)[1] == 2.0
    assert shoal.Adagrad(lr=0.05, weight_decay=0.5).as_proto().adagrad.weight_decay_factor == 0.5
    assert shoal.AdamW(betas=(0.5, 0.75)).as_proto().adamw.beta2 == 0.75
    with pytest.raises(ConfigError, match=r"Adagrad: lr .* -1"):
        shoal.Adagrad(lr=-1)
    with pytest.raises(ConfigError, match="betas"):
        shoal.Adam(betas=(0.9, 1.5))
    with pytest.raises(ConfigError, match=r"optimizer must be one of .*, got 'adagard'"):
        as_row_optimizer("adagard")


def test_every_public_name_can_be_imported():
    for name in table.__all__:
        assert getattr(table, name) is not None
    assert {name for name in vars(messages) if name[0].isupper()} - {"DESCRIPTOR"} <= set(table.__all__)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = table.nothing_of_the_kind


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"expire_after": 30}, "timedelta or text such as '30d', got 30"),
        ({"expire_after": "3 x"}, "days, weeks or years"),
        ({"optimizer": torch.optim.Adam}, r"use for example shoal\.Adam\(lr=0\.01\)"),
    ],
)
def test_first_mistakes_are_explained(options, text):
    with pytest.raises(ConfigError, match=text):
        shoal.HashTable(4, **options)
