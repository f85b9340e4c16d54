"""Partitioned tables: worked examples and layouts of every kind, with both kinds of parts."""

import pytest
import torch

from shoal.nn.combiners import FirstN, ReduceMean, ReduceSum
from shoal.sharded import (
    AsyncFunctionMgr,
    OutConfig,
    OutType,
    ParserCtx,
    PartitionedHashTable,
    RemoteMultiHashTable,
    RemoteMultiTypeHashTable,
    SliceConfig,
    create_partitioned_hash_table,
    gen_feature_configs,
    get_default_parser_ctx,
    sharding_sparse_fids_with_context,
)
from tests.sharded.helpers import adagrad, config, multi_type, native

T = torch.tensor
U, P = "ee11cbb19052e40b07aac0ca060c23ee", "c4994ee36e1c818429b92da2af0d9b38"
PRE = "__sharding_sparse_fids__"
BATCH = {"user": [[10], [11], [10]], "price": [[4, 7], [7], []], "shop": [[4], [], [8, 4, 8]]}


def layouts():
    def slices(names, start, end):
        return [SliceConfig(feature_name=name, start=start, end=end) for name in names]

    everyone, two = ["user", "price", "shop"], ["price", "shop"]
    return {
        "bias": OutConfig(slice_configs=slices(everyone, 0, 1), out_type=OutType.CONCAT, shape=[[-1, 3]]),
        "vec": OutConfig(slice_configs=slices(everyone, 1, 3), out_type=OutType.CONCAT, shape=[[-1, 6]]),
        "deep": OutConfig(slice_configs=slices(two, 3, 6), out_type=OutType.CONCAT, shape=[[-1, 6]]),
    }


def settings(num_ps, is_native, rate=0.5, make=config, **more):
    configs = {"user": make(3, rate), "price": make(6, rate), "shop": make(6, rate)}
    dims = {"user": [1, 2], "price": [1, 2, 3], "shop": [1, 2, 3]}
    combiners = dict.fromkeys(configs, ReduceSum())
    ctx = ParserCtx(enable_fused_layout=True)
    ctx.sharding_sparse_fids_op_params = gen_feature_configs(
        num_ps, configs, layouts(), dims, combiners, is_native, **more
    )
    return ctx


@pytest.fixture(params=["multi_type", "native", "remote multi_type", "remote native"])
def build(request, ps):
    is_native = request.param.endswith("native")

    def make(num_ps, **more):
        ctx = settings(num_ps, is_native, **more)
        if request.param.startswith("remote"):
            client = ps(num_ps)
            kind = RemoteMultiHashTable if is_native else RemoteMultiTypeHashTable
            return PartitionedHashTable(num_ps, lambda i, c: kind(client, i, c), is_native, parser_ctx=ctx)
        return PartitionedHashTable(num_ps, native if is_native else multi_type, is_native, parser_ctx=ctx)

    make.native = is_native
    return make


def row(v, dim):
    return [v + 0.1 * (j + 1) for j in range(dim)]


def fill(table, is_native, num_ps=2):
    data = {ps: {} for ps in range(num_ps)}
    names = {"user": ([10, 11], 3), "price": ([4, 7], 6), "shop": ([4, 8], 6)}
    if not is_native:
        names = {U: ([10, 11], 3), P: ([4, 7, 8], 6)}
    for name, (ids, dim) in names.items():
        for ps in range(num_ps):
            chosen = [v for v in ids if v % num_ps == ps]
            values = T([row(v, dim) for v in chosen]).view(-1, dim)
            data[ps][name] = (T(chosen, dtype=torch.int64), values)
    table.assign(data)


def test_sub_tables_have_the_names_of_the_specification():
    params = settings(2, False).sharding_sparse_fids_op_params
    assert sorted(params.sub_table_name_to_config) == [P, U]
    assert {n: f.table for n, f in params.feature_configs.feature_configs.items()} == {"user": U, "price": P, "shop": P}
    params = settings(0, True).sharding_sparse_fids_op_params
    assert params.num_ps == 1
    assert sorted(params.sub_table_name_to_config) == ["price", "shop", "user"]
    assert {f.table for f in params.feature_configs.feature_configs.values()} == {"native_multi_hash_table_fake_table"}
    params = settings(2, True, transfer_float16=True).sharding_sparse_fids_op_params
    assert not params.use_native_multi_hash_table
    with pytest.raises(ValueError, match="combiner"):
        gen_feature_configs(2, {"a": config(1)}, {}, {"a": [1]}, {"a": object()}, True)


def test_sharded_batch_lies_in_the_features():
    features = {"label": T([1.0])}
    with settings(2, False) as ctx:
        assert get_default_parser_ctx() is ctx
        sharding_sparse_fids_with_context(BATCH, features)
    assert get_default_parser_ctx() is not ctx
    assert features[f"{PRE}shards/{P}:0"].tolist() == [4, 4, 8]
    assert features[f"{PRE}shards/{P}:1"].tolist() == [7]
    assert features[f"{PRE}feature_offset"].tolist() == [0, 2, 3, 3, 4, 4, 7, 8, 9, 10]
    assert features[f"{PRE}emb_size"].tolist() == [18, 6, 3, 3]
    assert not any("row_split" in key for key in features)


def test_worked_example(build):
    table = build(2)
    fill(table, build.native)
    features, bundle = {"label": T([1.0])}, {"mine": 1}
    sharding_sparse_fids_with_context(BATCH, features, table._ctx)
    found = table.lookup(features, bundle)
    assert list(features) == ["label"]
    expected = {
        "bias": [[10.1, 11.2, 4.1], [11.1, 7.1, 0], [10.1, 0, 20.3]],
        "vec": [
            [10.2, 10.3, 11.4, 11.6, 4.2, 4.3],
            [11.2, 11.3, 7.2, 7.3, 0, 0],
            [10.2, 10.3, 0, 0, 20.6, 20.9],
        ],
        "deep": [[11.8, 12.0, 12.2, 4.4, 4.5, 4.6], [7.4, 7.5, 7.6, 0, 0, 0], [0, 0, 0, 21.2, 21.5, 21.8]],
    }
    if build.native:  # shop and price have separate tables, so 4 and 8 of shop have the values that fill() gave shop
        assert bundle[f"{PRE}native_multi_hash_table_fake_table:0:fids_row_split"].tolist() == [0, 1, 3, 4]
        assert bundle[f"{PRE}emb_size"].tolist() == [21, 9]
    assert sorted(found) == ["bias", "deep", "vec"]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], T(value, dtype=torch.float32))
    grads = {"bias": 1.0, "vec": 2.0, "deep": 3.0}
    pairs = [(torch.full_like(t, grads[n]), t) for n, t in sorted(found.items())]
    before = table._lookup_raw({0: {P: T([4, 8])} if not build.native else {"price": T([4]), "shop": T([4, 8])}})
    table.apply_gradients(pairs, T(3), auxiliary_bundle=bundle)
    after = table._lookup_raw({0: {P: T([4, 8])} if not build.native else {"price": T([4]), "shop": T([4, 8])}})
    one, two = T([1.0, 2, 2, 3, 3, 3]), T([2.0, 4, 4, 6, 6, 6])
    if build.native:
        torch.testing.assert_close(after[0]["price"][0], before[0]["price"][0] - 0.5 * one)
        torch.testing.assert_close(after[0]["shop"], before[0]["shop"] - 0.5 * two)
    else:
        torch.testing.assert_close(after[0][P][0], before[0][P][0] - 0.5 * one - 0.5 * two)
        torch.testing.assert_close(after[0][P][1], before[0][P][1] - 0.5 * two)


def test_the_steps_of_a_lookup_can_be_taken_apart(build):
    table = build(2)
    fill(table, build.native)
    whole = table.lookup({f"{PRE}sparse_features": BATCH}, {})
    bundle, features = {}, {f"{PRE}sparse_features": BATCH}
    pool = table.lookup(features, bundle, ret_fused_layout_callable_fn=True)
    assert any(key.endswith(":embs") for key in bundle)
    later, later_features = {}, {f"{PRE}sparse_features": BATCH}
    rest = table.lookup(later_features, later, ret_lookup_callable_fn=True)
    assert any(key.startswith(f"{PRE}shards@1@") for key in later)
    queued = table.lookup({f"{PRE}sparse_features": BATCH}, {}, embedding_prefetch_capacity=2)
    by_name = rest(auxiliary_bundle=later, features=later_features)
    for found in (pool(bundle, features), pool(auxiliary_bundle=bundle, features=features), by_name, queued):
        for name, value in whole.items():
            assert torch.equal(found[name], value)


def test_repeated_ids_step_once_when_unique_and_each_time_when_not(build):
    for unique, steps in ((True, 1), (False, 2)):
        table = build(2, make=adagrad, unique=lambda u=unique: u)
        batch = {"user": [[6, 6]], "price": [[]], "shop": [[]]}
        bundle = {}
        found = table.lookup({f"{PRE}sparse_features": batch}, bundle)
        table.apply_gradients([(torch.ones_like(t), t) for _, t in sorted(found.items())], 0, auxiliary_bundle=bundle)
        sub = "user" if build.native else U
        value = table._lookup_raw({0: {sub: T([6])}})[0][sub][0, 0].item()
        g = 2.0 if steps == 1 else 1.0
        expected, norm = 0.0, 0.1
        for _ in range(steps):
            norm += g * g
            expected -= 0.5 * g / norm**0.5
        assert value == pytest.approx(expected, rel=1e-5)


def test_missing_gradients_count_as_zero_and_scale_multiplies(build):
    table = build(2)
    bundle = {}
    found = table.lookup({f"{PRE}sparse_features": BATCH}, bundle)
    pairs = [(None if n != "bias" else torch.ones_like(t), t) for n, t in sorted(found.items())]
    table.apply_gradients(pairs, 0, auxiliary_bundle=bundle, grad_scale=0.5, req_time=T([3, 9, 4]))
    sub = "user" if build.native else U
    assert table._lookup_raw({1: {sub: T([11])}})[1][sub].tolist() == [[-0.25, 0, 0]]


def test_async_push_keeps_its_own_step(build):
    table = build(2)
    manager = AsyncFunctionMgr()
    bundle, step = {}, T(0)
    found = table.lookup({f"{PRE}sparse_features": BATCH}, bundle)
    pairs = [(torch.ones_like(t), t) for _, t in sorted(found.items())]
    table.apply_gradients(pairs, step, auxiliary_bundle=bundle, async_function_mgr=manager, async_push=True)
    step += 5
    sub = "user" if build.native else U
    assert table._lookup_raw({1: {sub: T([11])}})[1][sub].tolist() == [[0, 0, 0]]
    [hook] = manager.hooks
    hook.end()
    assert table._lookup_raw({1: {sub: T([11])}})[1][sub].tolist() == [[-0.5, -0.5, -0.5]]


def test_a_bundle_that_no_lookup_has_filled_is_refused(build):
    table = build(1)
    layouts = [torch.zeros(3, 3), torch.zeros(3, 6), torch.zeros(3, 6)]
    bundle = {}
    finish = table.lookup({f"{PRE}sparse_features": BATCH}, bundle, ret_lookup_callable_fn=True)
    for unfilled in ({}, bundle):
        with pytest.raises(ValueError, match="auxiliary_bundle must be one that a lookup has filled"):
            table.apply_gradients([(t, t) for t in layouts], 0, auxiliary_bundle=unfilled)
    finish(bundle, {})
    table.apply_gradients([(t, t) for t in layouts], 0, auxiliary_bundle=bundle)


def test_a_context_within_itself_ends_as_it_began():
    outer, inner = settings(1, True), settings(1, True)
    with outer, inner:
        with outer:
            assert get_default_parser_ctx() is outer
        assert get_default_parser_ctx() is inner
    assert get_default_parser_ctx() is not outer


def test_assign_adds_up_and_checks_its_shard(build):
    table = build(2)
    torch.manual_seed(0)
    sub, dim = ("price", 6) if build.native else (P, 6)
    ids = [T([i + 2 * j for j in range(5)]) for i in range(2)]
    first, second = torch.randn(2, 5, dim), torch.randn(2, 5, dim)
    table.assign({i: {sub: (ids[i], first[i])} for i in range(2)})
    table.assign_add({i: {sub: (ids[i], second[i])} for i in range(2)})
    found = table._lookup_raw({i: {sub: ids[i]} for i in range(2)})
    for i in range(2):
        torch.testing.assert_close(found[i][sub], first[i] + second[i])
    with pytest.raises(ValueError, match="id mod 2 == 0"):
        table.assign({0: {sub: (T([3]), torch.zeros(1, dim))}})
    with pytest.raises(ValueError, match="must be >= 0"):
        table.assign({0: {sub: (T([-2]), torch.zeros(1, dim))}})
    with pytest.raises(KeyError):
        table.assign({0: {"nobody": (T([2]), torch.zeros(1, dim))}})
    with pytest.raises(ValueError, match="6 elements"):
        table.assign({0: {sub: (T([20]), torch.ones(1, dim))}, 1: {sub: (T([21]), torch.ones(1, dim - 1))}})
    assert table._lookup_raw({0: {sub: T([20])}})[0][sub].count_nonzero() == 0  # part 0 was not touched either


def test_a_batch_that_is_refused_stays_in_the_features(build):
    table, features = build(2), {"label": T([1.0]), f"{PRE}sparse_features": {"user": [[-1]]}}
    with pytest.raises(ValueError, match="must be >= 0"):
        table.lookup(features, {})
    assert list(features) == ["label", f"{PRE}sparse_features"]


def test_negative_ids_are_refused(build):
    with pytest.raises(ValueError, match="must be >= 0"):
        build(2).lookup({f"{PRE}sparse_features": {"user": [[-1]], "price": [[]], "shop": [[]]}}, {})


def test_features_map_to_their_tables(build):
    table = build(2)
    expected = (
        {"user": "user", "price": "price", "shop": "shop"} if build.native else {"user": U, "price": P, "shop": P}
    )
    assert table.slot_mapping == expected
    hook = object()
    table.add_queue_hook(hook)
    assert table.get_queue_hooks() == [hook]


@pytest.mark.parametrize("is_native", [False, True])
def test_all_kinds_of_layouts_and_combiners(is_native):
    configs = {"a": config(2), "b": config(2), "s": config(2)}
    combiners = {"a": ReduceMean(), "b": ReduceSum(), "s": FirstN(3)}
    outs = {
        "stack": OutConfig([SliceConfig("a", 0, 2), SliceConfig("b", 0, 2)], OutType.STACK, [[-1, 2, 2]]),
        "add": OutConfig([SliceConfig("a", 0, 2), SliceConfig("b", 0, 2)], OutType.ADDN, [[-1, 2]]),
        "none": OutConfig([SliceConfig("a", 0, 1), SliceConfig("b", 1, 2)], OutType.NONE, [[-1, 1], [-1, 1]]),
        "seq": OutConfig([SliceConfig("s", 0, 2)], OutType.CONCAT, [[-1, 3, 2]]),
    }
    ctx = ParserCtx()
    ctx.parser_type = "example_batch"
    ctx.sharding_sparse_fids_op_params = gen_feature_configs(
        3, configs, outs, {key: [2] for key in configs}, combiners, is_native
    )
    table = PartitionedHashTable(3, native if is_native else multi_type, is_native, parser_ctx=ctx)
    values = {v: T([float(v), v + 0.5]) for v in range(1, 9)}
    for name in configs if is_native else [next(iter(table._dims))]:
        table.assign(
            {ps: {name: (T([v for v in values if v % 3 == ps]),
                         torch.stack([values[v] for v in values if v % 3 == ps]))} for ps in range(3)}
        )  # fmt: skip
    batch = {"a": [[1, 2], []], "b": T([3, 3]), "s": [[4, 5, 6, 7], [8]]}
    bundle = {}
    found = table.lookup({f"{PRE}sparse_features": batch}, bundle)
    assert found["stack"].tolist() == [[[1.5, 2.0], [6.0, 7.0]], [[0, 0], [6.0, 7.0]]]
    assert found["add"].tolist() == [[7.5, 9.0], [6.0, 7.0]]
    assert [t.tolist() for t in found["none"]] == [[[1.5], [0]], [[7.0], [7.0]]]
    assert found["seq"].tolist() == [[[4, 4.5], [5, 5.5], [6, 6.5]], [[8, 8.5], [0, 0], [0, 0]]]
    flat = table.flatten_layout(found)
    assert [t.shape for t in flat] == [(2, 2), (2, 1), (2, 1), (2, 3, 2), (2, 2, 2)]
    assert table.nest_layout(flat).keys() == found.keys()
    table.apply_gradients([(torch.ones_like(t), t) for t in flat], 0, auxiliary_bundle=bundle)
    sub = "b" if is_native else next(iter(table._dims))
    # b is shared: 2 samples x 2 occurrences x (stack + add + none on its second column)
    assert table._lookup_raw({0: {sub: T([3])}})[0][sub].tolist() == [[3 - 8, 3.5 - 12]]
    if is_native:
        assert table._lookup_raw({1: {"s": T([4, 7])}})[1]["s"].tolist() == [[3, 3.5], [7, 7.5]]


@pytest.mark.parametrize("is_native", [False, True])
def test_owned_by_ranks_equals_the_ordinary_path(is_native):
    torch.manual_seed(3)
    tables = []
    for gpu_emb in (False, True):
        ctx = settings(1, is_native, make=adagrad, enable_gpu_emb=gpu_emb)
        tables.append(PartitionedHashTable(1, native if is_native else multi_type, is_native, parser_ctx=ctx))
    for step in range(3):
        grads = None
        results = []
        for table in tables:
            bundle = {}
            found = table.lookup({f"{PRE}sparse_features": BATCH, "req_time": T([5, 7])}, bundle)
            flat = table.flatten_layout(found)
            grads = grads or [torch.randn_like(t) for t in flat]
            table.apply_gradients(list(zip(grads, flat, strict=True)), step, auxiliary_bundle=bundle)
            results.append(flat)
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    assert results[0][0].abs().sum() > 0
    with pytest.raises(NotImplementedError):
        tables[1].assign({})


def test_a_rank_may_have_no_samples_and_no_times():
    ctx = settings(1, True, enable_gpu_emb=True)
    table = PartitionedHashTable(1, native, True, parser_ctx=ctx)
    bundle = {}
    found = table.lookup({f"{PRE}sparse_features": {}, "req_time": T([], dtype=torch.int64)}, bundle)
    assert {name: list(rows.shape) for name, rows in found.items()} == {"bias": [0, 3], "deep": [0, 6], "vec": [0, 6]}
    table.apply_gradients([(None, rows) for rows in table.flatten_layout(found)], 0, auxiliary_bundle=bundle)
    assert table.tables[0].size() == 0


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("num_ps", [0, 2])
def test_the_factory_builds_inside_its_context(is_native, num_ps):
    from shoal.table import reset_registry

    reset_registry()
    with settings(num_ps, is_native):
        table = create_partitioned_hash_table(num_ps, is_native)
    assert len(table.tables) == max(1, num_ps)
    reset_registry()


def test_float16_switches_native_tables_off_in_the_factory_too():
    from shoal.table import MultiTypeHashTable, reset_registry

    reset_registry()
    with settings(2, True, make=adagrad, transfer_float16=True):
        table = create_partitioned_hash_table(2, True)
    assert all(isinstance(part, MultiTypeHashTable) for part in table.tables)
    bundle = {}
    found = table.lookup({f"{PRE}sparse_features": BATCH}, bundle)
    table.apply_gradients([(torch.ones_like(t), t) for _, t in sorted(found.items())], 0, auxiliary_bundle=bundle)
    expected, norm = 0.0, 0.1
    for gradient in (1.0, 2.0):  # id 4 steps once as a price and once as a shop
        norm += gradient * gradient
        expected -= 0.5 * gradient / norm**0.5
    assert table._lookup_raw({0: {P: T([4])}})[0][P][0, 0].item() == pytest.approx(expected, rel=1e-5)
    reset_registry()
