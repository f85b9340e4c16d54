"""`shoal launch`: N ranks under torchrun's own agent, with a console that shows who says what.

Every line is prefixed with its rank. When a rank fails the others are ended, and all start again if that is allowed,
with a line that says why; else the first failure's last lines are shown at the end. Ctrl-C ends all ranks.
"""

import argparse
import contextlib
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TAIL_LINES = 40

EXAMPLES = """examples:
  shoal launch -n 2 train.py --enable_sync_training
  shoal launch -n 4 -m shoal bench comm
  shoal launch -n 4 --max-restarts 10 -m shoal train ctr.toml
  shoal launch -n 8 --nnodes 2:4 --rdzv-endpoint host0:29400 --allow-insecure -m shoal train ctr.toml  # on each host
"""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="shoal launch",
        description="Starts N ranks of a Python script on this machine, and with --nnodes on others, too. With "
        "--max-restarts a rank that dies is replaced; `shoal train` continues from its last checkpoint.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", "--nproc", type=int, default=2, help="ranks to start (2)")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N",
        help="when a rank fails, start all ranks again, at most this many times (0)",
    )  # fmt: skip
    parser.add_argument(
        "--nnodes", type=_hosts, default=(1, 1), metavar="MIN:MAX",
        help="hosts of the run, each with its own `shoal launch`; it runs with as many as there are (1)",
    )  # fmt: skip
    parser.add_argument(
        "--rdzv-endpoint", default="", metavar="HOST:PORT", help="where the hosts meet; HOST is one of them"
    )
    parser.add_argument("--rdzv-id", default="", metavar="NAME", help="the name of the run, the same on all hosts")
    parser.add_argument("--local-addr", metavar="ADDRESS", help="of this host, for the others (that of its name)")
    parser.add_argument(
        "--allow-insecure", action="store_true",
        help="let hosts meet over a network: torch's ports have no keys, so it must be yours alone",
    )  # fmt: skip
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


def _hosts(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    return int(least), int(most or least)


def main(argv: list[str]) -> int:
    try:
        options = parse(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    from shoal.comm.launch.elastic import Restarts
    from shoal.errors import ConfigError
    from shoal.observe.security import is_loopback

    if options.rdzv_endpoint and not options.allow_insecure and not is_loopback(options.rdzv_endpoint):
        raise ConfigError(
            f"--rdzv-endpoint {options.rdzv_endpoint}: the ports by which torch's ranks exchange have neither keys nor "
            "TLS, so anyone on that network could join the run; pass --allow-insecure if the network is yours alone"
        )
    restarts = Restarts()
    with _log_folder(options.log_dir) as folder:
        code, failure = _run(options, folder, restarts)
        if failure is not None:
            _show(failure)
    if options.json:
        ended = {"exit_code": code, "ranks": options.nproc, "first_failure": failure, "restarts": restarts.reasons}
        print(json.dumps(ended))
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


def _run(options: argparse.Namespace, folder: str, restarts: Any) -> tuple[int, dict[str, Any] | None]:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from shoal.comm.launch.elastic import Launch, run_elastic

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say it ourselves, shorter
    launch = Launch(
        nproc=options.nproc, hosts=options.nnodes, meet=options.rdzv_endpoint, run_id=options.rdzv_id,
        max_restarts=options.max_restarts, address=options.local_addr, log_dir=folder,
    )  # fmt: skip
    command = [sys.executable, "-u", *(["-m"] if options.module else []), options.script, *options.args]
    try:
        run_elastic(launch, command, _tell, restarts)
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
        _tell(f"{stop.sigval.name}, all ranks ended")
        return 128 + stop.sigval, None
    return 0, None


def _tell(text: str) -> None:
    print(f"shoal launch: {text}", file=sys.stderr, flush=True)


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
