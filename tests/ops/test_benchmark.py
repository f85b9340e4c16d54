"""The benchmark of the ops runs, and writes its files."""

import json

from benchmarks import ops


def test_rows_and_traces_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ops, "ROWS", [])
    monkeypatch.setattr(ops, "TRACES", [])
    monkeypatch.setattr(ops, "REPEATS", 1)
    assert ops.main(["-k", "fused_gather", "--json", str(tmp_path / "rows.json"), "--profile", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    traces = sorted(path.name for path in tmp_path.glob("fused-gather*.json"))
    assert len(traces) == len({row["name"] for row in rows})
    events = json.loads((tmp_path / traces[0]).read_text())["traceEvents"]
    assert any("fused_gather" in event["name"] for event in events)
