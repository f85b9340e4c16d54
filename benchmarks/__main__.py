"""`python -m benchmarks [NAME ...]`: run benchmarks, by default all of them."""

import pkgutil
import runpy
import sys

import benchmarks


def main() -> int:
    names = sorted(
        m.name
        for m in pkgutil.iter_modules(benchmarks.__path__)
        if m.name not in ("__main__", "harness", "streams", "alert_scenes")
    )
    wanted = [a for a in sys.argv[1:] if not a.startswith("-")] or names
    unknown = [name for name in wanted if name not in names]
    if unknown or "-h" in sys.argv or "--help" in sys.argv:
        print(f"usage: python -m benchmarks [{' | '.join(names)}]\n`python -m benchmarks.NAME --help` describes one.")
        return 2 if unknown else 0
    for name in wanted:
        sys.argv = [f"benchmarks.{name}"]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
