"""Collections instead of TorchRec's: the same results and gradients in its own models, with the same weights."""

import functools

import pytest
import torch

import shoal
from shoal.errors import ConfigError, UnsupportedError
from shoal.nn import EmbeddingBagCollection, EmbeddingCollection
from shoal.sharded import loads_of, plan, shard
from tests.nn.torchrec_here import import_torchrec
from tests.sharded.ranks import in_ranks, raised

torchrec = import_torchrec()
from torchrec.datasets.utils import Batch  # noqa: E402
from torchrec.models import deepfm, dlrm  # noqa: E402
from torchrec.modules import embedding_configs as theirs  # noqa: E402
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection  # noqa: E402
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection  # noqa: E402
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor  # noqa: E402

ROWS, DIM, BATCH = 20, 8, 5
KEYS = ["f1", "f2", "f3"]
MEAN = theirs.PoolingType.MEAN
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from TorchRec


def configs(kind=theirs.EmbeddingBagConfig, **second):
    first = kind(num_embeddings=ROWS, embedding_dim=DIM, name="t1", feature_names=["f1", "f3"])
    return [first, kind(num_embeddings=ROWS, embedding_dim=DIM, name="t2", feature_names=["f2"], **second)]


def shared():
    """A feature that two tables read."""
    made = configs(pooling=MEAN)
    made[1].feature_names = ["f2", "f1"]
    return made


def batch(weights=False, seed=1, size=BATCH, keys=KEYS):
    make = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(keys) * size,), generator=make)
    lengths[1] = 0
    n = int(lengths.sum())
    values = torch.randint(0, ROWS, (n,), generator=make)
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(keys), values=values, lengths=lengths,
        weights=torch.rand(n, generator=make) if weights else None,
    )  # fmt: skip


def pair(make=configs, **options):
    """Their collection and ours, with the same weights; ours makes steps of rate 1, so that updates show gradients."""
    torch.manual_seed(3)
    them = torchrec.EmbeddingBagCollection(tables=make(), **options)
    ours = EmbeddingBagCollection(tables=make(), optimizer=shoal.Sgd(lr=1.0), **options)
    ours.load_state_dict(them.state_dict())
    return them, ours


def check_gradients(them, ours):
    """What a step of rate 1 has taken off each row."""
    for name, bag in getattr(them, "embedding_bags", getattr(them, "embeddings", None)).items():
        moved = bag.weight.detach() - ours.tables[name].lookup(torch.arange(ROWS))
        torch.testing.assert_close(moved, bag.weight.grad, atol=1e-6, rtol=1e-5)
        assert moved.abs().sum() > 0


# --- collections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [configs, shared, functools.partial(configs, pooling=MEAN)])
@pytest.mark.parametrize("keys", [KEYS, ["f3", "f1", "f2"], ["f2", "more", "f1", "f3"]])
def test_a_keyed_jagged_tensor_gives_their_keyed_tensor(make, keys):
    them, ours = pair(make)
    given = batch(keys=keys)
    want, got = them(given), ours(given)
    assert isinstance(got, KeyedTensor)
    assert (got.keys(), got.length_per_key(), got.key_dim()) == (want.keys(), want.length_per_key(), want.key_dim())
    torch.testing.assert_close(got.values(), want.values())
    for name, one in want.to_dict().items():
        torch.testing.assert_close(got[name], one)
    grads = torch.randn(want.values().shape)
    want.values().backward(grads)
    got.values().backward(grads)
    check_gradients(them, ours)
    assert ours.embedding_bag_configs()[0].feature_names == them.embedding_bag_configs()[0].feature_names
    assert ours.is_weighted() is False
    assert ours.device == them.device


def test_weights_of_a_batch_count_where_the_collection_is_weighted():
    for weighted in (True, False):
        them, ours = pair(is_weighted=weighted)
        given = batch(weights=True)
        torch.testing.assert_close(ours(given).values(), them(given).values())
        ours(given).values().sum().backward()
        them(given).values().sum().backward()
        check_gradients(them, ours)
        assert ours.is_weighted() == weighted
    _, ours = pair(is_weighted=True)
    with pytest.raises(ConfigError, match="must have weights"):
        ours(batch())


def test_gradients_reach_the_weights_of_a_feature_processor():
    results = []
    for collection in pair(is_weighted=True):
        torch.manual_seed(0)
        processor = PositionWeightedModuleCollection(dict.fromkeys(KEYS, 10))
        model = FeatureProcessedEmbeddingBagCollection(collection, processor)
        out = model(batch()).values()
        out.square().sum().backward()
        results.append((out.detach(), {name: p.grad for name, p in processor.named_parameters()}))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("weighted", [False, True])
def test_empty_bags_and_empty_batches(weighted):
    them, ours = pair(is_weighted=weighted)
    weights = torch.empty(0) if weighted else None
    none = KeyedJaggedTensor(KEYS, torch.empty(0, dtype=torch.int64), weights, torch.zeros(6, dtype=torch.int32))
    assert torch.equal(ours(none).values(), them(none).values())
    nobody = KeyedJaggedTensor(KEYS, torch.empty(0, dtype=torch.int64), weights, torch.empty(0, dtype=torch.int64))
    out = ours(nobody)
    assert out.values().shape == (0, 3 * DIM)
    out.values().sum().backward()
    assert torch.equal(ours(none).values(), torch.zeros(2, 3 * DIM))


def test_a_batch_whose_keys_share_bags():
    them, ours = pair()
    given = KeyedJaggedTensor(
        keys=KEYS, values=torch.tensor([1, 2, 3, 4, 5, 6]), lengths=torch.tensor([1, 1, 2, 1, 0, 1]),
        stride_per_key_per_rank=[[2], [1], [3]],
        inverse_indices=(["f2", "f1", "f3"], torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0], [2, 1, 0, 2]])),
    )  # fmt: skip
    want, got = them(given).values(), ours(given).values()
    assert torch.equal(got, want)
    want.sum().backward()
    got.sum().backward()
    check_gradients(them, ours)
    alone = KeyedJaggedTensor(keys=["f1", "f2"], values=torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 1, 1, 1]),
                              stride_per_key_per_rank=[[1], [3]])  # fmt: skip
    with pytest.raises(ConfigError, match="inverse_indices"):
        ours(alone)


@pytest.mark.parametrize("need_indices", [False, True])
def test_sequences(need_indices):
    make = functools.partial(configs, theirs.EmbeddingConfig)
    them = torchrec.EmbeddingCollection(tables=make(), need_indices=need_indices)
    ours = EmbeddingCollection(tables=make(), need_indices=need_indices, optimizer=shoal.Sgd(lr=1.0))
    ours.load_state_dict(them.state_dict())
    given = batch(keys=["f3", "more", "f2", "f1"])
    want, got = them(given), ours(given)
    assert list(got) == list(want)
    total = [0.0, 0.0]
    for name, one in want.items():
        assert isinstance(got[name], JaggedTensor)
        for part in ("values", "lengths", "weights_or_none"):
            torch.testing.assert_close(getattr(got[name], part)(), getattr(one, part)(), check_dtype=part != "lengths")
        for number, own in enumerate((one, got[name])):
            total[number] = total[number] + own.values().square().sum()
    for sum_of_squares in total:
        sum_of_squares.backward()
    check_gradients(them, ours)
    for method in ("embedding_names_by_table", "embedding_dim", "need_indices"):
        assert getattr(ours, method)() == getattr(them, method)()


# --- models -----------------------------------------------------------------------------------------------------------


def make_dlrm(collection):
    return dlrm.DLRM(collection, dense_in_features=6, dense_arch_layer_sizes=[9, DIM], over_arch_layer_sizes=[5, 1])


def make_dcn(collection):
    return dlrm.DLRM_DCN(collection, dense_in_features=6, dense_arch_layer_sizes=[9, DIM],
                         over_arch_layer_sizes=[5, 1], dcn_num_layers=2, dcn_low_rank_dim=3)  # fmt: skip


def make_projection(collection):
    return dlrm.DLRM_Projection(collection, dense_in_features=6, dense_arch_layer_sizes=[9, DIM],
                                over_arch_layer_sizes=[5, 1], interaction_branch1_layer_sizes=[7, 4 * DIM],
                                interaction_branch2_layer_sizes=[7, 4 * DIM])  # fmt: skip


def make_deepfm(collection):
    return deepfm.SimpleDeepFMNN(num_dense_features=6, embedding_bag_collection=collection, hidden_layer_size=7,
                                 deep_fm_dimension=4)  # fmt: skip


def inputs(step):
    make = torch.Generator().manual_seed(step)
    return torch.rand(BATCH, 6, generator=make), batch(seed=step), torch.randint(2, (BATCH,), generator=make)


@pytest.mark.parametrize("make", [make_dlrm, make_dcn, make_projection, make_deepfm])
def test_their_models_train_alike_on_ours(make):
    them, ours = pair()
    models = []
    for collection in (them, ours):
        torch.manual_seed(1)
        models.append(make(collection))
    steps = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    for step in range(3):
        dense, sparse, labels = inputs(step)
        results = []
        for model, optimizer in zip(models, steps, strict=True):
            optimizer.zero_grad()
            logits = model(dense, sparse)
            torch.nn.functional.binary_cross_entropy_with_logits(logits.squeeze(-1), labels.float()).backward()
            grads = {n: p.grad for n, p in model.named_parameters() if "embedding_bags" not in n}
            results.append((logits.detach(), grads))
        torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)
        if step == 0:
            check_gradients(them, ours)
        for optimizer in steps:
            optimizer.step()
    for name, bag in them.embedding_bags.items():
        rows = ours.tables[name].lookup(torch.arange(ROWS))
        torch.testing.assert_close(rows, bag.weight.detach(), atol=1e-5, rtol=1e-4)


def test_a_whole_model_takes_their_state_and_gives_their_loss():
    them, ours = (dlrm.DLRMTrain(make_dlrm(collection)) for collection in pair())
    missing, unexpected = ours.load_state_dict(them.state_dict())
    assert not missing
    assert not unexpected
    dense, sparse, labels = inputs(0)
    given = Batch(dense_features=dense, sparse_features=sparse, labels=labels)
    loss, (_, logits, _) = ours(given)
    want, (_, their_logits, _) = them(given)
    torch.testing.assert_close((loss, logits), (want, their_logits))
    again = dlrm.DLRMTrain(make_dlrm(EmbeddingBagCollection(tables=configs(), optimizer=shoal.Sgd(lr=1.0))))
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again(given)[0], loss)


def test_ranks_share_a_model_of_theirs():
    """`shard` in place of DistributedModelParallel; each rank has a batch of its own."""

    def build():
        them, ours = pair()
        models = []
        for collection in (them, ours):
            torch.manual_seed(1)
            models.append(make_dlrm(collection))
        return models

    built = [build() for _ in range(2)]

    def train(ranks):
        model = built[ranks.rank][1]
        collection = model.sparse_arch.embedding_bag_collection
        loads = loads_of(model, lambda: model(*inputs(0)[:2]))
        shard(model, plan(loads, ranks.world_size).edited(t1="column", t2="table:1"), backend=ranks)
        for step in range(2):
            dense, sparse, _ = inputs(10 * step + ranks.rank)
            model(dense, sparse).sum().backward()
        return {name: table.lookup(torch.arange(ROWS)) for name, table in collection.tables.items()}

    first, second = raised(in_ranks(2, train))
    torch.testing.assert_close(first, second)
    model = built[0][0]
    them = model.sparse_arch.embedding_bag_collection
    steps = torch.optim.SGD(them.parameters(), lr=1.0)
    for step in range(2):
        steps.zero_grad()
        for rank in range(2):
            dense, sparse, _ = inputs(10 * step + rank)
            model(dense, sparse).sum().backward()
        steps.step()
    for name, bag in them.embedding_bags.items():
        torch.testing.assert_close(first[name], bag.weight.detach(), atol=1e-5, rtol=1e-4)


# --- configurations ---------------------------------------------------------------------------------------------------


def test_rows_begin_as_the_configuration_says():
    kind = theirs.EmbeddingBagConfig
    weight = torch.randn(7, 4)
    made = EmbeddingBagCollection(tables=[
        kind(num_embeddings=100, embedding_dim=4, name="root"),
        kind(num_embeddings=100, embedding_dim=4, name="range", weight_init_min=2.0, weight_init_max=3.0),
        kind(num_embeddings=100, embedding_dim=4, name="zeros", init_fn=torch.nn.init.zeros_),
        kind(num_embeddings=100, embedding_dim=4, name="sevens",
             init_fn=functools.partial(torch.nn.init.constant_, val=7.0)),
        kind(num_embeddings=7, embedding_dim=4, name="given", init_fn=lambda param: param.copy_(weight)),
    ])  # fmt: skip
    far = 1 << 60  # beyond num_embeddings, which is not a limit here
    rows = {name: made({key: torch.tensor([[5], [far]]) for key in made.tables})[:, 4 * n : 4 * n + 4]
            for n, name in enumerate(made.tables)}  # fmt: skip
    assert rows["root"].abs().max() <= 0.1
    assert rows["root"].abs().min() > 0
    assert ((rows["range"] >= 2) & (rows["range"] < 3)).all()
    assert (rows["zeros"] == 0).all()
    assert (rows["sevens"] == 7).all()
    assert torch.equal(rows["given"][0], weight[5])
    assert made.tables["given"].size() == 7
    assert made.tables["root"].size() == 0
    assert EmbeddingBagCollection(tables=[made.embedding_bag_configs()[4]], device="meta").tables["given"].size() == 0


def test_virtual_tables_expire_and_what_has_no_equivalent_is_refused():
    make = functools.partial(theirs.EmbeddingBagConfig, num_embeddings=1 << 50, embedding_dim=4, name="v",
                             use_virtual_table=True)  # fmt: skip
    policy = theirs.TimestampBasedEvictionPolicy(eviction_ttl_mins=90)
    table = EmbeddingBagCollection(tables=[make(virtual_table_eviction_policy=policy)]).tables["v"]
    table.assign(torch.tensor([1]), torch.ones(1, 4), req_time=1_000_000)
    assert table.evict(1_000_000 + 7300) == 1
    with pytest.raises(UnsupportedError, match=r"CountBasedEvictionPolicy.*max_rows"):
        EmbeddingBagCollection(tables=[make(virtual_table_eviction_policy=theirs.CountBasedEvictionPolicy())])
    with pytest.raises(ConfigError, match="init_fn must be"):
        EmbeddingBagCollection(tables=[make(init_fn=lambda param: param.fill_(1))])
    with pytest.raises(ConfigError, match="data_type must be"):
        EmbeddingBagCollection(tables=configs(data_type=theirs.DataType.INT8))
    with pytest.raises(ConfigError, match="pooling must be"):
        EmbeddingBagCollection(tables=configs(pooling=theirs.PoolingType.NONE))
