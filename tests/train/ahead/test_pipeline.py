"""Pipelines in one process: what is done ahead, in which order, and that results do not change.

Events prove the overlap: a step waits until the next batch is read, which never happens if nothing overlaps.
"""

import doctest
import gc
import importlib
import threading
import traceback

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import ConfigError
from shoal.nn import EmbeddingBagCollection, HashEmbedding, HashEmbeddingBag, SparseOptimizer
from shoal.train import Pipeline

DEADLINE_S = 60


def pipeline_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("shoal-pipeline")]


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    gc.collect()
    for thread in pipeline_threads():
        thread.join(DEADLINE_S)
    assert pipeline_threads() == []


class Clicks(nn.Module):
    """Two modules over three tables, and a net."""

    def __init__(self, optimizer="adagrad", make=shoal.HashTable):
        super().__init__()
        options = {"optimizer": optimizer, "seed": 3}
        self.bags = EmbeddingBagCollection(
            {"user": make(4, name="user", **options), "item": make(4, name="item", **options)},
            {"user": "user", "clicked": "item", "shown": "item"},
        )
        self.words = HashEmbedding(make(2, name="words", **options))
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(14, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, batch):
        rows = torch.cat([self.bags(batch["bags"]), self.words(batch["words"])], 1)
        logits = self.net(rows).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch["label"]), logits

    def state(self):
        tables = {**self.bags.tables, "words": self.words.table}
        found = {name: table.lookup(torch.arange(50)) for name, table in tables.items()}
        return found | {name: value.clone() for name, value in self.net.state_dict().items()}


def make_batches(n=12, size=7):
    g = torch.Generator().manual_seed(1)

    def ids(*shape):
        return torch.randint(50, shape, generator=g)

    return [
        {
            "bags": {"user": ids(size, 1), "clicked": ids(size, 3), "shown": ids(size, 2)},
            "words": ids(size),
            "label": torch.rand(size, generator=g).round(),
        }
        for _ in range(n)
    ]


def plain_loop(model, batches):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(5)
    outs = []
    for batch in batches:
        optimizer.zero_grad()
        loss, out = model(batch)
        loss.backward()
        optimizer.step()
        outs.append(out.detach())
    return outs


def equal_states(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["call", "progress", "batches", "step"])
def test_without_staleness_results_are_those_of_a_plain_loop_to_the_last_bit(way):
    expected = Clicks()
    outs = plain_loop(expected, make_batches())
    model, got = Clicks(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch):
        optimizer.zero_grad()
        loss, out = model(batch)
        loss.backward()
        optimizer.step()
        return out.detach()

    torch.manual_seed(5)
    if way == "call":
        got = list(Pipeline(model, optimizer)(make_batches()))
    elif way == "step":
        got = list(Pipeline(model, step=step)(make_batches()))
    elif way == "progress":
        pipeline, batches = Pipeline(model, optimizer), iter(make_batches())
        while True:
            try:
                got.append(pipeline.progress(batches))
            except StopIteration:
                break
    else:
        pipeline = Pipeline(model)
        got = [step(batch) for batch in pipeline.batches(make_batches())]
        report = pipeline.report()
        assert report["modules"] == {"bags": True, "words": True}
        assert report["located"] + report["not_located"] == 2 * 11  # some batches had been read before the first step
    assert all(map(torch.equal, got, outs))
    assert len(got) == len(outs)
    equal_states(model.state(), expected.state())


def test_the_next_batch_is_read_while_a_step_runs():
    read = [threading.Event() for _ in range(6)]
    model, seen = Clicks(), []

    def source():
        for event, batch in zip(read, make_batches(6), strict=True):
            event.set()
            yield batch

    def step(batch):
        number = len(seen)
        seen.append(number)
        if number < 5:
            assert read[number + 1].wait(DEADLINE_S), "the next batch is not read while this one is learnt from"

    list(Pipeline(model, step=step)(source()))
    assert seen == list(range(6))


def test_ids_of_the_next_batch_are_located_while_a_step_runs():
    model = Clicks()
    located = [threading.Event() for _ in range(6)]
    inner, calls, numbers = model.words.ask, [], iter(range(-1, 6))

    def ask(ids):
        found = inner(ids)
        if threading.current_thread() is not threading.main_thread():
            located[len(calls)].set()
            calls.append(threading.current_thread().name)
        return found

    def step(batch):
        number = next(numbers)
        model(batch)[0].backward()
        if 0 <= number < 5:
            assert located[number + 1].wait(DEADLINE_S)

    pipeline = Pipeline(model, step=step)
    list(pipeline(make_batches(1)))  # shows which ids the modules get
    model.words.ask = ask
    list(pipeline(make_batches(6)))
    assert set(calls) == {"shoal-pipeline-find"}
    assert len(calls) == 6
    assert pipeline.report()["located"] == 2 * 6
    assert pipeline.report()["not_located"] == 0


def test_memory_is_bounded_by_what_waits():
    made, done = [], []

    def source():
        for number, batch in enumerate(make_batches(20)):
            made.append(number)
            assert number - len(done) <= 4  # two wait, the thread holds one, one is being learnt
            yield batch

    def step(batch):
        threading.Event().wait(0.002)
        done.append(1)

    list(Pipeline(Clicks(), step=step, ahead=2)(source()))
    assert len(done) == 20


def test_a_plain_model_and_any_kind_of_batch():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.ones(2, 3) * n for n in range(5)]
    outs = list(Pipeline(model, optimizer)(batches))
    assert [out.shape for out in outs] == [(2, 1)] * 5
    assert list(Pipeline(model, step=lambda batch: batch)([None, 1, "x"])) == [None, 1, "x"]


def test_a_transform_runs_in_the_reading_thread_and_makes_ids_known():
    model = nn.Sequential(HashEmbeddingBag(shoal.HashTable(2, seed=1)))
    where = set()

    def transform(batch):
        where.add(threading.current_thread() is threading.main_thread())
        return {"ids": batch % 10}

    def step(batch):
        model[0](batch["ids"]).sum().backward()

    pipeline = Pipeline(model, step=step, transform=transform)
    for _ in range(2):
        list(pipeline([torch.arange(12).view(4, 3) + n for n in range(4)]))
    assert where == {False}
    assert pipeline.report()["located"] >= 4
    assert pipeline.report()["modules"] == {"0": True}

    def computes(batch):
        model[0](batch % 10).sum().backward()

    pipeline = Pipeline(model, step=computes)
    list(pipeline([torch.arange(12).view(4, 3) + n for n in range(4)]))
    assert pipeline.report()["modules"] == {"0": False}


def test_batches_of_many_forms_are_found_ahead():
    class Pair:
        def __init__(self, ids, weights):
            self.ids, self.inner = ids, {"w": weights}

    table = shoal.HashTable(2, seed=1)
    bag = HashEmbeddingBag(table, fused=False)
    forms = {
        "tensor": (lambda ids: ids, lambda b: bag(b)),
        "tuple": (lambda ids: (ids, 1), lambda b: bag(b[0])),
        "pair": (lambda ids: (ids.view(-1), torch.arange(0, 13, 3)), lambda b: bag(b)),
        "new pair": (lambda ids: [ids.view(-1), torch.arange(0, 13, 3)], lambda b: bag((b[0], b[1]))),
        "two arguments": (lambda ids: [ids.view(-1), torch.arange(0, 13, 3)], lambda b: bag(b[0], offsets=b[1])),
        "object": (lambda ids: Pair(ids, torch.ones(4, 3)), lambda b: bag(b.ids, per_sample_weights=b.inner["w"])),
        "dict": (lambda ids: {"a": {"b": ids}}, lambda b: bag(b["a"]["b"])),
        "lists": (lambda ids: ids.tolist(), lambda b: bag(b)),
        "ragged": (lambda ids: shoal.Ragged.from_lists(ids.tolist()), lambda b: bag(b)),
    }
    batches = [torch.arange(12).view(4, 3) + n for n in range(4)]
    expected = [bag(ids) for ids in batches]
    for name, (make, forward) in forms.items():
        pipeline = Pipeline(bag, step=forward)
        list(pipeline([make(batches[0])]))
        outs = list(pipeline([make(ids) for ids in batches]))
        assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True)), name
        assert pipeline.report()["located"] == 4, name


def test_a_forward_of_other_ids_than_those_located_reads_its_own():
    table = shoal.HashTable(1, optimizer=shoal.Sgd(lr=1.0), initializer="zeros")
    bag = HashEmbeddingBag(table)
    table.assign(torch.arange(10), torch.arange(10.0).view(-1, 1))
    turn = iter([0, 0, 1, 2, 3, 4])

    def step(batch):
        with torch.no_grad():
            ids = batch if next(turn) % 2 == 0 else batch + 1
            return bag(ids).flatten().tolist(), bag(torch.tensor([[9]])).item()

    pipeline = Pipeline(bag, step=step)
    list(pipeline([torch.tensor([[3]])]))
    outs = list(pipeline([torch.tensor([[n]]) for n in range(5)]))
    assert outs == [([0.0], 9.0), ([2.0], 9.0), ([2.0], 9.0), ([4.0], 9.0), ([4.0], 9.0)]
    assert pipeline.report()["located"] == 3


def test_evaluation_predicts_and_learns_nothing():
    model = Clicks()
    list(Pipeline(model, torch.optim.Adam(model.parameters()))(make_batches()))
    before = model.state()
    model.eval()
    outs = list(Pipeline(model, torch.optim.Adam(model.parameters()))(make_batches()))
    with torch.no_grad():
        assert all(torch.equal(out, model(batch)[1]) for out, batch in zip(outs, make_batches(), strict=True))
    equal_states(model.state(), before)


def test_a_module_that_changes_its_mode_does_not_take_what_was_located_in_the_other():
    bag = HashEmbeddingBag(shoal.HashTable(2, seed=1))
    turn = iter(range(5))

    def step(batch):
        bag.train(next(turn) < 3)
        return bool(bag(batch).any())

    pipeline = Pipeline(bag, step=step)
    list(pipeline([torch.tensor([[5]])]))
    # In evaluation mode an unknown id gives zeros; the next batch was located before the change.
    assert list(pipeline([torch.tensor([[5]])] * 4)) == [True, True, False, False]


@pytest.mark.parametrize("staleness", [0, 1])
def test_activation_checkpointing_reads_what_was_located_again(staleness):
    from torch.utils.checkpoint import checkpoint

    seen = []
    for use in (False, True):
        table = shoal.HashTable(3, optimizer=shoal.Sgd(lr=0.1), seed=1)
        bag, net = HashEmbeddingBag(table), nn.Linear(3, 1)
        nn.init.ones_(net.weight), nn.init.zeros_(net.bias)

        def forward(ids, bag=bag, net=net):
            return net(bag(ids)).tanh().sum()

        def step(batch, forward=forward, use=use):
            loss = checkpoint(forward, batch, use_reentrant=False) if use else forward(batch)
            loss.backward()
            return loss.item()

        pipeline = Pipeline(bag, step=step, staleness=staleness)
        seen.append((list(pipeline([torch.arange(6).view(2, 3)] * 5)), table.lookup(torch.arange(6))))
    assert seen[0][0] == seen[1][0]
    assert torch.equal(seen[0][1], seen[1][1])


# --- stale ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
@pytest.mark.parametrize("holds", [False, True])
def test_rows_are_read_after_the_update_of_the_batch_that_the_staleness_says(staleness, holds):
    table = shoal.HashTable(1, optimizer=shoal.Sgd(lr=1.0), initializer="zeros")
    bag = HashEmbeddingBag(table)
    optimizer = SparseOptimizer(bag) if holds else None

    def step(batch):
        out = bag(batch)
        out.sum().backward()
        if optimizer is not None:
            optimizer.step()
        return -out.item()

    pipeline = Pipeline(bag, step=step, staleness=staleness)
    batches = [torch.tensor([[7]])] * 10
    seen = list(pipeline(batches))
    # The first batch shows what to locate, so the next ones are read after its update.
    assert seen == [0, *(max(1, n - staleness) for n in range(1, 10))]
    assert list(pipeline(batches)) == [10 + max(0, n - staleness) for n in range(10)]
    assert table.lookup(torch.tensor([7])).item() == -20


@pytest.mark.parametrize("staleness", [1, 2])
def test_stale_runs_are_equal_to_each_other_to_the_last_bit(staleness):
    states = []
    for _ in range(2):
        model = Clicks()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        torch.manual_seed(5)
        outs = list(Pipeline(model, optimizer, staleness=staleness)(make_batches()))
        states.append(model.state() | {f"out {n}": out for n, out in enumerate(outs)})
    equal_states(*states)


def test_rows_and_updates_are_made_beside_the_step():
    """Step t goes on only when the rows of t + 1 were read and the update of t - 1 was made, by another thread."""
    table = shoal.HashTable(1, optimizer=shoal.Sgd(lr=1.0), initializer="zeros")
    bag = HashEmbeddingBag(table)
    changed, rows, updates = threading.Condition(), [], []

    class Watched:
        """A table of one's own, which the modules use through the adapter."""

        dim_size, name = 1, "watched"

        def lookup(self, ids, **_):
            with changed:
                rows.append(threading.current_thread().name)
                changed.notify_all()
            return table.lookup(ids)

        def apply_gradients(self, ids, grads, global_step=0):
            table.apply_gradients(ids, grads)
            with changed:
                updates.append(threading.current_thread().name)
                changed.notify_all()

    bag, numbers = HashEmbeddingBag(Watched()), iter(range(6))

    def step(batch):
        number = next(numbers)
        out = bag(batch)
        if 0 < number < 5:
            with changed:
                assert changed.wait_for(lambda: len(rows) >= number + 2 and len(updates) >= number, DEADLINE_S)
        out.sum().backward()

    list(Pipeline(bag, step=step, staleness=1)([torch.tensor([[7]])] * 6))
    assert set(rows) == set(updates) == {"shoal-pipeline-tables"}
    assert table.lookup(torch.tensor([7])).item() == -6


def test_flush_and_state_dicts_wait_for_updates():
    table = shoal.HashTable(1, optimizer=shoal.Sgd(lr=1.0), initializer="zeros")
    bag, seen = HashEmbeddingBag(table), []
    pipeline = Pipeline(bag, staleness=2)
    for number, batch in enumerate(pipeline.batches([torch.tensor([[7]])] * 6)):
        bag(batch).sum().backward()
        if number % 2:
            seen.append(bag.state_dict()["table.rows"].flatten()[0].item())
        else:
            pipeline.flush()
            seen.append(table.lookup(torch.tensor([7])).item())
    assert seen == [-1, -2, -3, -4, -5, -6]


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_error_of_the_source_comes_at_its_step_with_its_traceback(staleness):
    done = []

    def broken_source():
        yield from make_batches(4)
        raise OSError("the disk burns")

    model = Clicks()

    def step(batch):
        model(batch)[0].backward()
        done.append(1)

    with pytest.raises(OSError, match="burns") as caught:
        list(Pipeline(model, step=step, staleness=staleness)(broken_source()))
    assert len(done) == 4
    text = "".join(traceback.format_exception(caught.value))
    assert "in broken_source" in text
    assert "reading batch 4 ahead" in text


@pytest.mark.parametrize("staleness", [0, 1])
def test_ids_that_cannot_be_located_are_refused_at_their_step(staleness):
    bag, done = HashEmbeddingBag(shoal.HashTable(2)), []
    batches = [torch.tensor([[1]]), torch.tensor([[2]]), torch.tensor([[0.5]]), torch.tensor([[3]])]

    def step(batch):
        bag(batch).sum().backward()
        done.append(1)

    pipeline = Pipeline(bag, step=step, staleness=staleness)
    list(pipeline(batches[:1]))
    with pytest.raises(ConfigError, match="int") as caught:
        list(pipeline(batches))
    assert len(done) == 3
    assert "locating the ids of batch 2" in "".join(traceback.format_exception(caught.value))


def test_an_update_that_is_refused_comes_before_another_step_is_over():
    bag, done = HashEmbeddingBag(shoal.HashTable(1, name="rows")), []

    def step(batch):
        out = bag(batch["ids"]).sum()
        (out * batch["factor"]).backward()
        done.append(1)

    batches = [{"ids": torch.tensor([[1]]), "factor": float("nan") if n == 2 else 1.0} for n in range(8)]
    with pytest.raises(ConfigError, match=r"'rows'.*NaN") as caught:
        list(Pipeline(bag, step=step, staleness=1)(batches))
    assert len(done) in (3, 4)
    assert "_update_now" in "".join(traceback.format_exception(caught.value))
    assert bag(torch.tensor([[1]])).isfinite().all()  # the lane has ended


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("how", ["break", "error", "interrupt", "close"])
def test_stopping_early_ends_the_threads_and_applies_what_was_learnt(staleness, how):
    table = shoal.HashTable(1, optimizer=shoal.Sgd(lr=1.0), initializer="zeros")
    bag = HashEmbeddingBag(table)

    def endless():
        while True:
            yield torch.tensor([[7]])

    def step(batch):
        bag(batch).sum().backward()

    pipeline = Pipeline(bag, step=step, staleness=staleness)
    kind = {"error": ValueError, "interrupt": KeyboardInterrupt}.get(how)
    if how == "close":
        batches = endless()
        for _ in range(5):
            pipeline.progress(batches)
        pipeline.close()
    elif how == "break":
        for number, _ in enumerate(pipeline(endless())):
            if number == 4:
                break
    else:

        def loop():
            for number, batch in enumerate(pipeline.batches(endless())):
                if number == 5:
                    raise kind("enough")
                step(batch)

        with pytest.raises(kind):
            loop()
        pipeline.close()
    gc.collect()
    assert table.lookup(torch.tensor([7])).item() == -5
    assert bag(torch.tensor([[7]])).item() == -5


def test_another_pass_takes_the_place_of_one_that_was_left():
    bag = HashEmbeddingBag(shoal.HashTable(1))
    pipeline = Pipeline(bag, step=lambda batch: bag(batch).sum().backward(), staleness=1)
    left = pipeline([torch.tensor([[7]])] * 100)
    next(left)
    assert len(list(pipeline([torch.tensor([[7]])] * 3))) == 3
    with pytest.raises(RuntimeError, match="closed"):
        list(left)


def test_bad_settings_are_refused():
    model = nn.Linear(1, 1)
    for bad, match in (
        ({"staleness": -1}, "staleness must be >= 0"),
        ({"ahead": -1}, "ahead must be >= 0"),
        ({"on_uneven": "wait"}, "on_uneven must be"),
        ({"step": print, "optimizer": torch.optim.SGD(model.parameters())}, "step must not be combined"),
    ):
        with pytest.raises(ConfigError, match=match):
            Pipeline(model, **bad)
    with pytest.raises(ConfigError, match="must return the loss"):
        list(Pipeline(HashEmbeddingBag(shoal.HashTable(1), output="dict"))([{"a": [[1]]}]))


@pytest.mark.parametrize("module", ["train.ahead.pipeline", "nn.module"])
def test_examples_in_docstrings_work(module):
    assert doctest.testmod(importlib.import_module(f"shoal.{module}")).failed == 0
