"""`shoal table`: inspect, compare, verify, convert and reshard checkpoints of tables."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from shoal.cli.shared.arguments import run_verb
from shoal.cli.shared.console import counting, print_json, print_table, show_bytes, show_time
from shoal.cli.table_options import Diff, Export, FromMonolith, Get, Import, Ls, Reshard, Stat, Top, Verify
from shoal.errors import ConfigError, DataError, UsageError, missing_extra

ABOUT = """\
A PATH is a basename (its files are <basename>-00000-of-00004 ...), one of its files, or a folder: one written by
`save_incremental`, `shoal ps` or several ranks, or <model>-<step>.assets. Files are streamed.

examples:
  shoal table stat ckpt/item
  shoal table get ckpt/item 42
  shoal table diff ckpt-monday/item ckpt-tuesday/item
  shoal table export ckpt --parquet item.parquet
  shoal table reshard ckpt/item --shards 16 --out wide/item
  shoal table from-monolith /models/ctr --out ckpt-ctr

exit codes: 0 success (diff: no difference), 1 the answer is no (get: no such id, diff: they differ) or a system error,
2 wrong usage, or a file is missing, truncated, damaged or of unknown format (nothing was written), 130 interrupted."""


def main(argv: list[str]) -> int:
    try:
        import rich  # noqa: F401
    except ImportError:
        raise missing_extra("rich", "cli") from None
    verbs = {
        "stat": (Stat, stat, ("path",)),
        "ls": (Ls, ls, ("path",)),
        "get": (Get, get, ("path", "id")),
        "top": (Top, top, ("path",)),
        "diff": (Diff, diff, ("a", "b")),
        "export": (Export, export, ("path",)),
        "import": (Import, import_, ("files",)),
        "reshard": (Reshard, reshard, ("path",)),
        "verify": (Verify, verify, ("path",)),
        "from-monolith": (FromMonolith, from_monolith, ("path",)),
    }
    try:
        return run_verb("table", ABOUT, verbs, _negative_last(argv), repeated=("table", "rename"))
    except (DataError, ConfigError) as error:
        print(f"shoal table: {error}", file=sys.stderr)
        return 2


def _negative_last(argv: list[str]) -> list[str]:
    """Turn ``get PATH -5`` into ``get PATH -- -5``: a negative id is not a flag."""
    negative = [word for word in argv if re.fullmatch(r"-\d+", word)]
    if argv[:1] != ["get"] or "--" in argv or not negative:
        return argv
    return [word for word in argv if word not in negative] + ["--", *negative]


def _open(path: Path, tables: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    from shoal.table.offline.source import open_source

    source = open_source(str(path))
    return source, source.pick(tables)


def stat(options: Stat) -> int:
    from shoal.table.offline.budget import budget_lines, show_age
    from shoal.table.offline.stat import table_stats

    source, wanted = _open(options.path, options.table)
    with counting("rows") as seen:
        stats = [
            each.report() | {"budget": source.budgets.get(each.name)}
            for each in table_stats(source, wanted, options.slots, seen=seen)
        ]
    about = {
        "path": source.path,
        "kind": source.kind,
        "bytes": source.bytes,
        "files": len(source.files),
        "checkpoints": [layer.name for layer in source.layers],
        "step": source.step,
        "created": source.created,
        "filters": list(source.filters),
    }
    if options.json:
        print_json(about | {"tables": stats})
        return 0
    step = f", step {source.step}" if source.step is not None else ""
    increments = f", {len(source.layers) - 1} increments" if len(source.layers) > 1 else ""
    files = f"{len(source.files)} file{'' if len(source.files) == 1 else 's'}"
    title = f"{source.path}: {source.kind}, {files}, {show_bytes(source.bytes)}{step}{increments}"
    rows = [
        [
            each["name"],
            "; ".join(_optimizers(shape) for shape in each["optimizers"]) or "-",
            f"{each['rows']:,}",
            str(each["dim"] if each["dim"] is not None else "-"),
            show_time(each["last_update"]),
            f"{each['num_slots']:,}",
            f"{each['norm_mean']:.4g} / {each['norm_max']:.4g}",
            f"{each['zero_rows']:,} / {each['bad_rows']:,}",
        ]
        for each in stats
    ]
    columns = ["table", "optimizer", "rows", "dim", "last update", "slots", "norm mean / max", "zero / bad"]
    print_table(title, columns, rows, left=2)
    for each in stats:
        if each["ages_s"]:
            shown = ", ".join(f"{name} {show_age(seconds)}" for name, seconds in each["ages_s"].items())
            print(f"{each['name']}: ages of rows {shown}")
        for line in budget_lines(each["budget"] or {}, each["rows"]):
            print(f"{each['name']}: {line}")
    return 0


def _optimizers(shape: list[dict[str, Any]]) -> str:
    kinds = [str(each["kind"]) for each in shape]
    return " + ".join(kinds) or "none"


def ls(options: Ls) -> int:
    from shoal.table.offline.stat import listing

    source, wanted = _open(options.path, options.table)
    limit = options.limit or None
    if options.limit < 0 or options.skip < 0:
        raise ConfigError(f"--limit and --skip must be >= 0, got {options.limit} and {options.skip}")
    found = listing(
        source, wanted, slot=options.slot, slots=options.slots, since=options.since, skip=options.skip, limit=limit
    )
    if options.json:
        import json

        for row in found:
            print(json.dumps(row.report()))
        return 0
    if limit is None:  # no limit: print row by row, without holding them all
        for row in found:
            print(f"{row.table}\t{row.id}\t{row.time}\t{row.norm:.6g}\t{_vector(row.weights, len(row.weights))}")
        return 0
    _show_rows("", list(found))
    return 0


def _show_rows(title: str, rows: Any) -> None:
    lines = [[row.table, str(row.id), show_time(row.time), f"{row.norm:.5g}", _vector(row.weights, 4)] for row in rows]
    print_table(title, ["table", "id", "last update", "norm", "weights"], lines)


def _vector(weights: list[float], shown: int) -> str:
    text = " ".join(f"{w: .4f}" for w in weights[:shown])
    return text + (" …" if len(weights) > shown else "")


def get(options: Get) -> int:
    from shoal.table.offline.stat import find, state_of

    if (options.id is None) == (options.text is None):
        raise UsageError("exactly one of ID and --text FEATURE=VALUE must be given")
    source, wanted = _open(options.path, options.table)
    if options.text is not None:
        from shoal.data.feature_ids import ids_of_text

        ids = ids_of_text(source, options.text)
    else:
        assert options.id is not None
        if not -(1 << 63) <= options.id < 1 << 64:
            raise ConfigError(f"an id must fit 64 bits, got {options.id}")
        ids = [options.id - (1 << 64) if options.id >= 1 << 63 else options.id]
    rows = [row for one in ids for row in find(source, wanted, one)]
    if options.json:
        print_json([row.report() | {"optimizer": state_of(row).get("dump", [])} for row in rows])
    else:
        for row in rows:
            print(f"table {row.table!r}, id {row.id}: last update {show_time(row.time)}, norm {row.norm:.6g}")
            for begin in range(0, len(row.weights), 8):
                print("  " + " ".join(f"{w: .6g}".ljust(12) for w in row.weights[begin : begin + 8]).rstrip())
            for segment, state in enumerate(state_of(row).get("dump", [])):
                for kind, values in state.items():
                    print(f"  segment {segment}, {kind}: {_state(values)}")
    if not rows:
        of = f" (of {options.text})" if options.text is not None else ""
        print(f"shoal table: {source.path} has no id {', '.join(map(str, ids))}{of}", file=sys.stderr)
    return 0 if rows else 1


def _state(values: dict[str, Any]) -> str:
    parts = []
    for name, value in values.items():
        text = (
            " ".join(f"{x:.4g}" for x in value[:8]) + " …" * (len(value) > 8) if isinstance(value, list) else f"{value}"
        )
        parts.append(f"{name} {text}")
    return ", ".join(parts) or "no state"


def top(options: Top) -> int:
    from shoal.table.offline.stat import top as find_top

    source, wanted = _open(options.path, options.table)
    if options.n < 1:
        raise ConfigError(f"--n must be at least 1, got {options.n}")
    found = find_top(source, wanted, options.by, options.n)
    if options.json:
        print_json({name: [row.report() for row in rows] for name, rows in found.items()})
        return 0
    what = "largest norms" if options.by == "norm" else "newest updates"
    _show_rows(f"{source.path}: {what}", [row for rows in found.values() for row in rows])
    return 0


def diff(options: Diff) -> int:
    from shoal.table.offline.diff import diff as compare

    a, _ = _open(options.a, ())
    b, _ = _open(options.b, ())
    if a.kind == b.kind == "table" and not options.table and a.tables != b.tables:
        from shoal.table.offline.rewrite import renamed

        b = renamed(b, {b.tables[0]: a.tables[0]})  # one table each: compare them despite different names
    have = sorted({*a.tables, *b.tables})
    if unknown := sorted(set(options.table) - set(have)):
        raise ConfigError(f"neither has a table {unknown[0]!r}; they have {', '.join(map(repr, have[:20]))}")
    results = compare(a, b, options.table or have, memory_bytes=max(1, options.memory_mib) << 20)
    if options.json:
        print_json({"a": a.path, "b": b.path, "tables": [each.report() for each in results]})
    else:
        rows = []
        for each in results:
            counts = (each.rows_a, each.rows_b, each.added, each.removed, each.changed, each.state_only)
            distances = (each.max_distance, each.report()["mean_distance"])
            rows.append([each.name, *(f"{n:,}" for n in counts), *(f"{d:.4g}" for d in distances)])
        columns = ["table", "rows A", "rows B", "added", "removed", "changed", "state only", "max dist", "mean dist"]
        print_table(f"{a.path} → {b.path}", columns, rows)
        for each in results:
            if each.farthest:
                far = ", ".join(f"{id} ({distance:.4g})" for distance, id in sorted(each.farthest, reverse=True))
                print(f"moved most in {each.name!r}: {far}")
    return 1 if any(each.differs for each in results) else 0


def export(options: Export) -> int:
    from shoal.table.offline.exchange import export as write

    if (options.parquet is None) == (options.csv is None):
        raise ConfigError("export: exactly one of --parquet FILE and --csv FILE must be given")
    kind, out = ("parquet", options.parquet) if options.parquet is not None else ("csv", options.csv)
    source, wanted = _open(options.path, options.table)
    with counting("rows") as seen:
        files = write(source, wanted, str(out), kind=kind, state=options.state, seen=seen)
    if options.json:
        print_json([{"table": name, "file": file, "rows": rows} for name, (file, rows) in files.items()])
    else:
        for name, (file, rows) in files.items():
            print(f"{name}: {rows:,} rows in {file}")
    return 0


def import_(options: Import) -> int:
    from shoal.table.offline.exchange import import_rows

    if not options.files:
        raise ConfigError("import: give at least one .parquet, .csv or .npz file")
    with counting("rows") as seen:
        rows = import_rows(
            list(map(str, options.files)), str(options.out), options.name, shards=options.shards,
            optimizer=options.optimizer, id_column=options.id_column, vector_column=options.vector_column,
            time_column=options.time_column, now=options.now, seen=seen,
        )  # fmt: skip
    return _written(options.json, options.out, {options.name: rows})


def reshard(options: Reshard) -> int:
    from shoal.table.offline.rewrite import reshard as rewrite

    source, wanted = _open(options.path, options.table)
    with counting("rows") as seen:
        rows = rewrite(source, wanted, str(options.out), options.shards, options.kind, seen=seen)
    return _written(options.json, options.out, rows)


def from_monolith(options: FromMonolith) -> int:
    from shoal.table.offline import rewrite

    rename = {}
    for pair in options.rename:
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise ConfigError(f"--rename must be OLD=NEW, got {pair!r}")
        rename[old] = new
    source = rewrite.find_monolith(str(options.path))
    with counting("rows") as seen:
        rows = rewrite.from_monolith(source, str(options.out), rename=rename, shards=options.shards, seen=seen)
    if source.filters and not options.json:
        print(f"not converted: {len(source.filters)} admission filters; restore_hash_filter reads the original files")
    return _written(options.json, options.out, rows)


def _written(as_json: bool, out: Path, rows: dict[str, int]) -> int:
    if as_json:
        print_json({"out": str(out), "rows": rows})
    else:
        print("\n".join(f"{name}: {n:,} rows" for name, n in sorted(rows.items())) + f"\nwritten to {out}")
    return 0


def verify(options: Verify) -> int:
    from shoal.table.offline.verify import verify as check

    with counting("rows") as seen:
        verdict = check(str(options.path), seen=seen)
    if options.json:
        print_json(verdict.report())
        return 0 if verdict.good else 2
    for problem in verdict.problems:
        print(f"damaged: {problem}")
    for warning in verdict.warnings:
        print(f"warning: {warning}")
    word = "good" if verdict.good else f"{len(verdict.problems)} problem(s)"
    print(
        f"{verdict.path}: {word}; read {verdict.rows:,} rows of {len(verdict.tables)} table(s) in "
        f"{verdict.files} file(s), {show_bytes(verdict.bytes)}"
    )
    return 0 if verdict.good else 2
