"""The bytes of a checkpoint: against protobuf's own serialization, golden files, and other readers."""

import struct

import cramjam
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import _core
from shoal.errors import DataError
from shoal.table import (
    AdadeltaOptimizer,
    AdagradOptimizer,
    AdaGradWithGroupLassoOptimizer,
    AdamOptimizer,
    AdamWOptimizer,
    AmsgradOptimizer,
    BatchSoftmaxOptimizer,
    CombineAsSegment,
    CuckooEmbeddingHashTableConfig,
    DynamicWdAdagradOptimizer,
    EmbeddingHashTableConfig,
    EntryConfig,
    EntryDump,
    Fp16Compressor,
    Fp32Compressor,
    FtrlOptimizer,
    FTRLWithGroupSparsityOptimizer,
    HashTable,
    HashTableConfigInstance,
    LambOptimizer,
    MomentumOptimizer,
    MovingAverageOptimizer,
    RandomUniformInitializer,
    RmspropOptimizer,
    RmspropV2Optimizer,
    RowwiseAdagradOptimizer,
    SgdOptimizer,
    StochasticRoundingFloat16OptimizerWrapper,
)

OPTIMIZERS = {
    "sgd": SgdOptimizer(),
    "adagrad": AdagradOptimizer(),
    "dynamic_wd_adagrad": DynamicWdAdagradOptimizer(enable_dynamic_wd=False),
    "adadelta": AdadeltaOptimizer(),
    "adam": AdamOptimizer(),
    "amsgrad": AmsgradOptimizer(),
    "momentum": MomentumOptimizer(),
    "moving_average": MovingAverageOptimizer(),
    "rmsprop": RmspropOptimizer(),
    "rmspropv2": RmspropV2Optimizer(),
    "ftrl": FtrlOptimizer(),
    "group_ftrl": FTRLWithGroupSparsityOptimizer(),
    "group_adagrad": AdaGradWithGroupLassoOptimizer(),
    "batch_softmax": BatchSoftmaxOptimizer(),
    "rowwise_adagrad": RowwiseAdagradOptimizer(),
    "adamw": AdamWOptimizer(),
    "lamb": LambOptimizer(),
}


def make_table(*segments, serving=False, skip_zero=False, name="t", **options):
    """A table of (dim, optimizer name) segments."""
    config = EmbeddingHashTableConfig(
        entry_config=EntryConfig(
            segments=[
                CombineAsSegment(
                    dim,
                    RandomUniformInitializer(),
                    OPTIMIZERS[opt] if isinstance(opt, str) else opt,
                    Fp16Compressor() if serving else Fp32Compressor(),
                )
                for dim, opt in segments
            ],
            entry_type=EntryConfig.SERVING if serving else EntryConfig.TRAINING,
        ),
        cuckoo=CuckooEmbeddingHashTableConfig(),
        skip_zero_embedding=skip_zero,
    )
    return HashTable.from_config(HashTableConfigInstance(config, [0.1] * len(segments)), name=name, **options)


def train(table, n=50, steps=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        ids = torch.randint(-40, 40, (n,), generator=generator)
        table.apply_gradients(ids, torch.randn(n, table.dim_size, generator=generator), step, req_time=1000 * step)
    return table


def frames(data):
    """The payloads of a framed stream, checked the way the format's page says."""
    out = []
    while data:
        header, data = data[:12], data[12:]
        (length,) = struct.unpack("<Q", header[:8])
        assert struct.unpack("<I", header[8:])[0] == masked(header[:8])
        payload, data = data[:length], data[length:]
        assert struct.unpack("<I", data[:4])[0] == masked(payload)
        out.append(payload)
        data = data[4:]
    return out


def masked(data):
    crc = slow_crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def slow_crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def write_records(path, payloads):
    with open(path, "wb") as file:
        for payload in payloads:
            header = struct.pack("<Q", len(payload))
            file.write(header + struct.pack("<I", masked(header)) + payload + struct.pack("<I", masked(payload)))
    return path


def all_rows(table):
    """Everything a table holds: id -> its whole EntryDump."""
    rows = {}
    for stripe in range(table._native.num_stripes):
        entries, end = _core.walk_entries(table._native, stripe, 0, 1 << 30)
        assert end == -1
        rows.update({EntryDump.FromString(e).id: e for e in entries})
    return rows


def dims(opt):
    return 1 if opt == "batch_softmax" else 5


def test_crc32c_has_the_published_check_value():
    assert _core.crc32c(b"123456789") == 0xE3069283 == slow_crc32c(b"123456789")


@pytest.mark.parametrize("opt", OPTIMIZERS)
def test_an_entry_has_the_very_bytes_that_protobuf_writes(opt):
    table = train(make_table((dims(opt), opt), (2, "sgd"), (3, "moving_average"), (4, "adagrad")))
    rows = all_rows(table)
    assert len(rows) > 20
    for entry in rows.values():
        message = EntryDump.FromString(entry)
        assert message.SerializeToString() == entry
        assert len(message.num) == table.dim_size
        kinds = [element.WhichOneof("type") for element in message.opt.dump]
        assert kinds == [k for k in (opt, "sgd", "adagrad") if k != "moving_average"]
        for element in message.opt.dump:
            state = getattr(element, element.WhichOneof("type"))
            # every field is written, even zeros
            assert len(state.ListFields()) == len(state.DESCRIPTOR.fields)
        assert message.HasField("id")
        assert message.last_update_ts_sec in (1000, 2000, 3000)


def test_state_lands_in_the_field_of_its_name():
    table = make_table((2, "ftrl"), (1, "adam"))
    table.assign(torch.tensor([3]), torch.tensor([[0.5, -0.25, 0.0]]), req_time=9)
    table.apply_gradients(torch.tensor([3]), torch.tensor([[2.0, -1.0, 2.0]]), 1, req_time=9)
    table.apply_gradients(torch.tensor([3]), torch.tensor([[1.0, 0.5, 1.0]]), 2, req_time=9)
    (entry,) = table.lookup_entry(torch.tensor([3]))
    message = EntryDump.FromString(entry)
    ftrl, adam = message.opt.dump[0].ftrl, message.opt.dump[1].adam
    assert list(ftrl.norm) == pytest.approx([5.1, 1.35])
    assert list(ftrl.zero) == pytest.approx([-6.297532, 1.421103])
    assert [adam.m[0], adam.v[0], adam.beta1_power, adam.beta2_power] == pytest.approx([0.28, 0.0496, 0.729, 0.970299])
    assert not message.HasField("id")
    assert message.last_update_ts_sec == 9


def test_lookup_entry_gives_empty_bytes_for_an_unknown_id():
    table = make_table((2, "sgd")).assign(torch.tensor([1]), torch.ones(1, 2))
    first, missing, again = table.lookup_entry(torch.tensor([1, 2, 1]))
    assert missing == b""
    assert (
        first == again == EntryDump(num=[1, 1], opt={"dump": [{"sgd": {}}]}, last_update_ts_sec=0).SerializeToString()
    )


def test_a_file_is_framed_records_and_nothing_else(tmp_path):
    table = train(make_table((3, "adagrad"), saver_parallel=3))
    table.save(str(tmp_path / "t"))
    files = sorted(p.name for p in tmp_path.iterdir() if p.name != "t.manifest")
    assert files == [f"t-0000{i}-of-00003" for i in range(3)]
    payloads = [p for f in files for p in frames((tmp_path / f).read_bytes())]
    assert sorted(payloads) == sorted(all_rows(table).values())


def test_one_row_is_these_bytes(tmp_path):
    table = make_table((2, "adagrad"))
    table.assign(torch.tensor([258]), torch.tensor([[1.0, -2.0]]), req_time=300)
    table.save(str(tmp_path / "t"))
    payload = bytes.fromhex(
        "09 0201000000000000"  # id
        "15 0000803f 15 000000c0"  # num, unpacked
        "1a 0e 0a 0c 0a 0a 0d cdcccc3d 0d cdcccc3d"  # opt.dump[0].adagrad.norm
        "20 ac02"  # last_update_ts_sec
    )
    header = struct.pack("<Q", len(payload))
    whole = header + struct.pack("<I", masked(header)) + payload + struct.pack("<I", masked(payload))
    assert (tmp_path / "t-00000-of-00001").read_bytes() == whole


@pytest.mark.parametrize("opt", OPTIMIZERS)
def test_a_checkpoint_restores_every_bit_of_a_row(opt, tmp_path):
    segments = [(dims(opt), opt), (2, "adam"), (1, "batch_softmax")]
    table = train(make_table(*segments, saver_parallel=2))
    table.save(str(tmp_path / "t"))
    other = make_table(*segments, name="other")
    other.assign(torch.tensor([12345]), torch.ones(1, other.dim_size))  # not in the checkpoint, so removed afterwards
    other.restore(str(tmp_path / "t"))
    assert all_rows(other) == all_rows(table)
    assert other.max_update_time == 3000
    train(table, seed=1), train(other, seed=1)
    assert all_rows(other) == all_rows(table)


def entry(**changes):
    fields = {
        "id": 7,
        "num": [1.0, 2.0],
        "opt": {"dump": [{"adagrad": {"norm": [3.0, 4.0]}}]},
        "last_update_ts_sec": 5,
    }
    fields.update(changes)
    return EntryDump(**{k: v for k, v in fields.items() if v is not None})


def restore_records(table, tmp_path, *payloads, strict=True):
    write_records(tmp_path / "r-00000-of-00001", payloads)
    return table.restore(str(tmp_path / "r"), strict=strict)


@pytest.mark.parametrize(
    "payload",
    [
        entry().SerializeToString(),
        bytes.fromhex("12080000803f00000040")  # num packed, first
        + bytes.fromhex("1a0e0a0c0a0a0a080000404000008040")  # norm packed
        + bytes.fromhex("2005090700000000000000"),
        bytes.fromhex("150000803f") + entry(num=[2.0]).SerializeToString(),  # num in two places
        entry().SerializeToString() + bytes.fromhex("f201036162639a0e00"),  # fields that we do not know
        entry().SerializeToString() + bytes.fromhex("5b08635c"),  # an unknown group
        entry(id=8).SerializeToString() + bytes.fromhex("090700000000000000"),  # the last id counts
    ],
    ids=["plain", "packed", "split", "unknown", "group", "twice"],
)
def test_what_protobuf_reads_is_read(payload, tmp_path):
    want = EntryDump.FromString(payload)
    assert (want.id, list(want.num), list(want.opt.dump[0].adagrad.norm)) == (7, [1, 2], [3, 4])
    table = make_table((2, "adagrad"))
    restore_records(table, tmp_path, payload)
    assert all_rows(table) == {7: entry().SerializeToString()}


def test_a_oneof_that_comes_twice_keeps_the_last_kind(tmp_path):
    inner = bytes.fromhex("1200") + bytes.fromhex("0a050d00004040") + bytes.fromhex("0a050d00008040")
    payload = entry(opt=None).SerializeToString() + bytes([0x1A, len(inner) + 2, 0x0A, len(inner)]) + inner
    assert list(EntryDump.FromString(payload).opt.dump[0].adagrad.norm) == [3, 4]
    table = make_table((2, "adagrad"))
    restore_records(table, tmp_path, payload)
    assert all_rows(table) == {7: entry().SerializeToString()}


def test_a_record_without_a_time_gets_zero_and_the_max_update_time_never_falls(tmp_path):
    table = make_table((2, "adagrad"))
    table.assign(torch.tensor([1]), torch.ones(1, 2), req_time=50)
    restore_records(table, tmp_path, entry(last_update_ts_sec=None).SerializeToString())
    assert EntryDump.FromString(all_rows(table)[7]).last_update_ts_sec == 0
    assert table.max_update_time == 50


BAD = {
    "few weights": (entry(num=[1.0]), "id 7: segment 0"),
    "many weights": (entry(num=[1.0, 2.0, 3.0]), "id 7: segment 0"),
    "another optimizer": (entry(opt={"dump": [{"sgd": {}}]}), "id 7: segment 0 .adagrad.: .*sgd"),
    "no optimizer": (entry(opt=None), "id 7: segment 0"),
    "an empty element": (entry(opt={"dump": [{}]}), "id 7: segment 0"),
    "short state": (entry(opt={"dump": [{"adagrad": {"norm": [1.0]}}]}), "id 7: segment 0 .adagrad.: its norm has 1"),
    "long state": (entry(opt={"dump": [{"adagrad": {"norm": [1.0] * 3}}]}), "id 7: segment 0"),
    "two states": (entry(opt={"dump": [{"adagrad": {"norm": [1, 2]}}] * 2}), "id 7: segment 0"),
    "a negative time": (entry(last_update_ts_sec=-1), "id 7: last_update_ts_sec"),
    "a late time": (entry(last_update_ts_sec=1 << 32), "id 7: last_update_ts_sec"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_record_that_does_not_fit_names_its_id_and_segment(case, tmp_path):
    record, message = BAD[case]
    table = make_table((2, "adagrad"), name="fits")
    table.assign(torch.tensor([1]), torch.ones(1, 2))
    before = all_rows(table)
    with pytest.raises(DataError, match=f"table 'fits'.*{message}"):
        restore_records(table, tmp_path, entry(id=9).SerializeToString(), record.SerializeToString())
    assert all_rows(table) == before


@pytest.mark.parametrize("case", ["another optimizer", "no optimizer", "an empty element", "short state", "two states"])
def test_not_strict_keeps_the_weights_and_starts_the_state_afresh(case, tmp_path):
    table = make_table((2, "adagrad"))
    restore_records(table, tmp_path, BAD[case][0].SerializeToString(), strict=False)
    fresh = entry(opt={"dump": [{"adagrad": {"norm": [0.1, 0.1]}}]})
    assert all_rows(table) == {7: fresh.SerializeToString()}


def test_not_strict_keeps_the_states_that_fit(tmp_path):
    saved = train(make_table((2, "adagrad"), (2, "adam"), (1, "group_adagrad")))
    saved.save(str(tmp_path / "t"))
    table = make_table((2, "adagrad"), (2, "ftrl"), (1, "group_adagrad"), name="u")
    with pytest.raises(DataError, match=r"segment 1 .ftrl.: the record has the state of adam"):
        table.restore(str(tmp_path / "t"))
    table.restore(str(tmp_path / "t"), strict=False)
    for id, row in all_rows(table).items():
        want, got = EntryDump.FromString(all_rows(saved)[id]), EntryDump.FromString(row)
        assert (want.num, want.opt.dump[0], want.opt.dump[2]) == (got.num, got.opt.dump[0], got.opt.dump[2])
        assert list(got.opt.dump[1].ftrl.norm) == pytest.approx([0.1, 0.1])


def test_a_stateless_table_reads_records_without_any_opt(tmp_path):
    table = make_table((2, "sgd"))
    restore_records(table, tmp_path, entry(opt=None).SerializeToString())
    assert table.lookup(torch.tensor([7])).tolist() == [[1, 2]]


def test_the_wrapper_for_float16_writes_what_its_optimizer_writes():
    table = make_table((2, StochasticRoundingFloat16OptimizerWrapper(AdagradOptimizer())))
    train(table)
    assert {EntryDump.FromString(e).opt.dump[0].WhichOneof("type") for e in all_rows(table).values()} == {"adagrad"}


def test_a_serving_table_keeps_weights_and_times_alone(tmp_path):
    saved = train(make_table((3, "adam"), (2, "sgd")))
    saved.save(str(tmp_path / "t"))
    table = make_table((3, "adam"), (2, "sgd"), serving=True, name="s")
    table.restore(str(tmp_path / "t"))
    ids = torch.tensor(sorted(all_rows(saved)))
    torch.testing.assert_close(table.lookup(ids), saved.lookup(ids).half().float(), rtol=0, atol=0)
    assert table.size() == saved.size()
    assert table.max_update_time == 3000
    assert table.evict(3000) == 0
    with pytest.raises(RuntimeError, match="save is not supported by serving entries"):
        table.save(str(tmp_path / "no"))


def test_a_serving_table_may_skip_zero_vectors(tmp_path):
    zero, tiny = entry(num=[0.0, -0.0]), entry(id=8, num=[1e-20, 0.0])
    table = make_table((2, "adagrad"), serving=True, skip_zero=True)
    restore_records(table, tmp_path, *(e.SerializeToString() for e in (zero, tiny, entry(id=9))))
    assert table.contains(torch.tensor([7, 8, 9])).tolist() == [False, False, True]


@given(st.lists(st.binary(max_size=300), max_size=40), st.booleans())
def test_records_and_blocks_are_what_an_independent_reader_sees(tmp_path_factory, records, snappy):
    path = str(tmp_path_factory.mktemp("r") / "f")
    _core.write_records(path + "-tmp", path, records, snappy)
    with open(path, "rb") as file:
        data = file.read()
    if snappy:
        plain = b""
        while data:
            (length,) = struct.unpack(">I", data[:4])
            plain += bytes(cramjam.snappy.decompress_raw(data[4 : 4 + length]))
            data = data[4 + length :]
        data = plain
    assert frames(data) == records
    assert _core.read_records(path, snappy) == records


@given(st.binary(max_size=3000) | st.integers(0, 70000).map(lambda n: b"abcabcd" * n))
def test_blocks_of_another_snappy_are_read(tmp_path_factory, payload):
    path = tmp_path_factory.mktemp("s") / "f"
    header = struct.pack("<Q", len(payload))
    crc = _core.crc32c(payload)
    mask = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    stream = header + struct.pack("<I", masked(header)) + payload + struct.pack("<I", mask)
    packed = bytes(cramjam.snappy.compress_raw(stream))  # one block of any size
    path.write_bytes(struct.pack(">I", len(packed)) + packed)
    assert _core.read_records(str(path), True) == [payload]
