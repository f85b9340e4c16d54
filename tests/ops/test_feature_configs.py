"""The configuration's dataclasses: proto bytes both ways."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.ops import FeatureConfig, FeatureConfigs, OutConfig, OutType, PoolingType, SliceConfig, TensorShape
from shoal.ops.layout.plan import plan_of
from shoal.proto import example_pb2 as pb


def test_golden_bytes():
    config = FeatureConfigs(
        feature_configs={"a": FeatureConfig(table="t", slice_dims=[1, 2])},
        out_configs={"v": OutConfig(slice_configs=[SliceConfig("a", 0, 1)], out_type=OutType.NONE, shape=[[-1, 1]])},
    )
    data = (
        b"\x0a\x0c\x0a\x01a\x12\x07\x0a\x01t\x1a\x02\x01\x02"
        b"\x12\x1d\x0a\x01v\x12\x18\x0a\x05\x0a\x01a\x18\x01\x10\x03\x1a\x0d\x0a\x0b" + b"\xff" * 9 + b"\x01\x01"
    )
    assert config.SerializeToString() == data
    assert FeatureConfigs.FromString(data).SerializeToString() == data


def small_config():
    return FeatureConfigs(
        feature_configs={"a": FeatureConfig(table="t", slice_dims=[1, 2])},
        out_configs={"v": OutConfig([SliceConfig("a", 0, 2)], OutType.NONE, [[-1, 2]])},
    )


CHANGES = {
    "a feature's widths": lambda c, spare: c.feature_configs["a"].slice_dims.pop(),
    "a shape": lambda c, spare: c.out_configs["v"].shape.__setitem__(0, [-1, 3]),
    "a size of a shape": lambda c, spare: c.out_configs["v"].shape[0].__setitem__(1, 3),
    "the slices": lambda c, spare: c.out_configs["v"].slice_configs.append(spare),
    "a slice": lambda c, spare: setattr(c.out_configs["v"].slice_configs[0], "end", 9),
    "a feature": lambda c, spare: c.feature_configs.update(a=c.feature_configs.pop("b")),
}


@pytest.mark.parametrize("copied", [False, True], ids=["itself", "a copy"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_inside_a_used_configuration_is_noticed(change, copied):
    config, spare = small_config(), SliceConfig("a", 0, 1)
    config.feature_configs["b"] = FeatureConfig(table="t", slice_dims=[1])
    assert plan_of(config).shapes == ((-1, 2),)
    if copied:
        config = pickle.loads(pickle.dumps(copy.deepcopy(config)))
    CHANGES[change](config, spare)
    with pytest.raises(ValueError, match="layout 'v'"):
        plan_of(config)


def test_lists_may_still_be_filled_after_they_were_given():
    slices, shapes = [], []
    config = FeatureConfigs({"a": FeatureConfig("t", 0, [2])}, {"v": OutConfig(slices, OutType.NONE, shapes)})
    slices.append(SliceConfig("a", 0, 2))
    shapes.append([-1, 2])
    assert plan_of(config).shapes == ((-1, 2),)
    assert config.out_configs["v"].shape == [[-1, 2]]


def test_enum_numbers_are_those_of_the_wire():
    assert {p.name: p.value for p in PoolingType} == {"SUM": 0, "MEAN": 1, "FIRSTN": 3}
    assert {o.name: o.value for o in OutType} == {"CONCAT": 0, "STACK": 1, "ADDN": 2, "NONE": 3}


def test_field_numbers_are_those_of_the_wire():
    numbers = {
        m.name: {f.name: f.number for f in m.fields} for m in (pb.SliceConfig.DESCRIPTOR, pb.OutConfig.DESCRIPTOR)
    }
    assert numbers == {
        "SliceConfig": {
            "feature_name": 1, "start": 2, "end": 3, "feature_idx": 4, "slice_idx": 5, "pooling_type": 10,
            "max_sequence_length": 11,
        },
        "OutConfig": {"slice_configs": 1, "out_type": 2, "shape": 3},
    }  # fmt: skip


INT32 = st.integers(-(2**31), 2**31 - 1)
NAMES = st.text(st.characters(codec="utf-8"), max_size=5)


@given(
    st.builds(
        FeatureConfigs,
        st.dictionaries(
            NAMES,
            st.builds(
                FeatureConfig, NAMES, st.sampled_from(PoolingType) | st.just(2), st.lists(INT32, max_size=3), INT32
            ),
        ),
        st.dictionaries(
            NAMES,
            st.builds(
                OutConfig,
                st.lists(
                    st.builds(SliceConfig, NAMES, INT32, INT32, INT32, INT32, st.sampled_from(PoolingType), INT32)
                ),
                st.sampled_from(OutType),
                st.lists(st.builds(TensorShape, st.lists(INT32, max_size=3))),
            ),
            max_size=3,
        ),
    )
)
def test_bytes_round_trip(config):
    data = config.SerializeToString()
    assert FeatureConfigs.FromString(data) == config
    assert pb.FeatureConfigs.FromString(data).SerializeToString(deterministic=True) == data


def test_broken_bytes_are_refused():
    with pytest.raises(ValueError, match="3 bytes"):
        FeatureConfigs.FromString(b"\x0a\x05a")
