"""A collection over ranks against TorchRec's, each with its own planner and its own pipeline, on gloo.

    python -m benchmarks.sharded_torchrec [--ranks 2] [--rounds 5]

Both libraries train the same model: bags of tables, a layer above them, a loss. Each uses its own planner, and trains
with and without its pipeline on the same batches, in turn in the same processes; the faster of the two counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Report, parser

ROWS, DIM, BATCH = 500_000, 64, 4096
NAMES = [f"t{number}" for number in range(4)]
STEPS = 8


class Model(torch.nn.Module):
    """``bags`` of either library, and a small loss."""

    def __init__(self, bags: Any) -> None:
        super().__init__()
        self.bags = bags
        self.net = torch.nn.Linear(len(NAMES) * DIM, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.net(self.bags(batch.ids)).square().mean()


class TheirModel(Model):
    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.net(self.bags(batch.ids).values()).square().mean()
        return loss, loss


class Batch:
    """Ids of a batch, in the forms of both libraries."""

    def __init__(self, ids: Any) -> None:
        self.ids = ids


def ids_of(rank: int) -> list[dict[str, torch.Tensor]]:
    make = torch.Generator().manual_seed(rank)
    return [{name: torch.randint(ROWS, (BATCH, 1), generator=make) for name in NAMES} for _ in range(STEPS)]


def ours(rank: int, world: int, costs: Any) -> dict[str, Callable[[], None]]:
    import shoal
    from shoal.nn import EmbeddingBagCollection
    from shoal.sharded import loads_of, plan, shard
    from shoal.train import Pipeline

    given, first = [Batch(ids) for ids in ids_of(rank)], [Batch(ids) for ids in ids_of(0)]

    def model() -> Model:
        torch.manual_seed(0)
        tables = {name: shoal.HashTable(DIM, name=name, optimizer=shoal.Sgd(lr=0.1), seed=1) for name in NAMES}
        return Model(EmbeddingBagCollection(tables))

    local = model()
    for table in local.bags.tables.values():
        table.assign(torch.arange(ROWS), torch.zeros(ROWS, DIM))
    turn = iter(range(1 << 30))
    loads = loads_of(local, lambda: local(first[next(turn) % STEPS]).backward())
    made = plan(loads, world, costs)
    if rank == 0:
        print(made)
    plain, piped = shard(local, made), shard(model(), made)
    optimizer = torch.optim.SGD(plain.net.parameters(), lr=0.01)
    pipeline = Pipeline(piped, torch.optim.SGD(piped.net.parameters(), lr=0.01))

    def loop() -> None:
        for batch in given:
            optimizer.zero_grad()
            plain(batch).backward()
            optimizer.step()

    def with_pipeline() -> None:
        for _ in pipeline(iter(given)):
            pass

    return {"ours": loop, "ours, pipeline": with_pipeline}


def theirs(rank: int, world: int) -> dict[str, Callable[[], None]]:
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.distributed.types import ShardingEnv
    from torchrec.streamable import Pipelineable

    class Piped(Batch, Pipelineable):
        def to(self, device: Any, non_blocking: bool = False) -> Batch:
            return self

        def record_stream(self, stream: Any) -> None:
            pass

    device = torch.device("cpu")
    made = []
    for _ in range(2):
        configs = [torchrec.EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
                   for name in NAMES]  # fmt: skip
        collection = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
        sharders: list[Any] = [EmbeddingBagCollectionSharder(fused_params=fused)]
        planner = EmbeddingShardingPlanner(topology=Topology(world_size=world, compute_device="cpu"))
        model = TheirModel(collection)
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
        if rank == 0 and not made:
            kinds = {name: each.sharding_type for each in plan.plan.values() for name, each in each.items()}
            print(f"TorchRec plans {kinds}")
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        made.append(DistributedModelParallel(model, env=env, device=device, plan=plan, sharders=sharders,
                                             init_data_parallel=False))  # fmt: skip
    given = [
        Piped(
            torchrec.KeyedJaggedTensor.from_lengths_sync(
                keys=NAMES, values=torch.cat([ids[name].view(-1) for name in NAMES]),
                lengths=torch.ones(len(NAMES) * BATCH, dtype=torch.int32),
            )
        )
        for ids in ids_of(rank)
    ]  # fmt: skip
    plain, piped = made
    optimizers = [torch.optim.SGD(model.module.net.parameters(), lr=0.01) for model in made]
    pipeline = TrainPipelineSparseDist(piped, optimizers[1], device)

    def loop() -> None:
        for batch in given:
            optimizers[0].zero_grad()
            plain(batch)[0].backward()
            optimizers[0].step()

    def with_pipeline() -> None:
        batches: Iterator[Batch] = iter(given)
        for _ in given:
            pipeline.progress(batches)

    return {"TorchRec": loop, "TorchRec, pipeline": with_pipeline}


def on_rank(rank: int, world: int, costs: Any, rounds: int) -> dict[str, float]:
    import warnings

    import shoal

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # as under torchrun
    shoal.set_num_threads(1)
    calls = ours(rank, world, costs) | theirs(rank, world)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            dist.barrier()
            times[name].append((time.perf_counter() - begin) / STEPS)
    return {name: statistics.median(series[1:]) for name, series in times.items()}


def main() -> None:
    from benchmarks import sharded_torchrec as own  # other processes find its functions by this name
    from shoal.plan.costs import measure
    from shoal.testing import run_ranks

    made = parser(__doc__ or "")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--assumed", action="store_true", help="plan with assumed costs instead of measured ones")
    options = made.parse_args()
    report = Report("sharded_torchrec")
    report.start()
    found = run_ranks(options.ranks, own.on_rank, None if options.assumed else measure(), options.rounds, timeout_s=500)
    seconds = {name: max(one[name] for one in found) for name in found[0]}
    rate = {name: options.ranks * BATCH / each / 1e3 for name, each in seconds.items()}
    for name, each in rate.items():
        print(f"{name:20} {each:8.1f} k samples/s, {1e3 * seconds[name]:.2f} ms per step")
    best, rival = (max(value for name, value in rate.items() if name.startswith(who)) for who in ("ours", "TorchRec"))
    report.add(f"{len(NAMES)} tables, dim {DIM}, {options.ranks} ranks", f"{best:.0f} k samples/s", f"{rival:.0f} k",
               best / rival, 2.5)  # fmt: skip
    report.save(options.json)


if __name__ == "__main__":
    main()
