"""Compare this tree with another commit: run the same benchmarks on both in turn and list what became slower.

python -m benchmarks.compare --base v0.1 ops comm
python -m benchmarks.compare --base HEAD~20 --rounds 5 "table --rows 2000000 --only lookup"

Pass a benchmark only flags that both commits accept. The other commit is checked out and built once in
``build/compare``; ``--base`` can also be a folder with a tree that is already built. Each number that a benchmark
writes with ``--json`` is compared with the number at the same place. The median of the rounds counts; the best round of
each tree is printed next to it, because other work on the machine can only make a round worse. Whether more is better
follows from the goal of a ratio, and for other numbers from the words in RATES.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parent.parent
RATES = re.compile(r"/s\b|per_s\b|rate|qps|ratio|speedup|ours over|gb_s|scaling|kept|roof", re.IGNORECASE)
NOT_MEASURED = re.compile(
    r"goal|bound|wanted|target|machine|cores|memory_gib|rows$|bags$|per_bag|rival|torch$|torch_|theirs|repeats|dim$"
    r"|bytes$|threads$|(numpy|one_shot|once)_ms|^plain|flat ms|single calls ms|sort ms|topk ms|cpus|echo|asyncio|bare",
    re.IGNORECASE,
)
RATIOS = ("ratio", "value")  # the keys that an entry's goal is about
GOALS = ("goal", "bound", "wanted", "figure")  # ">= 0.5 of the echo", "<= 2"
NAMES = ("what", "name", "against")  # the keys whose texts identify an entry in each run
NUMBER = re.compile(r"([A-Za-z][A-Za-z0-9 _.]*? )?([0-9][0-9,]*\.?[0-9]*) ?([A-Za-z%][A-Za-z/]*( rows/s)?)?")


def build(ref: str) -> Path:
    """The commit's tree, with its extension in ``src/shoal``; builds it in build/compare on the first call."""
    if list((Path(ref) / "src" / "shoal").glob("_core*.so")):
        return Path(ref).resolve()
    sha = subprocess.check_output(["git", "rev-parse", "--short", f"{ref}^{{commit}}"], cwd=TREE, text=True).strip()
    tree = TREE / "build" / "compare" / sha
    if not (tree / "src").is_dir():
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), sha], cwd=TREE, check=True)
    if not list((tree / "src" / "shoal").glob("_core*.so")):
        print(f"building {sha} in {tree} ...", flush=True)
        configure = ["cmake", "-S", ".", "-B", "build/dev", "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
        subprocess.run(configure, cwd=tree, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["cmake", "--build", "build/dev"], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    return tree


@dataclass(frozen=True)
class Figure:
    value: float
    more_is_better: bool


def figures(tree: Path, benchmark: list[str]) -> dict[str, Figure]:
    """Runs a benchmark in a tree; returns its numbers by their place in the JSON that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "figures.json"
        command = [sys.executable, "-m", f"benchmarks.{benchmark[0]}", *benchmark[1:], "--json", str(kept)]
        run = subprocess.run(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
        if not kept.is_file():
            tail = "\n".join((run.stdout + run.stderr).splitlines()[-12:])
            raise SystemExit(
                f"{shlex.join(command)} in {tree} ended with {run.returncode} and wrote no figures:\n{tail}"
            )
        found = list(leaves(json.loads(kept.read_text()), ""))
        return dict(reversed(found))  # if two numbers in one text have the same label, the first is ours


def leaves(value: Any, place: str) -> Iterator[tuple[str, Figure]]:
    """The numbers in a JSON value, also those in its texts ("12.5 M/s", "native 3.1 ms, flat 2.9 ms").

    Entries of a list are identified by their names, and numbered if several have the same one, so lists may differ.
    """
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (int, float)):
        yield place, Figure(float(value), bool(RATES.search(place)))
    elif isinstance(value, str):
        for label, number, unit, _ in NUMBER.findall(value):
            if unit or number == value:
                where = f"{place} {label}{unit}".rstrip()
                yield where, Figure(float(number.replace(",", "")), bool(RATES.search(f"{where} {unit}")))
    elif isinstance(value, dict):
        goal = next((str(value[key]) for key in GOALS if str(value.get(key)).startswith((">", "<"))), "")
        goal = "<=" if value.get("at_most") else goal
        for key, inner in value.items():
            if key in NAMES or inner is goal:
                continue
            for where, figure in leaves(inner, f"{place}.{key}" if place else str(key)):
                told = goal and key in RATIOS
                yield where, replace(figure, more_is_better=goal[0] == ">") if told else figure
    elif isinstance(value, list):
        known: Counter[str] = Counter()
        for inner in value:
            name = "; ".join(inner[key] for key in NAMES if key in inner) if isinstance(inner, dict) else ""
            known[name] += 1
            yield from leaves(inner, f"{place}[{name}{f' #{known[name]}' if known[name] > 1 or not name else ''}]")


def cost(before: float, after: float, more_is_better: bool) -> float:
    """How many times worse the number became; 1 if one of them is not positive."""
    if before <= 0 or after <= 0:
        return 1.0
    return before / after if more_is_better else after / before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "benchmark", nargs="+", help="names of `python -m benchmarks`, each quoted together with its flags"
    )
    parser.add_argument("--base", required=True, metavar="REF", help="the commit, or a built tree, to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="runs in each tree, in turn")
    parser.add_argument("--seconds", type=float, help="limit per benchmark: start no round that would end later")
    parser.add_argument("--margin", type=float, default=0.03, help="mark figures that are worse by more than this")
    parser.add_argument("--all", action="store_true", help="also print figures that did not get worse")
    options = parser.parse_args()
    trees = {"base": build(options.base), "now": TREE}
    slower = 0
    for benchmark in map(shlex.split, options.benchmark):
        series: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in trees}
        more_is_better: dict[str, bool] = {}
        started = time.monotonic()
        for done in range(options.rounds):
            spent = time.monotonic() - started
            if done and options.seconds and spent * (done + 1) / done > options.seconds:
                break
            for name, tree in list(trees.items())[:: -1 if done % 2 else 1]:
                for place, figure in figures(tree, benchmark).items():
                    series[name][place].append(figure.value)
                    if name == "now":
                        more_is_better[place] = figure.more_is_better
        common = [p for p in series["base"] if p in series["now"] and not NOT_MEASURED.search(p.rsplit(".", 1)[-1])]
        rounds = len(next(iter(series["now"].values()), []))
        print(f"\n# {shlex.join(benchmark)}: {len(common)} figures in both, {rounds} rounds")
        print(f"{'':<100} {'before':>11} {'after':>11} {'median':>7} {'best':>7}")
        for place in common:
            before, after = series["base"][place], series["now"][place]
            middle = cost(statistics.median(before), statistics.median(after), more_is_better[place])
            best = max if more_is_better[place] else min
            of_best = cost(best(before), best(after), more_is_better[place])
            marked = middle > 1 + options.margin
            slower += marked
            if marked or options.all:
                mark = "" if not marked else "  SLOWER" if of_best > 1 + options.margin else "  slower?"
                medians = f"{statistics.median(before):>11.4g} {statistics.median(after):>11.4g}"
                print(f"{place[-100:]:<100} {medians} {middle:>6.2f}x {of_best:>6.2f}x{mark}", flush=True)
    print(f"\n{slower} figures are worse by more than {options.margin:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
