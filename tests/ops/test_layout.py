"""`fused_embedding_to_layout`: all versions, poolings and layout types, gradients, errors, threads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.nn import FirstN, ReduceMean, ReduceSum
from shoal.ops import (
    FeatureConfig,
    FeatureConfigs,
    OutConfig,
    OutType,
    PoolingType,
    Ragged,
    SliceConfig,
    TensorShape,
    flatten_layout,
    fused_embedding_to_layout,
    fused_embedding_to_layout_grad,
    nest_layout,
    sharding_sparse_fids,
)
from shoal.ops.layout import op as layout_op

VERSIONS = (1, 2, 3, 4, 5)


def packed(pairs):
    return torch.tensor([((a + 2**31) % 2**32 - 2**31) << 32 | b for a, b in pairs], dtype=torch.int64)


def worked_config():
    return FeatureConfigs(
        feature_configs={
            "a": FeatureConfig(table="t0", slice_dims=[1, 2], pooling_type=PoolingType.SUM),
            "b": FeatureConfig(table="t0", slice_dims=[1, 2], pooling_type=PoolingType.MEAN),
            "c": FeatureConfig(table="t1", slice_dims=[2], pooling_type=3, max_sequence_length=2),
        },
        out_configs={
            "vec": OutConfig(slice_configs=[SliceConfig("a", 1, 3), SliceConfig("b", 1, 3)], shape=[[-1, 4]]),
            "bias": OutConfig(
                slice_configs=[SliceConfig("a", 0, 1), SliceConfig("b", 0, 1)],
                out_type=OutType.ADDN,
                shape=[TensorShape(dims=[-1, 1])],
            ),
            "seq": OutConfig(slice_configs=[SliceConfig("c", 0, 2)], out_type=OutType.NONE, shape=[[-1, 2, 2]]),
        },
    )


BUFFERS = [[1, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 60], [3.5, 4.5], [1.5, 2.5, 5.5, 6.5, 7.5, 8.5]]
FIDS = {
    1: packed([(0, 0), (1, 0), (0, 0), (1, 1), (0, 1), (3, 0), (2, 0), (3, 1), (3, 2)]),
    2: packed([(0, 0), (2, 0), (0, 0), (3, 0), (1, 0), (5, 0), (4, 0), (5, 1), (5, 2)]),
    3: torch.tensor([0, 4294967296, 0, 4294967299, 3, 12884901888, 8589934592, 12884901890, 12884901892]),
}
NFL = [0, 2147483650, 3, 6]
ROWS = torch.tensor([0, 2, 3, 5, 6, 9], dtype=torch.int32)


def worked_inputs(version, dtype=torch.float32):
    """(embeddings, keyword arguments) of the worked example."""
    flat = [torch.tensor(b, dtype=dtype) for b in BUFFERS]
    more = {}
    if version == 1:
        flat = [b.view(-1, w) for b, w in zip(flat, (3, 3, 2, 2), strict=True)]
    if version == 4:
        flat = [torch.cat([flat[0], flat[2], flat[1], flat[3]])]
        more = {"fid_list_emb_row_lenth": torch.tensor([6, 2, 6, 6], dtype=torch.int32)}
    if version == 5:
        more = {"nfl_size": [4], "feature_size": [6], "fid_size": [9], "emb_size": [6, 6, 2, 6]}
    more["fid_list_row_split"] = [[0, 1, 2], [0, 1, 2], [0, 1], [0, 3]] if version == 2 else None
    return flat, {
        "fid_offset": FIDS[min(version, 3)],
        "feature_offset": ROWS,
        "nfl_offset": NFL,
        "version": version,
        **more,
    }


def run_worked(inputs_of, embeddings=None, config=None, **changes):
    flat, more = worked_inputs(inputs_of)
    more = more | changes
    splits = more.pop("fid_list_row_split")
    return fused_embedding_to_layout(
        embeddings if embeddings is not None else flat, splits,
        more.pop("fid_offset"), more.pop("feature_offset"), more.pop("nfl_offset"), more.pop("batch_size", [2]),
        more.pop("variant_type", "example"), config or worked_config(), more.pop("ps_num", 2), **more,
    )  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_worked_example(version, threads):
    embeddings = [e.requires_grad_() for e in worked_inputs(version)[0]]
    outs = run_worked(version, embeddings)
    assert [o.tolist() for o in outs] == [
        [[33], [23]],
        [[[1.5, 2.5], [0, 0]], [[3.5, 4.5], [5.5, 6.5]]],
        [[22, 33, 27.5, 33], [2, 3, 27.5, 33]],
    ]
    sum(o.sum() for o in outs).backward()
    got = torch.cat([e.grad.flatten() for e in embeddings]).tolist()
    if version == 4:
        assert got == [2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]
    else:
        assert got == [2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]
        assert [e.grad.shape for e in embeddings] == [e.shape for e in embeddings]


@pytest.mark.parametrize("version", VERSIONS)
def test_explicit_gradient_with_scale(version):
    flat, more = worked_inputs(version)
    outs = run_worked(version)
    splits = more.pop("fid_list_row_split")
    grads = fused_embedding_to_layout_grad(
        more.pop("nfl_offset"), more.pop("feature_offset"), more.pop("fid_offset"), 2, flat, splits,
        [torch.ones_like(o) for o in outs], "instance", worked_config(), 2,
        layout_tensors_grad_scale=torch.tensor(0.5), **more,
    )  # fmt: skip
    got = torch.cat([g.flatten() for g in grads]).tolist()
    assert got == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5] + [0.5] * 10 + [0, 0]
    if version == 5:  # without sizes it is a single request
        again = fused_embedding_to_layout_grad(
            NFL,
            ROWS,
            FIDS[3],
            2,
            flat,
            None,
            [torch.ones_like(o) for o in outs],
            "instance",
            worked_config(),
            2,
            version=5,
        )
        assert torch.cat([g.flatten() for g in again]).tolist() == [2 * x for x in got]


def two_requests():
    config = FeatureConfigs(
        {"f": FeatureConfig(table="t", slice_dims=[1])}, {"o": OutConfig([SliceConfig("f", 0, 1)], shape=[[-1, 1]])}
    )
    sizes = {"nfl_size": [2, 2], "feature_size": [2, 3], "fid_size": [1, 3], "emb_size": [1, 2]}
    return config, sizes


def test_two_requests():
    config, sizes = two_requests()
    embeddings = torch.tensor([5.0, 5, 7], requires_grad=True)
    (out,) = fused_embedding_to_layout(
        [embeddings],
        None,
        [0, 0, 1, 0],
        [0, 1, 0, 1, 3],
        [0, 2, 0, 3],
        [1, 2],
        "example",
        config,
        1,
        version=5,
        **sizes,
    )
    assert out.tolist() == [[5], [5], [12]]
    out.sum().backward()
    assert embeddings.grad.tolist() == [1, 2, 1]
    (grad,) = fused_embedding_to_layout_grad(
        [0, 2, 0, 3], [0, 1, 0, 1, 3], [0, 0, 1, 0], [1, 2], [embeddings], None, [torch.ones(3, 1)], "example", config,
        1, version=5, **sizes,
    )  # fmt: skip
    assert grad.tolist() == [1, 2, 1]


def test_firstn_is_placed_by_the_layout_table():
    def config(out_type, names, shapes):
        widths = {"p": 2, "q": 2, "r": 1}
        return FeatureConfigs(
            {n: FeatureConfig("t", PoolingType.FIRSTN, [w], 2) for n, w in widths.items()},
            {"x": OutConfig([SliceConfig(n, 0, widths[n]) for n in names], out_type, shapes)},
        )

    buffer = [torch.tensor([1.0, 2, 3, 4, 5, 6, 9])]
    more = (None, [0, 2, 4, 6], [0, 2, 3, 4], [0, 1, 2, 3], 1, "example")

    def run(*args):
        return [o.tolist() for o in fused_embedding_to_layout(buffer, *more, config(*args), 1)]

    assert run(OutType.CONCAT, "pr", [[-1, 2, 3]]) == [[[[1, 2, 9], [3, 4, 0]]]]
    assert run(OutType.STACK, "pq", [[-1, 2, 2, 2]]) == [[[[[1, 2], [3, 4]], [[5, 6], [0, 0]]]]]
    assert run(OutType.NONE, "pqr", [[-1, 2, 2], [-1, 2, 2], [-1, 2, 1]]) == [
        [[[1, 2], [3, 4]]], [[[5, 6], [0, 0]]], [[[9], [0]]],
    ]  # fmt: skip
    # A longer sequence axis than max_sequence_length is zero padded.
    assert run(OutType.STACK, "pq", [[-1, 2, 3, 2]]) == [[[[[1, 2], [3, 4], [0, 0]], [[5, 6], [0, 0], [0, 0]]]]]


# -- random batches through the producer, against plain Python ------------------------------------------------------

POOLINGS = (PoolingType.SUM, PoolingType.MEAN, PoolingType.FIRSTN)


@st.composite
def batches(draw):
    """(config, ids per feature: B lists, or one list if shared, batch size)."""
    batch = draw(st.integers(1, 4))
    names = draw(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=5, unique=True))
    features, ids = {}, {}
    for name in names:
        dims = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        pooling = draw(st.sampled_from(POOLINGS))
        features[name] = FeatureConfig(draw(st.sampled_from(["t0", "t1"])), pooling, dims, draw(st.integers(1, 3)))
        row = st.lists(st.integers(0, 12), max_size=4)
        kind = draw(st.sampled_from(["own", "own", "shared", "absent"]))
        if kind == "own":
            ids[name] = draw(st.lists(row, min_size=batch, max_size=batch))
        elif kind == "shared":
            ids[name] = torch.tensor(draw(row), dtype=torch.int64)
    outs = {}
    for i in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(list(OutType)))
        firstn = draw(st.booleans()) and kind != OutType.ADDN
        pool = [n for n in names if (features[n].pooling_type == PoolingType.FIRSTN) == firstn]
        if not pool:
            continue
        chosen = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
        width = draw(st.integers(1, min(sum(features[n].slice_dims) for n in chosen)))
        slices = []
        for n in chosen:
            total = sum(features[n].slice_dims)
            start = draw(st.integers(0, total - width))
            end = start + width if kind in (OutType.STACK, OutType.ADDN) else draw(st.integers(start + 1, total))
            slices.append(SliceConfig(n, start, end))
        length = [max(features[n].max_sequence_length for n in chosen) + draw(st.integers(0, 1))] if firstn else []
        w = [s.end - s.start for s in slices]
        if kind == OutType.NONE:
            shapes = [[-1, *length, x] for x in w]
        else:
            middle = [len(slices)] if kind == OutType.STACK else []
            shapes = [[-1, *middle, *length, sum(w) if kind == OutType.CONCAT else w[0]]]
        outs[f"out{i}"] = OutConfig(slices, kind, shapes)
    return FeatureConfigs(features, outs), ids, batch


def vector(config, table, name, fid):
    width = sum(config.feature_configs[name].slice_dims)
    return [0.5 * fid + 10 * c + (1 if table == "t1" else 0) + ord(name[-1]) for c in range(width)]


def expected(config, ids, batch):
    """The layouts by definition, in Python floats; also the number of times each (feature, fid) column was used."""
    outs = []
    for name in sorted(config.out_configs):
        out = config.out_configs[name]
        tensors = [torch.zeros([batch, *s[1:]], dtype=torch.float64) for s in out.shape]
        column = 0
        for i, s in enumerate(out.slice_configs):
            feature = config.feature_configs[s.feature_name]
            target = tensors[i if out.out_type == OutType.NONE else 0]
            w = s.end - s.start
            for b in range(batch):
                rows = ids.get(s.feature_name, [[]] * batch)
                row = rows.tolist() if isinstance(rows, torch.Tensor) else rows[b]
                vectors = [vector(config, feature.table, s.feature_name, f)[s.start : s.end] for f in row]
                place = target[b]
                if out.out_type == OutType.STACK:
                    place = place[i]
                if out.out_type == OutType.CONCAT:
                    place = place[..., column : column + w]
                for t, v in enumerate(vectors):
                    v = torch.tensor(v, dtype=torch.float64)
                    if feature.pooling_type == PoolingType.FIRSTN:
                        if t < feature.max_sequence_length:
                            place[t] += v
                    else:
                        place += v / len(row) if feature.pooling_type == PoolingType.MEAN else v
            column += w
        outs += tensors
    return outs


def buffers(config, sharded, dtype=torch.float64):
    """Flat embeddings per list, as a parameter server would answer."""
    out = []
    for name, ids in sharded.shards.items():
        table = name.rpartition(":")[0]
        features = sorted(f for f, c in config.feature_configs.items() if c.table == table)
        splits = sharded.shards_row_split[name].tolist()
        values = []
        for j, f in enumerate(features):
            for fid in ids[splits[j] : splits[j + 1]].tolist():
                values += vector(config, table, f, fid)
        out.append(torch.tensor(values, dtype=dtype))
    return out


def run_version(config, ids, shards, unique, version, embeddings=None):
    sharded = sharding_sparse_fids(ids, shards, config, unique, "example_batch", version=version)
    flat = buffers(config, sharded) if embeddings is None else embeddings
    tables = len({c.table for c in config.feature_configs.values()})
    more = {}
    if version == 4:
        order = [t * shards + p for p in range(shards) for t in range(tables)]
        more["fid_list_emb_row_lenth"] = torch.tensor([flat[i].numel() for i in order])
        leaves = flat
        flat = [torch.cat([flat[i] for i in order])]
    if version == 5:
        more = {k: getattr(sharded, k) for k in ("nfl_size", "feature_size", "fid_size", "emb_size")}
    splits = list(sharded.shards_row_split.values()) if version == 2 else None
    leaves = [e.requires_grad_() for e in flat]
    outs = fused_embedding_to_layout(
        leaves, splits, sharded.fid_offset, sharded.feature_offset, sharded.nfl_offset, sharded.batch_size,
        "example_batch", config, shards, version=version, **more,
    )  # fmt: skip
    return outs, leaves, sharded


def _here(sharded):
    """The offsets where tensors are made now."""
    device = torch.get_default_device()
    return [t.to(device) for t in (sharded.fid_offset, sharded.feature_offset, sharded.nfl_offset)]


@given(batches(), st.integers(1, 3), st.booleans())
def test_random_layouts_equal_their_definition_in_every_version(drawn, shards, unique):
    config, ids, batch = drawn
    ids = ids | {"ignored": [[1]] * batch}
    want = expected(config, ids, batch)
    upstream = [torch.randn_like(w) for w in want]
    flat_grad = None
    for version in (2, 3, 4, 5):
        outs, leaves, sharded = run_version(config, ids, shards, unique, version)
        for out, w in zip(outs, want, strict=True):
            torch.testing.assert_close(out, w)
        if not any(o.requires_grad for o in outs):
            continue
        grads = torch.autograd.grad(outs, leaves, upstream)
        if version == 3:
            flat_grad = grads
            arguments = layout_op._arguments(
                "x", leaves, None, *_here(sharded), sharded.batch_size,
                "example", config, shards, None, (None,) * 4, 3,
            )  # fmt: skip
            for out, w in zip(layout_op._layout_reference(*arguments), want, strict=True):
                torch.testing.assert_close(out, w)
            plain = layout_op._layout_grad_reference(upstream, 1.0, *arguments)
            for g, w in zip(grads, plain, strict=True):
                torch.testing.assert_close(g, w)
        elif version != 4 and flat_grad is not None:
            for g, w in zip(grads, flat_grad, strict=True):
                if g.is_cuda:  # sums by atomics
                    torch.testing.assert_close(g, w)
                else:
                    assert torch.equal(g, w)
        elif version == 4 and flat_grad is not None:
            torch.testing.assert_close(grads[0].sum(), sum(g.sum() for g in flat_grad))


@given(batches())
@settings(max_examples=15)
def test_gradcheck_of_random_layouts(drawn):
    config, ids, batch = drawn
    ids = ids | {"ignored": [[1]] * batch}
    sharded = sharding_sparse_fids(ids, 2, config, True, "example_batch")
    leaves = [b.requires_grad_() for b in buffers(config, sharded)]
    if not config.out_configs or not any(b.numel() for b in leaves):
        return
    assert torch.autograd.gradcheck(
        lambda *e: fused_embedding_to_layout(
            list(e), None, sharded.fid_offset, sharded.feature_offset, sharded.nfl_offset, sharded.batch_size,
            "example", config, 2,
        ),
        leaves,
    )  # fmt: skip


def test_combiners_are_the_layouts_of_type_none():
    rows = [[3, 5, 3], [], [7]]
    key = Ragged.from_lists(rows)
    poolings = {
        "f": (FirstN(2), PoolingType.FIRSTN),
        "m": (ReduceMean(), PoolingType.MEAN),
        "s": (ReduceSum(), PoolingType.SUM),
    }
    config = FeatureConfigs(
        {n: FeatureConfig("t", p, [2], c.max_seq_length) for n, (c, p) in poolings.items()},
        {n: OutConfig([SliceConfig(n, 0, 2)], OutType.NONE, [[-1, 2, 2] if n == "f" else [-1, 2]]) for n in poolings},
    )
    outs, _, _ = run_version(config, dict.fromkeys(poolings, rows), 2, True, 3)
    for out, (name, (combiner, _)) in zip(outs, sorted(poolings.items()), strict=True):
        table = torch.tensor([vector(config, "t", name, f) for f in key.values.tolist()], dtype=torch.float64)
        torch.testing.assert_close(out, combiner.combine(key, table))


# -- offsets by hand -------------------------------------------------------------------------------------------------


def test_trailing_entries_may_be_missing_and_may_count_the_trailing_row():
    want = [o.tolist() for o in run_worked(3)]
    for nfl, rows in (
        (NFL, ROWS),
        (NFL[:3], ROWS),
        ([*NFL[:3], 5], ROWS),
        (NFL[:3], ROWS[:-1]),
        ([*NFL[:3], 5], ROWS[:-1]),
    ):
        assert [o.tolist() for o in run_worked(3, nfl_offset=nfl, feature_offset=rows)] == want
    with pytest.raises(ValueError, match="past the 5 entries of feature_offset"):
        run_worked(3, nfl_offset=NFL, feature_offset=ROWS[:-1])


def test_offsets_come_in_all_integer_types():
    want = [o.tolist() for o in run_worked(3)]
    signed = torch.tensor([0, -(2**31) + 2, 3, 6], dtype=torch.int32)
    for nfl in (signed, torch.tensor(NFL), torch.tensor(NFL).to(torch.uint32)):
        assert [o.tolist() for o in run_worked(3, nfl_offset=nfl)] == want
    assert [o.tolist() for o in run_worked(3, fid_offset=FIDS[3].view(torch.uint64))] == want
    assert [o.tolist() for o in run_worked(3, feature_offset=ROWS.long(), batch_size=torch.tensor(2))] == want


def test_an_absent_feature_leaves_zeros():
    outs = run_worked(
        3, nfl_offset=[0, 2, 2, 5], feature_offset=[0, 2, 3, 4, 7], fid_offset=FIDS[3][[0, 1, 2, 5, 6, 7, 8]]
    )
    assert outs[0].tolist() == [[11], [1]]
    assert outs[2][:, 2:].abs().sum() == 0


def test_a_literal_first_size_pads_with_zeros_and_never_cuts():
    config = worked_config()
    config.out_configs["vec"].shape = [[3, 4]]
    assert run_worked(3, config=config)[2].tolist() == [[22, 33, 27.5, 33], [2, 3, 27.5, 33], [0] * 4]
    config.out_configs["vec"].shape = [[1, 4]]
    with pytest.raises(ValueError, match="at least 2 rows"):
        run_worked(3, config=config)


def test_a_changed_configuration_is_noticed():
    config = worked_config()
    run_worked(3, config=config)
    config.feature_configs["a"].pooling_type = PoolingType.MEAN
    assert run_worked(3, config=config)[2][0, :2].tolist() == [11, 16.5]
    del config.out_configs["vec"]
    assert len(run_worked(3, config=config)) == 2


def test_a_batch_of_nothing():
    outs = run_worked(3, nfl_offset=[0, 0, 0, 1], feature_offset=[0], fid_offset=[], batch_size=0)
    assert [o.shape for o in outs] == [(0, 1), (0, 2, 2), (0, 4)]


def test_configuration_as_bytes_or_message():
    from shoal.proto import example_pb2

    want = [o.tolist() for o in run_worked(3)]
    data = worked_config().SerializeToString()
    assert [o.tolist() for o in run_worked(3, config=data)] == want
    assert [o.tolist() for o in run_worked(3, config=example_pb2.FeatureConfigs.FromString(data))] == want


def test_non_contiguous_embeddings_and_gradients():
    flat = [torch.stack([b, b], 1)[:, 0].requires_grad_() for b in worked_inputs(3)[0]]
    outs = run_worked(3, flat)
    want = run_worked(3)
    for out, w in zip(outs, want, strict=True):
        assert torch.equal(out, w)
    grads = torch.autograd.grad(outs, flat, [torch.ones(1).expand_as(o) for o in outs])
    assert torch.cat(grads).tolist()[:3] == [2, 2, 2]


def test_overlapping_slices_accumulate_their_gradients():
    config = FeatureConfigs(
        {"f": FeatureConfig("t", 0, [3])},
        {"x": OutConfig([SliceConfig("f", 0, 2), SliceConfig("f", 1, 3), SliceConfig("f", 0, 2)], 0, [[-1, 6]])},
    )
    table = torch.zeros(1, 3, requires_grad=True)
    for version in (1, 2):
        (out,) = fused_embedding_to_layout(
            [table], [[0, 1]], [0], [0, 1], [0, 1], 1, "example", config, 1, version=version
        )
        (grad,) = torch.autograd.grad(out.sum(), table)
        assert grad.tolist() == [[2, 3, 1]]


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant_type": "tfrecord"}, "variant_type"),
        ({"fid_offset": packed([(4, 0)] * 9)}, "block 4"),
        ({"fid_offset": packed([(0, 4)] * 9)}, "past its block"),
        ({"fid_offset": packed([(2**31, 0)] * 9)}, "names block"),
        ({"fid_offset": None}, "needs fid_offset"),
        ({"feature_offset": [0, 2, 1, 5, 6, 9]}, "falls"),
        ({"feature_offset": [0, 2, 3, 5, 6, 10]}, "past the 9"),
        ({"feature_offset": [-1, 2, 3, 5, 6, 9]}, "falls"),
        ({"nfl_offset": [0, 3, 2, 6]}, "falls"),
        ({"nfl_offset": [0, 2]}, "entry per feature"),
        ({"nfl_offset": [0, 2147483650, 3, 99]}, "past the 6"),
        ({"nfl_offset": [0, 2147483650, 3, 7]}, "past the 6"),
        ({"nfl_offset": [0, 2, 3, 6]}, "rows for a batch"),
        ({"batch_size": 3}, "rows for a batch"),
        ({"batch_size": -1}, "-1"),
        ({"batch_size": [1, 1]}, "one number"),
        ({"batch_size": None}, "batch_size"),
        ({"ps_num": 3}, "6 tensors"),
        ({"ps_num": -1}, "ps_num"),
        ({"fid_list_emb_row_lenth": [1]}, "except in version 4"),
    ],
    ids=str,
)
def test_bad_inputs_are_refused(changes, message):
    with pytest.raises((ValueError, AssertionError), match=message):
        run_worked(3, **changes)


@pytest.mark.parametrize(
    ("version", "changes", "message"),
    [
        (1, {"embeddings": [torch.ones(6)]}, "rows, width"),
        (1, {"embeddings": [torch.ones(9, 2)] * 4}, "past its block"),
        (1, {"embeddings": [torch.ones(9, 1)] * 4}, "past its block"),
        (2, {"fid_list_row_split": None}, "fid_list_row_split"),
        (2, {"fid_list_row_split": [[0, 1, 2]]}, "4 vectors"),
        (2, {"fid_list_row_split": [[0, 1, 2], [0, 1, 2], [0, 1, 1], [0, 3]]}, "2 entries"),
        (2, {"fid_list_row_split": [[0, 1, 3], [0, 1, 2], [0, 1], [0, 3]]}, "needs 9 floats"),
        (2, {"fid_list_row_split": [[0, 1, 0], [0, 1, 2], [0, 1], [0, 3]]}, "never fall"),
        (4, {"fid_list_emb_row_lenth": None}, "version 4 needs fid_list_emb_row_lenth, got None"),
        (4, {"fid_list_emb_row_lenth": [6, 2, 6, 5]}, "adds up to 19"),
        (4, {"fid_list_emb_row_lenth": [6, 2, 6, 7, -1]}, "4 entries"),
        (4, {"fid_list_emb_row_lenth": [6, -2, 6, 10]}, "-2"),
        (4, {"embeddings": [torch.ones(10), torch.ones(10)]}, "one flat tensor in version 4, got 2"),
        (5, {"nfl_size": [3]}, "adds up to 3"),
        (5, {"fid_size": [4, 5]}, "1 entries"),
        (5, {"emb_size": [6, 6, 2, 5]}, "adds up to 5"),
        (5, {"emb_size": [6, 6, -2, 6]}, "-2"),
        (5, {"feature_size": None}, "feature_size"),
    ],
    ids=str,
)
def test_bad_inputs_of_each_version_are_refused(version, changes, message):
    with pytest.raises((ValueError, AssertionError), match=message):
        run_worked(version, **changes)


def test_version_1_ignores_ps_num():
    want = [o.tolist() for o in run_worked(1)]
    for ps_num in (-3, 0, 7):
        assert [o.tolist() for o in run_worked(1, ps_num=ps_num)] == want
        assert [o.tolist() for o in run_worked(1, ps_num=ps_num, version=9)] == want


def test_bad_gradients_are_refused():
    good = [torch.ones_like(o) for o in run_worked(3)]
    for grads in (good[:2], [good[0], good[1], good[2][:1]], [g.double() for g in good]):
        with pytest.raises(ValueError, match="gradient"):
            fused_embedding_to_layout_grad(
                NFL, ROWS, FIDS[3], 2, worked_inputs(3)[0], None, grads, "example", worked_config(), 2
            )


def slices(*ranges):
    return [SliceConfig(*r) for r in ranges]


@pytest.mark.parametrize(
    ("name", "out", "message"),
    [
        ("unknown feature", OutConfig(slices(("z", 0, 1)), 0, [[-1, 1]]), "'z'"),
        ("empty slice", OutConfig(slices(("a", 1, 1)), 0, [[-1, 0]]), r"\[1, 1\)"),
        ("negative start", OutConfig(slices(("a", -1, 1)), 0, [[-1, 2]]), "-1"),
        ("end past the row", OutConfig(slices(("a", 0, 4)), 0, [[-1, 4]]), "3 columns"),
        ("no shape", OutConfig(slices(("a", 0, 1)), 0, []), "CONCAT must have one shape, got 0"),
        ("too few shapes", OutConfig(slices(("a", 0, 1), ("b", 0, 1)), OutType.NONE, [[-1, 1]]), "shape per slice, 2"),
        ("wrong rank", OutConfig(slices(("a", 0, 1)), 0, [[-1, 1, 1]]), "2 sizes"),
        ("wrong width", OutConfig(slices(("a", 0, 1), ("b", 0, 2)), 0, [[-1, 4]]), "-1, 3"),
        ("wrong stack", OutConfig(slices(("a", 0, 1), ("b", 0, 1)), OutType.STACK, [[-1, 3, 1]]), "-1, 2, 1"),
        ("unequal stack", OutConfig(slices(("a", 0, 1), ("b", 0, 2)), OutType.STACK, [[-1, 2, 1]]), "one width"),
        ("unequal addn", OutConfig(slices(("a", 0, 1), ("b", 0, 2)), OutType.ADDN, [[-1, 1]]), "one width"),
        ("addn of firstn", OutConfig(slices(("c", 0, 1)), OutType.ADDN, [[-1, 1]]), "ADDN"),
        ("mixed concat", OutConfig(slices(("a", 0, 1), ("c", 0, 1)), 0, [[-1, 2, 2]]), "mix"),
        ("mixed stack", OutConfig(slices(("c", 0, 1), ("a", 0, 1)), OutType.STACK, [[-1, 2, 2, 1]]), "mix"),
        ("short sequence", OutConfig(slices(("c", 0, 2)), OutType.NONE, [[-1, 1, 2]]), "shorter"),
        ("no sequence axis", OutConfig(slices(("c", 0, 2)), OutType.NONE, [[-1, 2]]), "3 sizes"),
        ("unknown out_type", OutConfig(slices(("a", 0, 1)), 7, [[-1, 1]]), "out_type"),
        ("bad batch size", OutConfig(slices(("a", 0, 1)), 0, [[-2, 1]]), "-2"),
        ("no slices", OutConfig([], 0, [[-1, 1]]), "no slices"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_bad_layout_is_refused_at_first_use(name, out, message):
    config = worked_config()
    config.out_configs["bad"] = out
    with pytest.raises(ValueError, match=message):
        run_worked(3, config=config)


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (FeatureConfig("t1", 2, [2]), "pooling_type"),
        (FeatureConfig("t1", PoolingType.FIRSTN, [2], 0), "max_sequence_length"),
        (FeatureConfig("t1", 0, [3, -1]), "slice_dims"),
    ],
    ids=["pooling", "length", "width"],
)
def test_a_bad_feature_is_refused_at_first_use(feature, message):
    config = worked_config()
    config.feature_configs["c"] = feature
    with pytest.raises(ValueError, match=message):
        run_worked(3, config=config)


def test_what_is_no_configuration_is_refused():
    with pytest.raises(ValueError, match="int"):
        run_worked(3, config=5)
    with pytest.raises(ValueError, match="FeatureConfigs"):
        run_worked(3, config=b"\xff\xff\xff")


def test_nesting_and_back():
    config = worked_config()
    outs = run_worked(3)
    nested = nest_layout(config, outs)
    assert list(nested) == ["bias", "seq", "vec"]
    assert isinstance(nested["seq"], list)
    assert nested["bias"] is outs[0]
    assert all(a is b for a, b in zip(flatten_layout(config, nested), outs, strict=True))
    with pytest.raises(ValueError, match="3"):
        nest_layout(config, outs[:2])
    with pytest.raises(ValueError, match="vec"):
        flatten_layout(config, {"bias": outs[0]})


def test_large_batches_are_the_same_for_any_thread_count(same_for_any_thread_count):
    torch.manual_seed(0)
    config = FeatureConfigs(
        {f"f{i}": FeatureConfig(f"t{i % 2}", POOLINGS[i % 3], [1, 4, 4 + i], 2) for i in range(9)},
        {
            "addn": OutConfig([SliceConfig(f"f{i}", 0, 1) for i in range(9) if i % 3 < 2], OutType.ADDN, [[-1, 1]]),
            "none": OutConfig([SliceConfig("f2", 0, 9), SliceConfig("f0", 3, 9)], OutType.NONE, [[-1, 3, 9], [-1, 6]]),
            "cat": OutConfig([SliceConfig("f0", 1, 5), SliceConfig("f4", 0, 13)], OutType.CONCAT, [[-1, 17]]),
        },
    )
    ids = {f"f{i}": torch.randint(0, 500, (600, 5)).tolist() for i in range(9)}
    ids["f4"] = torch.randint(0, 500, (70,))
    upstream = None

    def run():
        nonlocal upstream
        outs, leaves, _ = run_version(config, ids, 3, True, 3)
        upstream = upstream or [torch.randn_like(o) for o in outs]
        return [o.detach() for o in outs], torch.autograd.grad(outs, leaves, upstream)

    outs, _ = same_for_any_thread_count(run)
    for out, want in zip(outs, expected(config, ids, 600), strict=True):
        torch.testing.assert_close(out, want)
