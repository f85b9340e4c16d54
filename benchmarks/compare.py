"""This tree against another commit: the same benchmarks in both, in turn, and what became slower.

python -m benchmarks.compare --base v0.1 ops comm
python -m benchmarks.compare --base HEAD~20 --rounds 5 "table --rows 2000000 --only lookup"

A benchmark is named with the flags that both commits understand. The other commit is checked out and built below
``build/compare``, once; ``--base`` may also name a folder with a tree that is built already. Each number that a
benchmark writes with ``--json`` is compared with the number of the same place; the median of the rounds counts.
Numbers that are larger when things are better are known by the words in RATES.
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
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parent.parent
RATES = re.compile(r"/s\b|per_s\b|rate|qps|ratio|speedup|ours over|gb_s|scaling", re.IGNORECASE)
NOT_MEASURED = re.compile(
    r"goal|bound|wanted|machine|cores|memory_gib|rows$|rival|torch$|theirs|repeats", re.IGNORECASE
)
NUMBER = re.compile(r"^\s*([0-9][0-9,]*\.?[0-9]*)\s*(.*)$")


def build(ref: str) -> Path:
    """The commit's tree with its extension in ``src/shoal``, below build/compare; built on the first call."""
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


def figures(tree: Path, benchmark: list[str]) -> dict[str, float]:
    """One run of a benchmark in a tree; its numbers by their place in the JSON that it writes."""
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
        return dict(leaves(json.loads(kept.read_text()), ""))


def leaves(value: Any, place: str) -> Iterator[tuple[str, float]]:
    """The numbers in a JSON value. An entry of a list is known by its texts, so that lists may differ in length."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (int, float)):
        yield place, float(value)
    elif isinstance(value, str):
        found = NUMBER.match(value)
        if found:
            yield f"{place} {found[2]}".rstrip(), float(found[1].replace(",", ""))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            texts = (
                [v for v in inner.values() if isinstance(v, str) and not NUMBER.match(v)]
                if isinstance(inner, dict)
                else []
            )
            yield from leaves(inner, f"{place}[{'; '.join(texts) or index}]")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "benchmark", nargs="+", help="names as of `python -m benchmarks`, each with its flags in one word"
    )
    parser.add_argument("--base", required=True, metavar="REF", help="the commit, or a built tree, to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="runs in each tree, in turn")
    parser.add_argument("--seconds", type=float, help="per benchmark: no round begins that would end later than this")
    parser.add_argument("--margin", type=float, default=0.03, help="what is slower by more than this is marked")
    parser.add_argument("--all", action="store_true", help="print what did not change, too")
    options = parser.parse_args()
    trees = {"base": build(options.base), "now": TREE}
    slower = 0
    for benchmark in map(shlex.split, options.benchmark):
        series: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in trees}
        started = time.monotonic()
        for done in range(options.rounds):
            spent = time.monotonic() - started
            if done and options.seconds and spent * (done + 1) / done > options.seconds:
                break
            for name, tree in trees.items():
                for place, figure in figures(tree, benchmark).items():
                    series[name][place].append(figure)
        common = [p for p in series["base"] if p in series["now"] and not NOT_MEASURED.search(p.rsplit(".", 1)[-1])]
        rounds = len(next(iter(series["now"].values()), []))
        print(f"\n# {shlex.join(benchmark)}: {len(common)} figures in both, medians of {rounds} rounds")
        for place in common:
            before, after = (statistics.median(series[name][place]) for name in ("base", "now"))
            if before <= 0 or after <= 0:
                continue
            cost = before / after if RATES.search(place) else after / before
            marked = cost > 1 + options.margin
            slower += marked
            if marked or options.all:
                print(f"{place[:110]:<110} {before:>12.4g} {after:>12.4g} {cost:>6.2f}x{'  SLOWER' if marked else ''}")
    print(f"\n{slower} figures are worse by more than {options.margin:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
