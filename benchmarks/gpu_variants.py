"""Other ways to do the same on a GPU (`shoal._gpu`), checked against the CPU's results and timed against today's.

    python -m benchmarks.gpu_variants                        # everything, under four minutes on an H200
    python -m benchmarks.gpu_variants insert train --json out.json
    python -m benchmarks.gpu_variants --check                # small sizes, nothing is timed: for compute-sanitizer
    TRITON_INTERPRET=1 python -m benchmarks.gpu_variants     # tiny sizes on the CPU: does it run at all?

A variant that fails is told of and left out; the others go on. Ratios are today's time over the variant's: above 1 is
faster. Today's choice is timed first and last in each group: what the two differ by is noise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import shoal
from benchmarks import gpu
from shoal import _gpu, ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
N = 600 if INTERPRETED else 1 << 20
SLOTS = 1 << 13 if INTERPRETED else 1 << 27
RESULTS: dict[str, Any] = {}

LISTED = {"insert": "listed"}
INSERTS: dict[str, dict[str, Any]] = {
    "today": {},
    "joint 32x1": {"insert_ids": 32, "insert_warps": 1},
    "joint 64x2": {"insert_ids": 64, "insert_warps": 2},
    "joint 256x8": {"insert_ids": 256, "insert_warps": 8},
    "joint 64x4": {"insert_ids": 64},
    "listed": LISTED,
    "listed, claim 32x1": {**LISTED, "claim_ids": 32, "claim_warps": 1},
    "listed, claim 256x4": {**LISTED, "claim_ids": 256},
    "listed, find 32x1": {**LISTED, "find_ids": 32, "find_warps": 1, "claim_ids": 32, "claim_warps": 1},
    "listed, find 64x4": {**LISTED, "find_warps": 4},
    "listed, Triton's swap": {**LISTED, "inline": 0},
    "direct": {"direct": 1},
    "listed, direct": {**LISTED, "direct": 1},
}
FINDS: dict[str, dict[str, Any]] = {
    "today": {},
    "32x1": {"find_ids": 32, "find_warps": 1},
    "128x4": {"find_ids": 128, "find_warps": 4},
    "64x4": {"find_warps": 4},
    "direct": {"direct": 1},
}
TRAINS: dict[str, dict[str, Any]] = {
    "today": {},
    "direct": {"direct": 1},
    "listed, direct": {**LISTED, "direct": 1},
    "joint 32x1, direct": {"insert_ids": 32, "insert_warps": 1, "direct": 1},
    "sums 8 rows, direct": {"summed_rows": 1024, "direct": 1},
    "sums 32 rows, direct": {"summed_rows": 4096, "direct": 1},
    "sums 32 rows x 8 warps, direct": {"summed_rows": 4096, "summed_warps": 8, "direct": 1},
    "sums 16 rows x 8 warps, direct": {"summed_warps": 8, "direct": 1},
}
REORDERS: dict[str, dict[str, Any]] = {
    "today": {},
    "direct": {"direct": 1},
    "scan": {"scan": 1},
    "scan, direct": {"scan": 1, "direct": 1},
}
CONCATS: dict[str, dict[str, Any]] = {
    "today": {},
    "kernel": {"concat": "kernel"},
    "kernel, direct": {"concat": "kernel", "direct": 1},
}


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGUN:6.1f} s] {text}", flush=True)


BEGUN = time.perf_counter()


def milliseconds(call: Callable[[int], Any], repeats: int = 7, calls: int = 8, alone: bool = False) -> float:
    """Median time of a call; ``alone``: of one on an idle device, the host's work included."""
    if INTERPRETED:
        begin = time.perf_counter()
        call(0)
        return (time.perf_counter() - begin) * 1e3
    return gpu.milliseconds(call, repeats * calls if alone else repeats, 1 if alone else calls)


# --- checks -----------------------------------------------------------------------------------------------------------


def check_inserts(small: bool = INTERPRETED) -> None:
    """Ids that come often or are new in every block, in kernels that are timed later: what differs from the CPU's."""
    n = 400 if small else 200_000
    cpu, there = (shoal.HashTable(32, optimizer="sgd", seed=3, device=d) for d in ("cpu", "cuda"))
    for round_ in range(3):
        ids = torch.randint(0, n * 3 // 4 * (round_ + 1), (n,))
        ids[:: 64 - round_] = -(2**63) if round_ == 1 else (1 << 61) + round_  # new in every block
        got = there.lookup(ids.to(DEVICE), insert_missing=True)
        torch.testing.assert_close(got.cpu(), cpu.lookup(ids, insert_missing=True), rtol=1e-5, atol=1e-7)
        assert there.size() == cpu.size(), (there.size(), cpu.size())
        torch.testing.assert_close(there.lookup(ids.to(DEVICE)), got, rtol=0, atol=0)
    check_stash(n)
    if _gpu.chosen.insert_ids == _gpu.chosen.claim_ids == 128 and _gpu.chosen.find_ids == 64:
        check_updates(n)  # of a way, not of its every shape: each takes some seconds to compile


def check_updates(n: int) -> None:
    """Inserts by updates, with times."""
    generator = torch.Generator().manual_seed(1)
    cpu, there = (shoal.HashTable(12, optimizer=shoal.Adagrad(lr=0.1), seed=3, device=d) for d in ("cpu", "cuda"))
    for round_ in range(2):
        ids = torch.randint(0, n * 3 // 4 * (round_ + 1), (n,), generator=generator)
        grads = torch.randn(n, 12, generator=generator)
        distinct = torch.unique(ids + n // 2)
        for table, to in ((cpu, "cpu"), (there, DEVICE)):
            table.apply_gradients(ids.to(to), grads.to(to), 1, enable_dedup=True, req_time=200 + round_)
            further = {"distinct": True} if table is there else {}
            table.apply_gradients(distinct.to(to), grads[: len(distinct)].to(to), 1, **further)
        assert there.size() == cpu.size(), (there.size(), cpu.size())
        torch.testing.assert_close(there.lookup(ids.to(DEVICE)).cpu(), cpu.lookup(ids), rtol=2e-3, atol=2e-4)


def check_stash(n: int) -> None:
    """Ids beyond what two buckets hold."""
    table = shoal.HashTable(4, optimizer="sgd", initializer="zeros", device="cuda", on_bad_gradient="ignore")
    group = table._group
    group.max_load = 2.0
    group._grow_index(0, max(16, 1 << (n // 8 - 1).bit_length() >> 1), empty=True)
    room = int(group._buckets[0] * 8 * 1.03)
    every = torch.randperm(room, device=DEVICE) * 7919 - 5
    for part in every.split(-(-room // 5)):
        table.lookup(torch.cat([part, part[: len(part) // 3]]), insert_missing=True)
    rows = group.find(every, 0, "rows")
    assert table.size() == room, (table.size(), room)
    assert int(rows.min()) > 0
    assert rows.unique().numel() == room
    spilt = int((group.stash_keys.tensor[0, : group.stash_keys.size(0)] != -(2**63)).sum()) if not INTERPRETED else 1
    assert spilt > 0


def check_training() -> None:
    """Tables that share an index's memory."""
    tables, dim, each = (2, 8, 60) if INTERPRETED else (10, 128, 2000)
    cpu, there = (gpu.training_tables(shoal.Sgd(lr=0.5), tables, dim, device) for device in ("cpu", "cuda"))
    sizes = torch.full((tables,), each, dtype=torch.int32)  # of one seed
    ids = gpu.power_law(tables * each, 1000, device="cpu")
    grads = torch.randn(ids.numel() * dim)
    for _ in range(2):
        cpu.fused_apply_gradient(ids, None, sizes, grads, None, None, 1, 0, 1, True)
        there.fused_apply_gradient(ids.to(DEVICE), None, sizes, grads.to(DEVICE), None, None, 1, 0, 1, True)
    want, got = cpu.fused_lookup(ids, sizes, 1), there.fused_lookup(ids.to(DEVICE), sizes, 1)
    assert cpu.size() == there.size()
    assert all(torch.equal(a, b) for a, b in zip(want[1:4], got[1:4], strict=True))
    torch.testing.assert_close(got[0].cpu(), want[0], rtol=2e-3, atol=1e-3)  # sums of hundreds, in another order


def check_reorders() -> None:
    from shoal.ops.reorder import reference
    from shoal.ops.reorder.op import empty_shards

    call: Any = ops.fused_reorder_by_indices
    one: Any = ops.reorder_by_indices
    if INTERPRETED:
        from shoal.ops.cuda import reorder

        call, one = (lambda k, s, d: reorder.fused_reorder_by_indices(k, s, d, -1)), reorder.reorder_by_indices
    for n, shards in ((N // 3, 8), (N // 5 + 1, 3), (100, 40), (0, 4)):
        keys = torch.randint(0, max(1, n // 2) + 1, (n,), device=DEVICE)
        shard = torch.randint(0, shards, (n,), device=DEVICE)
        empty_ = empty_shards(shards, None)
        for got, want in (
            (call([keys], shards, [16]), reference.fused_reorder_by_indices([keys], shards, [16], empty_)),
            (call([keys, keys[: n // 3]], shards, [4, 8]),
             reference.fused_reorder_by_indices([keys, keys[: n // 3]], shards, [4, 8], empty_)),
            (one(keys, shard, shards), reference.reorder_by_indices(keys, shard, shards)),
        ):  # fmt: skip
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a.cpu(), b.cpu()), (n, shards)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    most = 8 if INTERPRETED else 51
    shapes = [
        torch.randint(1, most, (int(torch.randint(1, 5, (1,), generator=generator)),), generator=generator).tolist()
        for _ in range(5 if INTERPRETED else 155)
    ]
    return [torch.randn(*shape, device=DEVICE) for shape in shapes]


def check_concats() -> None:
    parts = [*tensors()[:20], torch.randn(7, 4, device=DEVICE).t(), torch.randn(0, device=DEVICE)]
    for scale in (1, 0.3):
        with _gpu.choose(concat="torch"):
            want = ops.aligned_flat_concat(parts, scale)
        assert torch.equal(ops.aligned_flat_concat(parts, scale), want)


def check_finds() -> None:
    cpu, there = (shoal.HashTable(8, optimizer="sgd", seed=3, device=d) for d in ("cpu", "cuda"))
    ids = torch.randint(0, N // 4, (N // 2,))
    for table, batch in ((cpu, ids), (there, ids.to(DEVICE))):
        table.lookup(batch, insert_missing=True)
    asked = torch.cat([ids, ids + N // 8])
    torch.testing.assert_close(there.lookup(asked.to(DEVICE)).cpu(), cpu.lookup(asked), rtol=1e-6, atol=1e-7)


# --- timings ----------------------------------------------------------------------------------------------------------


def batches(ids: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """60 % known ids."""
    made = []
    for _ in range(count):
        known = ids[torch.randint(0, ids.numel(), (N,), device=DEVICE)]
        new = torch.randint(-(1 << 62), 1 << 62, (N,), device=DEVICE)
        made.append(torch.where(torch.rand(N, device=DEVICE) < 0.4, new, known))
    return iter(made)


def time_inserts(load: float) -> float:
    table = gpu.make(32, "sgd")
    ids = gpu.fill(table, load - 0.03, SLOTS, DEVICE)
    table._group.max_load = 2.0
    table._group._grow_rows(ids.numel() + 24 * N)
    made = batches(ids, 20)
    return milliseconds(lambda _: table.lookup(next(made), insert_missing=True), 2, 8)


def time_growth() -> float:
    """Wall clock of a million new ids into a table that grows."""
    table = gpu.make(32, "sgd")
    new = [torch.randint(-(1 << 62), 1 << 62, (N,), device=DEVICE) for _ in range(3 if INTERPRETED else 48)]
    synchronize()
    begin = time.perf_counter()
    for batch in new:
        rows = table._group.insert(batch, 0, counts=[N])
        table._group.start_fresh(rows, batch, 1)
    synchronize()
    return (time.perf_counter() - begin) * 1e3 / len(new)


def time_training(optimizer: Any) -> float:
    tables, dim, each = (2, 8, N // 10) if INTERPRETED else (10, 128, 104857)
    n = tables * each
    sizes = torch.full((tables,), each, dtype=torch.int32)
    grads = torch.randn(n * dim, device=DEVICE)
    multi = gpu.training_tables(optimizer, tables, dim)
    made = [torch.cat([gpu.power_law(each, 10_000_000, device=DEVICE) for _ in range(tables)]) for _ in range(4)]

    def step(i: int) -> None:
        ids = made[i % 4]
        multi.fused_lookup(ids, sizes, 1)
        multi.fused_apply_gradient(ids, None, sizes, grads, None, None, 1, 0, 1, True)

    for i in range(4):
        step(i)
    return milliseconds(step)


def ids_of(kind: str) -> list[torch.Tensor]:
    if kind == "uniform":
        return [torch.randint(0, 1 << 40, (N,), device=DEVICE) for _ in range(8)]
    return [torch.exp(torch.rand(N, device=DEVICE, dtype=torch.float64) * 16).long() for _ in range(8)]


def time_reorder(kind: str) -> float:
    ids, call = ids_of(kind), ops.fused_reorder_by_indices
    return milliseconds(lambda i: call([ids[i % 8]], 8, [16]), alone=True)


def time_dedup() -> float:
    from shoal.ops.cuda.dedup import unique_ids

    ids = ids_of("uniform")
    return milliseconds(lambda i: unique_ids(ids[i % 8]), alone=True)


def time_concat() -> float:
    parts = tensors()
    return milliseconds(lambda i: ops.aligned_flat_concat(parts, 0.5), alone=True)


def time_find(dim: int) -> float:
    table = gpu.make(dim, "sgd")
    ids = gpu.fill(table, 0.5, SLOTS, DEVICE)
    asked = [ids[torch.randint(0, ids.numel(), (N,), device=DEVICE)] for _ in range(4)]
    return milliseconds(lambda i: table.lookup(asked[i % 4]))


def synchronize() -> None:
    if not INTERPRETED:
        torch.cuda.synchronize()


def empty() -> None:
    if not INTERPRETED:
        torch.cuda.empty_cache()


GROUPS: dict[str, tuple[dict[str, dict[str, Any]], Callable[[], None], dict[str, Callable[[], float]]]] = {
    "reorder": (
        REORDERS,
        check_reorders,
        {"uniform": lambda: time_reorder("uniform"), "skewed": lambda: time_reorder("skewed"), "dedup": time_dedup},
    ),
    "concat": (CONCATS, check_concats, {"155 tensors": time_concat}),
    "train": (
        TRAINS,
        check_training,
        {"SGD": lambda: time_training(shoal.Sgd(lr=0.01)), "Adam": lambda: time_training(shoal.Adam(lr=0.01))},
    ),
    "insert": (
        INSERTS,
        check_inserts,
        {"load 0.5": lambda: time_inserts(0.5), "load 0.95": lambda: time_inserts(0.95), "growth": time_growth},
    ),
    "find": (FINDS, check_finds, {"dim 8": lambda: time_find(8), "dim 32": lambda: time_find(32)}),
}


def best_of(rows: dict[str, Any], timings: Iterable[str]) -> dict[str, Any]:
    """The choice of the variant that gains most over all timings, if it is more than 3 %."""
    gains = {
        label: math.prod(row[f"{what}: times"] for what in timings)
        for label, row in rows.items()
        if "error" not in row and all(row.get(f"{what}: times") for what in timings)
    }
    best = max(gains, key=gains.__getitem__, default="today")
    return rows[best]["choice"] if gains.get(best, 0) > 1.03 ** len(list(timings)) else {}


def check_group(name: str) -> None:
    """The checks of a group alone, with few ids."""
    variants, check, _ = GROUPS[name]
    for label, choice in variants.items():
        try:
            with _gpu.choose(**choice):
                check_inserts(small=True) if check is check_inserts else check()
                synchronize()
            say(f"{name}: {label}: right")
        except Exception as error:
            RESULTS.setdefault(name, {})[label] = {"error": repr(error)}
            traceback.print_exc()


def run_group(name: str, seconds: float, save: Callable[[], None]) -> None:
    variants, check, timings = GROUPS[name]
    kept = RESULTS.setdefault(name, {})
    checked: set[str] = set()
    for label in (*variants, "today"):
        if time.perf_counter() - BEGUN > seconds:
            say(f"{name}: {label}: left out, the time is over")
            continue
        row: dict[str, Any] = {"choice": variants[label]}
        kept["today again" if label == "today" and "today" in kept else label] = row
        try:
            with _gpu.choose(**variants[label]):
                if label not in checked:
                    check()
                    checked.add(label)
                synchronize()
                for what, measure in timings.items():
                    row[what] = ms = measure()
                    empty()
                    first = kept["today"].get(what)
                    row[f"{what}: times"] = round(first / ms, 3) if first else None
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:500]
            traceback.print_exc()
        say(f"{name}: {label:32s} " + ", ".join(
            f"{what} {row[what]:.4f} ms ({row[f'{what}: times']}x)" if what in row else f"{what} FAILED"
            for what in timings
        ))  # fmt: skip
        save()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"which of {', '.join(GROUPS)}; all by default")
    parser.add_argument("--json", metavar="FILE", help="keep the results here, after every variant")
    parser.add_argument("--seconds", type=float, default=230, help="no variant is begun after so long")
    parser.add_argument("--check", action="store_true", help="only whether results are right, with few ids")
    parser.add_argument("--best", metavar="FILE", help="what SHOAL_GPU should be for the best of each group goes here")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(GROUPS):
        parser.error(f"there is no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    if not INTERPRETED and not torch.cuda.is_available():
        print("benchmarks.gpu_variants needs a CUDA GPU, and torch sees none here: nothing was measured")
        return 0
    import triton

    where = "Triton's interpreter" if INTERPRETED else torch.cuda.get_device_name()
    say(f"{where}, torch {torch.__version__}, triton {triton.__version__}")

    def save() -> None:
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"device": where, "groups": RESULTS}, file, indent=1)

    for name in args.names or GROUPS:
        check_group(name) if args.check else run_group(name, args.seconds, save)
    print("\nbest of each, against today's first and second run:")
    for name, rows in RESULTS.items():
        for what in GROUPS[name][2]:
            timed = {label: row[what] for label, row in rows.items() if what in row}
            if timed:
                best = min(timed, key=timed.__getitem__)
                noise = [round(timed[label], 4) for label in ("today", "today again") if label in timed]
                print(f"{name:8s} {what:12s} {best:32s} {timed[best]:.4f} ms, today {noise}", flush=True)
    together: dict[str, Any] = {}
    for name, rows in RESULTS.items():  # of groups that want different things the first has it
        together = {**best_of(rows, GROUPS[name][2]), **together} if not args.check else {}
    text = " ".join(f"{name}={value}" for name, value in together.items())
    print(f'SHOAL_GPU="{text}"')
    if args.best:
        with open(args.best, "w") as file:
            file.write(text)
    failed = [f"{name}: {label}" for name, rows in RESULTS.items() for label, row in rows.items() if "error" in row]
    print(f"failed: {failed or 'none'}; {time.perf_counter() - BEGUN:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
