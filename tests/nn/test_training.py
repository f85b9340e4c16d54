"""How rows learn: in backward, or when an optimizer steps. Plain values, then threads."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import ConfigError, UnsupportedError
from shoal.nn import EmbeddingTable, HashEmbedding, HashEmbeddingBag, SparseOptimizer, clip_grad_norm, clip_grad_value
from shoal.table import SlotOccurrenceThresholdConfig
from shoal.table.pooling import pool_reference
from shoal.table.protocol import FIRSTN, MAX, MEAN, SQRTN, SUM


def make_table(dim=1, lr=1.0, **options):
    options.setdefault("optimizer", shoal.Sgd(lr=lr))
    return shoal.HashTable(dim, initializer=options.pop("initializer", "zeros"), **options)


def rows(table, *ids):
    return table.lookup(torch.tensor(ids)).tolist()


# --- a forward reads, an update creates -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [HashEmbedding, HashEmbeddingBag])
def test_an_unknown_id_is_its_initial_row_in_training_and_zeros_in_evaluation(kind):
    table = make_table(4, initializer="uniform", lr=0.0)
    module = kind(table)
    ids = torch.tensor([[1, 2]])
    module.eval()
    assert not module(ids).any()
    module.train()
    out = module(ids)
    assert out.any()
    with torch.no_grad():
        assert torch.equal(module(ids), out)
    assert len(table) == 0
    out.sum().backward()
    assert len(table) == 2
    module.eval()
    assert module(ids).tolist() == out.tolist()


def test_without_insert_missing_an_unknown_id_is_zeros_in_training_too():
    table = make_table(4, initializer="uniform")
    bag = HashEmbeddingBag(table, insert_missing=False)
    out = bag([[5]])
    assert not out.any()
    assert len(table) == 0
    out.sum().backward()
    assert len(table) == 1


@pytest.mark.parametrize("filtered", [False, True])
def test_a_forward_without_backward_changes_nothing(filtered):
    config = SlotOccurrenceThresholdConfig(default_occurrence_threshold=2)
    hash_filter = shoal.table.create_hash_filter(1000, 1, config.SerializeToString()) if filtered else None
    table = make_table(4, initializer="uniform", hash_filter=hash_filter)
    for _ in range(3):
        table.assign(torch.tensor([7]), torch.ones(1, 4), 1000)
    for module in (HashEmbedding(table), HashEmbeddingBag(table), HashEmbeddingBag(table, combiner="max")):
        for _ in range(4):
            module(torch.tensor([[7, 8]]))
    assert len(table) == 1
    assert table.max_update_time == 1000
    assert not table.contains(torch.tensor([8])).any()
    HashEmbeddingBag(table)([[8]]).sum().backward()
    assert len(table) == (1 if filtered else 2)  # the filter has seen the id once


@pytest.mark.parametrize("threshold", [0, 2])
def test_an_active_filter_counts_updates_once_and_forward_creates_nothing(threshold):
    config = SlotOccurrenceThresholdConfig(default_occurrence_threshold=threshold)
    hash_filter = shoal.table.create_hash_filter(1000, 1, config.SerializeToString())
    table = make_table(hash_filter=hash_filter)
    bag = HashEmbeddingBag(table)
    out = bag([[1]])
    assert len(table) == 0
    out.sum().backward()
    assert len(table) == (0 if threshold else 1)
    for _ in range(3):
        bag([[1]]).sum().backward()
    assert len(table) == 1


def test_rows_carry_the_time_of_their_update():
    table = make_table(expire_after="30d")
    HashEmbeddingBag(table)([[1]]).sum().backward()
    assert table.max_update_time > 1_700_000_000


# --- fused: backward updates ------------------------------------------------------------------------------------------


def test_backward_updates_rows_with_the_tables_optimizer():
    table = make_table(2, optimizer=shoal.Adagrad(lr=0.5, initial_accumulator=0.0))
    bag = HashEmbeddingBag(table, combiner="sum")
    (bag([[3, 3], [4]]) * torch.tensor([[1.0], [3.0]])).sum().backward()
    assert rows(table, 3, 4) == [[-0.5, -0.5], [-0.5, -0.5]]


def test_one_backward_makes_one_step_however_often_a_table_is_used():
    table = make_table(optimizer=shoal.Adagrad(lr=1.0, initial_accumulator=0.0))
    first, second = HashEmbedding(table), HashEmbeddingBag(table)
    ids = torch.tensor([[1]])
    (first(ids).sum() + second(ids).sum() + second(ids).sum()).backward()
    assert rows(table, 1) == [[-1.0]]  # one step of size lr; several would be longer


def test_two_losses_make_two_steps_when_fused_and_one_with_an_optimizer():
    for held in (False, True):
        table = make_table(optimizer=shoal.Adagrad(lr=1.0, initial_accumulator=0.0))
        bag = HashEmbeddingBag(table)
        optimizer = SparseOptimizer(bag) if held else None
        bag([[1]]).sum().backward()
        bag([[1]]).sum().backward()
        if optimizer:
            assert rows(table, 1) == [[0.0]]
            optimizer.step()
        assert rows(table, 1)[0][0] == pytest.approx(-1.0 if held else -1 - 1 / 2**0.5)


def test_a_retained_graph_gives_its_gradient_twice():
    table = make_table()
    loss = HashEmbeddingBag(table)([[1]]).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert rows(table, 1) == [[-2.0]]


def test_a_graph_keeps_its_table_alive():
    loss = HashEmbeddingBag(make_table())([[1]]).sum()
    gc.collect()
    loss.backward()


def test_a_failing_backward_changes_nothing():
    table = make_table()
    bag = HashEmbeddingBag(table)
    dense = torch.zeros(1, 1, requires_grad=True)

    def fail(grad):
        raise RuntimeError("stop")

    middle = dense * 1.0  # its hook runs after the bag's gradient
    middle.register_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        (bag([[1]]) + middle).sum().backward()
    assert rows(table, 1) == [[0.0]]
    bag([[1]]).sum().backward()
    assert rows(table, 1) == [[-1.0]]


def test_gradients_of_other_tensors_alone_do_not_update_rows():
    table = make_table()
    weight = torch.ones(1, requires_grad=True)
    out = (HashEmbeddingBag(table)([[1]]) * weight).sum()
    torch.autograd.grad(out, weight)
    assert rows(table, 1) == [[0.0]]


def test_a_frozen_part_gets_no_gradient():
    table = make_table()
    bag = HashEmbeddingBag(table)
    with torch.no_grad():
        out = bag([[1]])
    assert not out.requires_grad
    with torch.inference_mode():
        bag([[1]])
    assert rows(table, 1) == [[0.0]]


def test_bad_gradients_raise_out_of_backward_and_leave_the_table():
    table = make_table()
    out = HashEmbeddingBag(table)([[1]])
    with pytest.raises(ConfigError, match="NaN or infinity"):
        out.backward(torch.tensor([[float("nan")]]))
    assert rows(table, 1) == [[0.0]]


def test_fused_updates_follow_the_tables_schedule():
    table = make_table(lr=shoal.table.PolynomialDecay(1.0, 2, 0.0))
    bag = HashEmbeddingBag(table, fused=True)
    for expected in (-1.0, -1.5, -1.5):
        bag([[1]]).sum().backward()
        assert rows(table, 1) == [[expected]]


def test_modules_of_one_table_agree_on_fused():
    table = make_table()
    HashEmbedding(table, fused=True)
    HashEmbedding(table)
    with pytest.raises(ConfigError, match="fused"):
        HashEmbedding(table, fused=False)
    with pytest.raises(ConfigError, match="must have a table"):
        SparseOptimizer(table)
    held = make_table()
    optimizer = SparseOptimizer(HashEmbedding(held))
    with pytest.raises(ConfigError, match="in a SparseOptimizer"):
        HashEmbedding(held, fused=True)
    del optimizer


def test_fused_false_waits_even_before_there_is_an_optimizer():
    table = make_table()
    bag = HashEmbeddingBag(table, fused=False)
    bag([[1]]).sum().backward()
    assert rows(table, 1) == [[0.0]]
    SparseOptimizer(bag).step()
    assert rows(table, 1) == [[-1.0]]


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max", "firstn"])
def test_weights_and_rows_get_the_gradients_of_the_same_model_in_torch(combiner):
    torch.manual_seed(0)
    table = make_table(3, initializer="uniform")
    length = 2 if combiner == "firstn" else None
    bag = HashEmbeddingBag(table, combiner=combiner, max_length=length)
    optimizer = SparseOptimizer(bag)
    ids, offsets = torch.tensor([1, 2, 1, 3, 3]), torch.tensor([0, 3, 3, 5])
    weights = torch.randn(5, requires_grad=True)
    before = table.lookup(torch.arange(4), insert_missing=True).requires_grad_()
    twin = weights.detach().clone().requires_grad_()
    kind = {"sum": SUM, "mean": MEAN, "sqrtn": SQRTN, "max": MAX, "firstn": FIRSTN}[combiner]
    expected = pool_reference(before[ids], offsets, twin, kind, length or 0)
    out = bag(ids, offsets, weights)
    torch.testing.assert_close(out, expected)
    grad = torch.randn(out.shape)
    out.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(weights.grad, twin.grad)
    got, sums = optimizer.gradients()[table.name]
    torch.testing.assert_close(sums, before.grad[got])


def test_weights_without_gradient_are_only_multiplied():
    table = make_table()
    bag = HashEmbeddingBag(table)
    bag([[1, 2]], per_sample_weights=[[2.0, 3.0]]).sum().backward()
    assert rows(table, 1, 2) == [[-2.0], [-3.0]]


def test_weights_of_another_precision_are_fine():
    weights = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    table = make_table().assign(torch.tensor([1]), torch.tensor([[2.0]]))
    HashEmbeddingBag(table)(torch.tensor([[1]]), per_sample_weights=weights).sum().backward()
    assert weights.grad.dtype == torch.bfloat16
    assert weights.grad.item() == 2.0


# --- SparseOptimizer --------------------------------------------------------------------------------------------------


def test_gradients_accumulate_over_backwards_and_modules_until_the_step():
    table = make_table(optimizer=shoal.Adagrad(lr=1.0, initial_accumulator=0.0))
    model = nn.ModuleDict({"a": HashEmbedding(table), "b": HashEmbeddingBag(table)})
    optimizer = SparseOptimizer(model)
    assert len(optimizer.param_groups) == 1
    ids = torch.tensor([[1]])
    for _ in range(3):
        (model["a"](ids).sum() + model["b"](ids).sum()).backward()
    got, sums = optimizer.gradients()[table.name]
    assert (got.tolist(), sums.tolist()) == ([1], [[6.0]])
    optimizer.step()
    assert rows(table, 1) == [[-1.0]]
    optimizer.step()  # nothing is pending
    assert rows(table, 1) == [[-1.0]]


def test_zero_grad_drops_what_waits():
    table = make_table()
    bag = HashEmbeddingBag(table)
    optimizer = SparseOptimizer(bag)
    bag([[1]]).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert rows(table, 1) == [[0.0]]
    assert optimizer.gradients() == {}


def test_ids_may_be_overwritten_before_the_step():
    table = make_table()
    bag = HashEmbeddingBag(table)
    optimizer = SparseOptimizer(bag)
    ids, grad = torch.tensor([[1]]), torch.ones(1, 1)
    bag(ids).backward(grad)
    ids.fill_(2)
    grad.fill_(100.0)
    optimizer.step()
    assert rows(table, 1, 2) == [[-1.0], [0.0]]


def test_a_model_trains_as_its_twin_with_nn_embedding_bag():
    torch.manual_seed(0)
    table = make_table(4, lr=0.1, initializer="uniform")
    mine = nn.Sequential(HashEmbeddingBag(table, combiner="mean"), nn.Linear(4, 1))
    twin = nn.Sequential(nn.EmbeddingBag(20, 4, mode="mean", include_last_offset=True), nn.Linear(4, 1))
    twin[1].load_state_dict(mine[1].state_dict())
    with torch.no_grad():
        twin[0].weight.copy_(table.lookup(torch.arange(20), insert_missing=True))
    dense = torch.optim.SGD(mine[1].parameters(), lr=0.1)
    sparse = SparseOptimizer(mine)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(20):
        ids, offsets = torch.randint(0, 20, (30,)), torch.tensor([0, 5, 5, 12, 30])
        y = torch.randn(4, 1)
        losses = []
        for model, optimizers in ((mine, [dense, sparse]), (twin, [theirs])):
            for optimizer in optimizers:
                optimizer.zero_grad()
            out = model[1](model[0](ids, offsets))
            losses.append(nn.functional.mse_loss(out, y))
            losses[-1].backward()
            if model is mine:
                norm = clip_grad_norm(sparse, 0.5, parameters=mine.parameters())
            else:
                torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.5))
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(*losses)
    torch.testing.assert_close(table.lookup(torch.arange(20)), twin[0].weight.detach(), rtol=1e-4, atol=1e-5)


def test_clipping_counts_the_summed_gradient_of_a_row_and_dense_ones_too():
    table = make_table()
    bag = HashEmbeddingBag(table)
    optimizer = SparseOptimizer(bag)
    weight = nn.Parameter(torch.zeros(1))
    (bag([[1, 1, 1]]).sum() + 4 * weight.sum()).backward()
    assert clip_grad_norm(optimizer, 1.0, parameters=[weight]).item() == pytest.approx(5.0)
    optimizer.step()
    assert rows(table, 1)[0][0] == pytest.approx(-0.6, abs=1e-5)
    assert weight.grad.item() == pytest.approx(0.8, abs=1e-5)
    assert optimizer.clip_grad_norm(1.0).item() == 0.0  # nothing is pending
    (100 * bag([[1]])).sum().backward()
    optimizer.gradients()[table.name][1].fill_(float("inf"))
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.clip_grad_norm(1.0, error_if_nonfinite=True)
    clip_grad_value(optimizer, 2.0)
    optimizer.step()
    assert rows(table, 1)[0][0] == pytest.approx(-2.6, abs=1e-5)


def test_a_bad_gradient_keeps_waiting_so_that_it_can_be_dropped():
    table = make_table()
    bag = HashEmbeddingBag(table)
    optimizer = SparseOptimizer(bag)
    bag([[1]]).backward(torch.tensor([[float("inf")]]))
    with pytest.raises(ConfigError, match=table.name):
        optimizer.step()
    assert len(optimizer.gradients()) == 1
    assert optimizer.global_step == 0
    optimizer.zero_grad()
    bag([[1]]).sum().backward()
    optimizer.step()
    assert rows(table, 1) == [[-1.0]]


@pytest.mark.parametrize("kind", ["step", "lambda", "cosine"])
def test_schedulers_of_torch_set_the_learning_rate(kind):
    table = make_table(lr=0.5)
    bag = HashEmbeddingBag(table)
    optimizer = SparseOptimizer(bag)
    scheduler = {
        "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2),
    }[kind]()
    total = 0.0
    for _ in range(3):
        total -= optimizer.param_groups[0]["lr"]
        bag([[1]]).sum().backward()
        optimizer.step()
        scheduler.step()
        assert rows(table, 1)[0][0] == pytest.approx(total)


def test_lr_scales_the_tables_own_schedule_and_may_be_given():
    table = make_table(lr=shoal.table.PolynomialDecay(1.0, 4, 0.0))
    bag = HashEmbeddingBag(table)
    optimizer = SparseOptimizer(bag, lr=0.5)
    bag([[1]]).sum().backward()
    optimizer.step(global_step=2)
    assert rows(table, 1) == [[-0.25]]
    assert optimizer.global_step == 3


def test_a_closure_is_run_and_its_loss_returned():
    table = make_table()
    bag = HashEmbeddingBag(table)
    optimizer = SparseOptimizer(bag)

    def closure():
        loss = bag([[1]]).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure=closure).item() == 0.0
    assert rows(table, 1) == [[-1.0]]
    assert optimizer.step(closure).item() == -1.0  # as in torch's optimizers
    assert optimizer.global_step == 2


def test_tables_of_one_name_are_clipped_each():
    tables = {key: shoal.HashTable(1, name="same", optimizer=shoal.Sgd(lr=1.0), initializer="zeros") for key in "ui"}
    bag = HashEmbeddingBag(tables)
    optimizer = SparseOptimizer(bag)
    (bag({"u": [[1]], "i": [[2]]}) * torch.tensor([3.0, 4.0])).sum().backward()
    assert {name: grads.tolist() for name, (_, grads) in optimizer.gradients().items()} == {
        "same": [[3.0]],
        "same#2": [[4.0]],
    }
    assert optimizer.clip_grad_norm(1.0).item() == pytest.approx(5.0)
    optimizer.step()
    assert rows(tables["u"], 1)[0][0] == pytest.approx(-0.6)
    assert rows(tables["i"], 2)[0][0] == pytest.approx(-0.8)


def test_the_optimizers_state_is_small_and_comes_back():
    table = make_table()
    optimizer = SparseOptimizer(table, lr=0.25)
    optimizer.step(global_step=7)
    state = optimizer.state_dict()
    other = SparseOptimizer(make_table())
    other.load_state_dict(state)
    assert other.global_step == 8
    assert other.param_groups[0]["lr"] == 0.25
    assert other.param_groups[0]["base_lr"] == 1.0


def test_the_optimizer_takes_models_modules_and_tables_but_nothing_else():
    tables = [make_table() for _ in range(3)]
    model = nn.Sequential(nn.Linear(1, 1), HashEmbedding(tables[0]))
    optimizer = SparseOptimizer([model, HashEmbeddingBag({"a": tables[1], "b": tables[0]}), tables[2]])
    assert [group["table"] for group in optimizer.param_groups] == [tables[i].name for i in (0, 1, 2)]
    with pytest.raises(ConfigError, match="must have a table"):
        SparseOptimizer(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="int"):
        SparseOptimizer(3)
    with pytest.raises(ConfigError, match="make another"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})


def test_a_rate_of_zero_cannot_be_scaled():
    table = make_table(lr=0.0)
    optimizer = SparseOptimizer(table, lr=0.1)
    HashEmbeddingBag(table)([[1]]).sum().backward()
    with pytest.raises(ConfigError, match="rate other than 0"):
        optimizer.step()


# --- precision, places, other tables ----------------------------------------------------------------------------------


def test_autocast_leaves_rows_in_float32():
    table = make_table(4, initializer="uniform")
    model = nn.Sequential(HashEmbeddingBag(table), nn.Linear(4, 1))
    before = table.lookup(torch.tensor([1]), insert_missing=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model[0]([[1]])
        out = model[1](hidden)
    assert hidden.dtype == torch.float32
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    torch.testing.assert_close(before - table.lookup(torch.tensor([1])), model[1].weight.detach(), rtol=0.02, atol=0.01)


def test_a_model_in_half_precision_gets_its_embeddings_so():
    table = make_table(4, initializer="uniform")
    model = nn.Sequential(HashEmbeddingBag(table), nn.Linear(4, 1)).bfloat16()
    out = model([[1]])
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert table.lookup(torch.tensor([1])).dtype == torch.float32
    assert model.to("cpu", torch.float64)([[1]]).dtype == torch.float64


def test_unknown_devices_are_refused():
    with pytest.raises(UnsupportedError, match="meta"):
        HashEmbedding(make_table()).to("meta")


class Elsewhere:
    """A table with only what the protocol asks for."""

    name, dim_size = "elsewhere", 1

    def __init__(self):
        self.rows, self.calls = {}, []

    def lookup(self, ids):
        return torch.tensor([[self.rows.get(i, 0.0)] for i in ids.tolist()]).reshape(-1, 1)

    def apply_gradients(self, ids, grads, global_step=0):
        self.calls.append((ids.tolist(), global_step))
        for i, (grad,) in zip(ids.tolist(), grads.tolist(), strict=True):
            self.rows[i] = self.rows.get(i, 0.0) - grad


def test_any_table_with_the_protocol_will_do():
    table = Elsewhere()
    assert isinstance(table, EmbeddingTable)
    bag = HashEmbeddingBag(table)
    bag([[1, 1, 2]]).sum().backward()
    assert table.rows == {1: -2.0, 2: -1.0}
    assert table.calls == [([1, 2], 0)]  # it does not accept enable_dedup, so it gets distinct ids
    assert bag.state_dict() == {}
    optimizer = SparseOptimizer(bag)
    bag([[1]]).sum().backward()
    optimizer.step()
    assert table.rows[1] == -3.0
    optimizer.param_groups[0]["lr"] = 0.5
    bag([[1]]).sum().backward()
    with pytest.raises(UnsupportedError, match="elsewhere"):
        optimizer.step()
    twin = copy.deepcopy(bag)
    twin.table.rows.clear()
    assert table.rows[1] == -3.0


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [False, True])
def test_threads_that_train_one_table_lose_nothing(held):
    table = make_table()
    bag = HashEmbeddingBag(table)
    optimizer = SparseOptimizer(bag) if held else None
    errors = []

    def work(number):
        try:
            for i in range(50):
                (bag([[7, number], [i]]).sum() + bag([[7]]).sum()).backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(1000 + n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    if optimizer:
        assert rows(table, 7) == [[0.0]]
        optimizer.step()
    assert rows(table, 1000, 1003) == [[-50.0]] * 2
    assert rows(table, 7)[0][0] == -(2 * 200 + 4)  # and once per thread as `i`
    assert rows(table, 49) == [[-4.0]]
