"""Real-time training: streams, joining, and the complete system from an event to an answer.

    python -m benchmarks.online
    python -m benchmarks.online --only join --open 10
    python -m benchmarks.online --only kills --seconds 600 --kills 30
    taskset -c 0,1 python -m benchmarks.online --only fresh --seconds 60
    taskset -c 0,1 python -m benchmarks.online --only replay --hours 24 --speed 100

- **join**: `shoal join` from two folders of JSON lines into a third, in one process on one core with a budget of 1 GiB
  and millions of open impressions; each stream is shuffled by up to an hour. All samples are compared, in order, with
  an offline join in numpy.
- **read**: a Redis stream and a partition of librdkafka's mock broker into batches of labels, numbers and ids, against
  the bare client that fetches the same records and does nothing with them.
- **kills**: impressions and actions from two Redis streams are joined and learnt by one trainer with its rows on two
  parameter servers; trainer, joiner, broker and servers are killed repeatedly. Joined samples, rows and weights are
  compared with those of a run without kills.
- **fresh**: the complete system under `shoal up`, at 5,000 samples per second: the time from producing an impression
  and its action to the first prediction of a replica that shows them.
- **replay**: a day of the demo's stream at 100 times its rate through the same system. It compares memory and freshness
  in the last quarter with those in the second, and the AUC of replica and trainer for the same samples at the same
  time: this process asks the replica for each joined sample, then passes it to the trainer, which predicts it before
  learning it. It also reports the AUC of the replica when impressions are shown, and compares the replica's predictions
  at the end with the trainer's last export.
- **up**: `shoal up` from nothing to the first live prediction, with the files of `shoal up --init`.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Report, parser
from benchmarks.online_live import fresh
from benchmarks.online_replay import replay
from benchmarks.online_up import up
from benchmarks.streams import kills, read

HOUR = 3600.0
PARTS = ("read", "join", "kills", "up", "fresh", "replay")


def write_events(folder: Path, times: np.ndarray, arrival: np.ndarray, text: Any) -> float:
    """Writes files of lines in the order of arrival; returns their bytes."""
    folder.mkdir()
    order, size = np.argsort(arrival, kind="stable"), 0
    for part in range(0, len(order), 1_000_000):
        numbers = order[part : part + 1_000_000]
        lines = "".join(map(text, numbers.tolist(), (times[numbers] * 1e6).astype(np.int64).tolist()))
        size += len(lines)
        (folder / f"{part:010d}.jsonl").write_text(lines)
    return size


def join(report: Report, flags: Any) -> None:
    """`shoal join` against the goals; no rival joins with a memory budget in one process."""
    rng = np.random.default_rng(1)
    count = int(flags.open * 2e6)
    # With windows of an hour and an hour of disorder, the impressions of two hours are open, minus a few at the edges.
    hours = 3.7
    shown = np.round(1.7e9 + rng.random(count) * hours * HOUR, 6)
    acted = rng.choice(count, count // 20, replace=False)
    delay = rng.exponential(900.0, len(acted))
    acts = np.round(shown[acted] + delay, 6)
    with tempfile.TemporaryDirectory(dir=flags.dir) as folder:
        root = Path(folder)
        arrival = shown + rng.random(count) * HOUR * 0.999
        size = write_events(
            root / "shown", shown, arrival,
            lambda n, t: (
                f'{{"id":"r{n:09d}","time":{t},"user":"u{n * 7919 % 1000003}","item":"i{n % 50021}","slot":{n % 9}}}\n'
            ),
        )  # fmt: skip
        write_events(
            root / "acts", acts, acts + rng.random(len(acts)) * HOUR * 0.999,
            lambda n, t: f'{{"id":"r{acted[n]:09d}","time":{t},"kind":"click"}}\n',
        )  # fmt: skip
        (root / "join.toml").write_text(
            f"""
            [impressions]
            from = "dir:shown"
            key = "id"
            time_unit = "us"
            lateness = "1h"
            [actions]
            from = "dir:acts"
            key = "id"
            time_unit = "us"
            lateness = "1h"
            [join]
            window = "1h"
            state = "state"
            out = "dir:samples"
            memory = "{flags.memory}"
            """
        )
        events = count + len(acts)
        print(f"# {count:,} impressions of {size / count:.0f} bytes and {len(acts):,} actions", flush=True)
        command = ["taskset", "-c", str(max(os.sched_getaffinity(0))), sys.executable, "-m", "shoal", "join"]
        begin = time.perf_counter()
        with subprocess.Popen([*command, str(root / "join.toml"), "--to-end", "--json", "--every", "1"],
                              stdout=subprocess.PIPE, text=True) as process:  # fmt: skip
            assert process.stdout is not None
            lines = [json.loads(line) for line in process.stdout]
        seconds = lines[-1]["time"] - lines[0]["time"]
        wall = time.perf_counter() - begin
        assert process.returncode == 0
        rss = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        most = max(line["open_impressions"] for line in lines)
        spilled = max(line["spilled"] for line in lines)
        memory = max(line["memory_bytes"] for line in lines) / 2**30
        report.add(
            "events/s on one core, from files to files", f"{events / seconds:,.0f}", "", events / seconds / 1e5, 1.0
        )
        report.add("impressions open at once", f"{most:,}", "", most / (flags.open * 1e6), 0.95)
        report.add("of them on disk", f"{spilled:,}")
        report.add("memory of the joiner, GiB", f"{memory:.2f}", "", memory, 1.0, at_most=True)
        report.add("peak resident memory of the process, GiB", f"{rss:.2f}")
        report.add("seconds of it, with start and end", f"{wall:.1f}")
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        report.add("seconds of CPU of it", f"{usage.ru_utime + usage.ru_stime:.1f}")
        wrong = compare(root / "samples", shown, arrival, acted, delay)
        report.add(
            "samples that differ from an offline join", f"{wrong:,} of {count:,}", "", float(wrong), 0.0, at_most=True
        )


def compare(folder: Path, shown: np.ndarray, arrival: np.ndarray, acted: np.ndarray, delay: np.ndarray) -> int:
    """The number of samples that differ from the offline join in impression, label or position."""
    label = np.zeros(len(shown), np.int64)
    micros = (shown * 1e6).astype(np.int64)
    acts = (np.round(shown[acted] + delay, 6) * 1e6).astype(np.int64)
    label[acted[acts - micros[acted] <= HOUR * 1e6]] = 1
    order = np.lexsort((np.argsort(np.argsort(arrival, kind="stable")), micros))
    want = order * 2 + label[order]
    got = []
    for path in sorted(folder.iterdir()):
        got.append(np.array([int(line[8:17]) * 2 + (line[-3] == 49) for line in path.open("rb")]))
    found = np.concatenate(got)
    return abs(len(found) - len(want)) + int((found[: len(want)] != want[: len(found)]).sum())


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--only", choices=PARTS, help="one part")
    made.add_argument("--open", type=float, default=10.0, help="join: millions of open impressions")
    made.add_argument("--memory", default="1GiB", help="join: the memory budget")
    made.add_argument("--dir", help="where to write files; join: about 1 GiB per 4 million impressions")
    made.add_argument("--records", type=int, default=400_000, help="read: entries of the Redis stream")
    made.add_argument("--seconds", type=float, default=600.0, help="kills, fresh: seconds for which records arrive")
    made.add_argument("--sample-rate", type=float, default=5000.0, help="fresh: samples per second")
    made.add_argument(
        "--servers", type=int, default=1, help="fresh, replay: parameter servers; 0: rows are the trainer's"
    )
    made.add_argument("--replicas", type=int, default=1, help="fresh, replay: number of replicas")
    made.add_argument("--hours", type=float, default=24.0, help="replay: hours of the day to replay")
    made.add_argument("--speed", type=float, default=100.0, help="replay: speed, in multiples of real time")
    made.add_argument("--rate", type=float, default=1000.0, help="kills: records per second")
    made.add_argument("--kills", type=int, default=30, help="kills: number of kills")
    made.add_argument("--seed", type=int, default=1, help="kills: seed of times and victims")
    flags = made.parse_args()
    report = Report("online")
    report.start()
    parts = {"read": read, "join": join, "kills": kills, "up": up, "fresh": fresh, "replay": replay}
    for name in [flags.only] if flags.only else PARTS:
        parts[name](report, flags)
    report.save(flags.json)


if __name__ == "__main__":
    main()
