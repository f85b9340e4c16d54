"""`shoal launch`: N local ranks under torchrun's own agent, with a console that shows who says what.

Every line is prefixed with its rank. When a rank fails the others are ended and the first failure's last lines are
shown at the end, where you look first. Ctrl-C ends all ranks.
"""

import argparse
import contextlib
import json
import logging
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TAIL_LINES = 40

EXAMPLES = """examples:
  shoal launch -n 2 train.py --enable_sync_training
  shoal launch -n 4 -m shoal bench comm
"""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="shoal launch",
        description="Starts N ranks of a Python script on this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", "--nproc", type=int, default=2, help="ranks to start (2)")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("--max-restarts", type=int, default=0, help="start all ranks again this many times (0)")
    parser.add_argument("--log-dir", type=Path, help="keep each rank's stdout and stderr here")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON that says how it went")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    options = parser.parse_args(argv)
    if options.nproc < 1:
        parser.error(f"-n must be at least 1, got {options.nproc}")
    if not options.module and not Path(options.script).exists():
        parser.error(f"there is no file {options.script}")
    return options


def main(argv: list[str]) -> int:
    try:
        options = parse(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    with _log_folder(options.log_dir) as folder:
        code, failure = _run(options, folder)
        if failure is not None:
            _show(failure)
    if options.json:
        print(json.dumps({"exit_code": code, "ranks": options.nproc, "first_failure": failure}))
    return code


@contextlib.contextmanager
def _log_folder(wanted: Path | None) -> Iterator[str]:
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        yield str(wanted)
        return
    folder = tempfile.mkdtemp(prefix="shoal-launch-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(options: argparse.Namespace, folder: str) -> tuple[int, dict[str, Any] | None]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say it ourselves, shorter
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.nproc,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=options.max_restarts,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL, tee=Std.ALL),
        log_line_prefix_template="[rank ${rank}] ",
    )
    command = [sys.executable, "-u", *(["-m"] if options.module else []), options.script, *options.args]
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode > 0 else 1
        return code, {
            "rank": rank,
            "exit_code": failure.exitcode,
            "signal": _signal(failure),
            "tail": _tail(folder, rank),
        }
    except SignalException as stop:
        print(f"shoal launch: {stop.sigval.name}, all ranks ended", file=sys.stderr)
        return 128 + stop.sigval, None
    return 0, None


def _signal(failure: Any) -> str | None:
    return failure.signal_name() if failure.exitcode < 0 else None


def _tail(folder: str, rank: int) -> list[str]:
    """The last lines of the rank's stderr, or stdout if it said nothing there, in its last attempt."""
    for stream in ("stderr.log", "stdout.log"):
        files = sorted(Path(folder).glob(f"**/{rank}/{stream}"))
        lines = files[-1].read_text(errors="replace").splitlines() if files else []
        if lines:
            return lines[-TAIL_LINES:]
    return []


def _show(failure: dict[str, Any]) -> None:
    how = failure["signal"] or f"exit code {failure['exit_code']}"
    print(
        f"\nshoal launch: rank {failure['rank']} failed first, with {how}; the other ranks were ended", file=sys.stderr
    )
    for line in failure["tail"]:
        print(f"  {line}", file=sys.stderr)
