"""Feeds damaged input to every reader for a given time: `make fuzz`, for an hour before a release.

    python -m tests.fuzz.run --seconds 3600
    python -m tests.fuzz.run --only predict --seconds 60 --seed 7

tests/fuzz/corpus/READER/ has valid input of each reader, and every input that broke one: it is read first, here, in
`make test` and in `make sanitize`, and is damaged in turn. A new input that breaks a reader is added to it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from dataclasses import replace
from pathlib import Path

from shoal.testing.fuzz import FuzzFinding, Target, fuzz, kept_inputs
from tests.fuzz.targets import all_targets

CORPUS = Path(__file__).parent / "corpus"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="for all readers together")
    parser.add_argument("--only", nargs="+", help="names of readers")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--write-seeds", action="store_true", help="adds valid input to the corpus")
    options = parser.parse_args()
    targets = [one for one in all_targets() if not options.only or one.name in options.only]
    if not targets:
        parser.error(f"there is no such reader; there are {', '.join(one.name for one in all_targets())}")
    if options.write_seeds:
        return _write_seeds(targets)
    print(f"seed {options.seed}, {len(targets)} readers, {options.seconds:g} s")
    found = 0
    for target in targets:
        kept = [data for _, data in kept_inputs(CORPUS / target.name)]
        target = replace(target, seeds=[*target.seeds, *kept])
        try:
            tally = fuzz(target, seed=options.seed, seconds=options.seconds / len(targets))
        except FuzzFinding as finding:
            found += 1
            path = CORPUS / target.name / hashlib.sha256(finding.data).hexdigest()[:16]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(finding.data)
            print(f"{target.name:18s} BROKEN: {finding}\n{'':18s} kept as {path}")
        else:
            refused = ", ".join(f"{name} {n}" for name, n in sorted(tally.refused.items()))
            print(f"{target.name:18s} {tally.runs:8d} inputs; refused: {refused or 'none'}", flush=True)
    return 1 if found else 0


def _write_seeds(targets: list[Target]) -> int:
    for target in targets:
        folder = CORPUS / target.name
        folder.mkdir(parents=True, exist_ok=True)
        if not any(path.name.startswith("valid-") for path in folder.iterdir()):
            for number, data in enumerate(target.seeds):
                (folder / f"valid-{number}").write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
